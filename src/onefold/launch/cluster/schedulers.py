"""Owns the texts for schedulers: an sbatch script for Slurm, a TrainJob or a JobSet for Kubernetes.

In each, every machine starts `onefold run --node_rank ...`, as over ssh; the scheduler says which machine it is and
where the first one is. Invariant: a text begins with `WRITTEN_BY`, which tells it from a file written by hand.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onefold.errors import LaunchError

WRITTEN_BY = "written by `onefold run`"
_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that a scheduler starts.

    Attributes:
        words: options of `onefold run` that mean the same on every machine, then the script and its arguments.
        gpus: GPUs, and ranks, a machine; 0: none, and `ranks` ranks.
        extra: lines for the scheduler: `--partition=long` and the like.
    """

    name: str
    words: Sequence[str]
    num_nodes: int
    ranks: int
    gpus: int
    grace_s: int
    environment: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    extra: Sequence[str] = ()
    restarts: int = 0


_NAMES = {
    "slurm": (r"[A-Za-z0-9_.+-]+", "letters, digits and _ . + -"),
    "kubernetes": (r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "a lower-case letter, then at most 39 of a-z, 0-9 and -"),
}
_UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""What JSON may hold as it is, and YAML takes for a line break or refuses."""


def check_name(name: str, scheduler: str) -> str:
    """`name`, if the scheduler takes it.

    Raises:
        LaunchError: it does not.
    """
    pattern, words = _NAMES["slurm" if scheduler == "slurm" else "kubernetes"]
    if not re.fullmatch(pattern, name):
        raise LaunchError(f"--job_name {name!r}: --{scheduler} needs {words}")
    return name


def job_name(script: str) -> str:
    """A name that Slurm and Kubernetes both take, from the script's."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def _command(job: Job, python: str, variables: Mapping[str, str]) -> str:
    """The line that a machine's shell runs; `variables` are options whose values the shell knows."""
    known = " ".join(f'--{name} "{value}"' for name, value in variables.items())
    words = shlex.join(["--num_nodes", str(job.num_nodes), "--nproc", str(job.ranks), *job.words])
    return f"exec {shlex.quote(python)} -m onefold run {known} {words}"


def sbatch(job: Job, python: str, folder: Path) -> str:
    """A script for `sbatch`: one task a machine, which starts that machine's ranks."""
    lines = [
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={job.gpus}"] if job.gpus else []),
        "#SBATCH --exclusive",
        f"#SBATCH --signal=TERM@{job.grace_s + 10}",
        *(f"#SBATCH {line}" for line in job.extra),
    ]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    variables = {"node_rank": "$SLURM_NODEID", "master_addr": "$MASTER_ADDR", "master_port": "$MASTER_PORT"}
    return "\n".join(
        [
            "#!/bin/bash",
            f"# A Slurm job, {WRITTEN_BY}. Before its time is up, ranks get SIGTERM and {job.grace_s} s to save.",
            *lines,
            "set -euo pipefail",
            *exports,
            'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
            'export MASTER_PORT="$((20000 + SLURM_JOB_ID % 20000))"',
            f"cd {shlex.quote(str(folder))}",
            # srun gives each task its own number; its shell, not this one, must read it.
            f"srun --kill-on-bad-exit=1 --cpu-bind=none bash -c {shlex.quote(_command(job, python, variables))}",
            "",
        ]
    )


def trainjob(job: Job) -> str:
    """A TrainJob of Kubeflow Trainer for its runtime `torch-distributed`, as YAML."""
    variables = {
        "node_rank": "$PET_NODE_RANK",
        "master_addr": "$PET_MASTER_ADDR",
        "master_port": "$PET_MASTER_PORT",
    }
    trainer = {
        "image": _image(job),
        "numNodes": job.num_nodes,
        "numProcPerNode": job.ranks,
        **({"resourcesPerNode": _resources(job)} if job.gpus else {}),
        "command": _pod_command(job, variables),
        "env": _env(job),
    }
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
    }
    return f"# A Kubeflow TrainJob, {WRITTEN_BY}: kubectl create -f this file\n{_yaml(manifest)}"


def jobset(job: Job) -> str:
    """A JobSet (needs no Kubeflow) with one indexed Job, a pod a machine, as YAML."""
    first = f"{job.name}-node-0-0.{job.name}"
    variables = {"node_rank": "$JOB_COMPLETION_INDEX", "master_addr": first, "master_port": str(_PORT)}
    container = {
        "name": "node",
        "image": _image(job),
        "command": _pod_command(job, variables),
        "env": _env(job),
        **({"resources": _resources(job)} if job.gpus else {}),
    }
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": job.grace_s + 10, "containers": [container]}
    template = {
        "parallelism": job.num_nodes,
        "completions": job.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "failurePolicy": {"maxRestarts": job.restarts},
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": template}}],
        },
    }
    return f"# A JobSet, {WRITTEN_BY}: kubectl create -f this file\n{_yaml(manifest)}"


def _image(job: Job) -> str:
    if not job.image:
        raise LaunchError("Kubernetes needs --image: a container image with Onefold and the script in it")
    return job.image


def _resources(job: Job) -> dict[str, object]:
    return {"limits": {"nvidia.com/gpu": job.gpus}}


def _pod_command(job: Job, variables: Mapping[str, str]) -> list[str]:
    # Kubernetes replaces $(NAME) in commands and values, and $$ by $: doubled, everything arrives as it was written.
    return ["/bin/sh", "-c", _command(job, "python", variables).replace("$", "$$")]


def _env(job: Job) -> list[object]:
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in job.environment.items()]


def _yaml(value: object, indent: int = 0) -> str:
    """YAML in blocks; scalars as JSON, which YAML contains, so that no text is taken for anything else."""
    pad = "  " * indent
    if isinstance(value, Mapping) and value:
        return "".join(f"{pad}{key}:{_below(each, indent + 1)}" for key, each in value.items())
    if isinstance(value, list) and value:
        return "".join(f"{pad}-{_below(each, indent + 1)}" for each in value)
    return f"{pad}{_scalar(value)}\n"


def _below(value: object, indent: int) -> str:
    if isinstance(value, Mapping | list) and value:
        return f"\n{_yaml(value, indent)}"
    return f" {_scalar(value)}\n"


def _scalar(value: object) -> str:
    # Not all escaped: JSON writes what is beyond U+FFFF as two halves, which YAML does not put together again.
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
