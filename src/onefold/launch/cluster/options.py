"""Owns the options of `onefold run`: names, defaults and help.

They are those of DeepSpeed's launcher and a few more, each in both spellings (`--master_addr`, `--master-addr`).
Invariant: an option is obeyed or refused with the reason; none is read and forgotten. `request.py` says what they mean.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer


def _spelled(*names: str) -> list[str]:
    """Both spellings of each name: short ones (`m`) as they are."""
    found = []
    for name in names:
        found += [f"-{name}"] if len(name) == 1 else [f"--{name}"]
        if "_" in name:
            found.append(f"--{name.replace('_', '-')}")
    return found


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*_spelled(*names), help=text, show_default=False, **more)


def _switch(text: str, *names: str) -> Any:
    """On by each of `names`, off by each with `no_` before it."""
    pairs = [zip(_spelled(name), _spelled(f"no_{name}"), strict=True) for name in names]
    return typer.Option(*("/".join(pair) for found in pairs for pair in found), help=text, show_default=False)


def _hidden(*names: str, **more: Any) -> Any:
    return _option("", *names, hidden=True, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option of `onefold run`; the command line is made from these fields."""

    # which machines, and how many ranks on each
    hostfile: Annotated[
        Path | None, _option("Machines, one a line: `NAME slots=NUMBER`. Without it: this machine.", "hostfile", "H")
    ] = None
    include: Annotated[
        str, _option("Hosts and slots to use: NAME[:SLOT,...][@NAME...], e.g. worker-0@worker-1:0,2.", "include", "i")
    ] = ""
    exclude: Annotated[str, _option("Hosts and slots not to use, written alike.", "exclude", "e")] = ""
    num_nodes: Annotated[
        int | None, _option("Number of machines: the first of the hostfile.", "num_nodes", "nnodes")
    ] = None
    num_gpus: Annotated[
        int | None, _option("GPUs, and ranks, on each machine: the first ones.", "num_gpus", "num_accelerators")
    ] = None
    nproc: Annotated[
        int | None,
        _option("Ranks on each machine. Without it: one a GPU, or one in all.", "nproc", "nproc_per_node", min=1),
    ] = None
    min_nodes: Annotated[
        int | None,
        _option("Go on (with --max_restarts) while this many machines are left.", "min_nodes", "min_elastic_nodes"),
    ] = None
    # where ranks meet, and how machines are reached
    master_addr: Annotated[
        str, _option("Address of the first machine. Without it: its name in the hostfile.", "master_addr")
    ] = ""
    master_port: Annotated[
        int | None, _option("Port there. Without it: a free one.", "master_port", min=1, max=65535)
    ] = None
    node_rank: Annotated[
        int | None, _option("Start this machine's part only, as this number of --num_nodes.", "node_rank", min=-1)
    ] = None
    no_ssh: Annotated[
        bool, _option("With a hostfile: start this machine's part only (give --node_rank).", "no_ssh")
    ] = False
    ssh_command: Annotated[
        str, _option("What reaches a machine: run with its name and a command line.", "ssh_command")
    ] = "ssh"
    ssh_port: Annotated[int | None, _option("Port of ssh.", "ssh_port", min=1, max=65535)] = None
    force_multi: Annotated[bool, _option("Use ssh even where the only host is this machine.", "force_multi")] = False
    env: Annotated[
        list[str], _option("A variable for every rank: NAME=VALUE, or NAME as it is here. Repeat it.", "env")
    ] = field(default_factory=list)
    # the script
    module: Annotated[bool, _option("SCRIPT is a module, as for `python -m`.", "module", "m")] = False
    no_python: Annotated[bool, _option("SCRIPT is a program.", "no_python")] = False
    local_rank: Annotated[
        bool | None,
        _switch(
            "Hand SCRIPT --local_rank=N. Without either: if its arguments have --deepspeed, as DeepSpeed's launcher.",
            "local_rank",
        ),
    ] = None
    # its life
    max_restarts: Annotated[
        int, _option("Start all ranks again after a failure, this many times.", "max_restarts", min=0)
    ] = 0
    grace: Annotated[
        int, _option("Seconds ranks have to end after SIGTERM or Ctrl-C, to save; then SIGKILL. [30]", "grace", min=0)
    ] = 30
    log_dir: Annotated[
        Path | None, _option("Write each rank's output to files there.", "log_dir", "enable_each_rank_log")
    ] = None
    bind_cores: Annotated[
        bool,
        _switch("Give each rank cores of its own, near its GPU [on].", "bind_cores", "bind_cores_to_rank"),
    ] = True
    bind_core_list: Annotated[str, _option("Share out these cores only: 0-15,32-47.", "bind_core_list")] = ""
    # schedulers
    slurm: Annotated[bool, _option("Write an sbatch script instead of starting anything.", "slurm")] = False
    kubernetes: Annotated[bool, _option("Write a TrainJob for Kubeflow Trainer instead.", "kubernetes")] = False
    jobset: Annotated[bool, _option("Write a Kubernetes JobSet instead.", "jobset")] = False
    output: Annotated[str, _option("The file to write; - for the screen. [NAME.sbatch, NAME.yaml]", "output")] = ""
    submit: Annotated[bool, _option("Hand what was written to sbatch or kubectl.", "submit")] = False
    job_name: Annotated[str, _option("The job's name. Without it: the script's.", "job_name")] = ""
    image: Annotated[str, _option("The container image, for Kubernetes.", "image")] = ""
    sbatch: Annotated[list[str], _option("A line for sbatch: --sbatch=--partition=long. Repeat it.", "sbatch")] = field(
        default_factory=list
    )
    dry_run: Annotated[bool, _option("Print what would be started.", "dry_run")] = False
    # DeepSpeed's, of less use here
    account: Annotated[str, _hidden("account")] = ""
    comment: Annotated[str, _hidden("comment")] = ""
    launcher: Annotated[str, _hidden("launcher")] = ""
    launcher_args: Annotated[str, _hidden("launcher_args")] = ""
    elastic_training: Annotated[bool, _hidden("elastic_training")] = False
    max_elastic_nodes: Annotated[int | None, _hidden("max_elastic_nodes")] = None
    autotuning: Annotated[str, _hidden("autotuning")] = ""
    save_pid: Annotated[bool, _hidden("save_pid")] = False
    no_ssh_check: Annotated[bool, _hidden("no_ssh_check")] = False
    venv_script: Annotated[str, _hidden("venv_script")] = ""
    log_level: Annotated[str, _hidden("log_level")] = "info"
    quiet: Annotated[bool, _hidden("q", "quiet")] = False
    # what the launcher tells a node
    as_node: Annotated[bool, _hidden("as_node")] = False
    peer: Annotated[str, _hidden("peer")] = ""
    restarts: Annotated[int, _hidden("restarts")] = 0
    silence: Annotated[int, _hidden("silence")] = 60
    devices: Annotated[str, _hidden("devices")] = ""

    @property
    def scheduler(self) -> str:
        """The scheduler to write for, or nothing."""
        return "slurm" if self.slurm else "kubernetes" if self.kubernetes else "jobset" if self.jobset else ""
