"""Owns what the options of `onefold run` mean together: which ranks on which machines, and how they are started.

Invariant: a contradiction is refused before anything is started, and nothing is chosen silently that the options leave
open but for what `onefold run --help` says.
"""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onefold.errors import LaunchError
from onefold.launch import launch
from onefold.launch.cluster import env_forwarding, hostfile, preflight, restarts, schedulers
from onefold.launch.cluster.hostfile import Machine
from onefold.launch.cluster.options import Options
from onefold.launch.cluster.restarts import Cluster
from onefold.launch.launch import Node, Script
from onefold.system import affinity
from onefold.system.environment import environ

_CLUSTER_HOSTFILE = Path("/job/hostfile")
"""Where DeepSpeed's launcher looks when no hostfile is given."""
_REFUSED = (
    ("launcher_args", "there is no other launcher underneath to hand them to; see --ssh_command"),
    (
        "elastic_training",
        "give --max_restarts and --min_nodes instead; ranks then start again on the machines that are left",
    ),
    ("max_elastic_nodes", "--num_nodes is the largest number; see --min_nodes and --max_restarts"),
    ("autotuning", "Onefold has no autotuner; onefold.predicted computes the memory of a plan"),
    ("venv_script", "ranks run under the Python that runs `onefold run`; start it from that environment"),
    ("save_pid", "the launcher's process id is that of `onefold run` itself: `echo $!`"),
)
_LEVELS = ("debug", "info", "warning", "error", "critical")


def start_run(options: Options, path: str, args: Sequence[str]) -> int:
    """Do what `onefold run` was asked for; the exit code.

    Raises:
        LaunchError: what was asked for makes no sense, or cannot be started.
    """
    options = _plain(options)
    _check(options)
    script = _script(options, path, tuple(args))
    if options.scheduler:
        return _schedule(options, script)
    hosts = _hosts(options)
    if options.node_rank is not None or hosts is None or _only_here(options, hosts):
        return _start_here(options, _here(options, script, hosts))
    return _start_there(options, script, hosts)


def _plain(options: Options) -> Options:
    """As DeepSpeed's launcher reads them: -1 is not given, and a launcher may be written in capitals."""
    names = ("num_nodes", "num_gpus", "node_rank", "max_elastic_nodes", "min_nodes")
    left_out = {name: None for name in names if getattr(options, name) == -1}
    return replace(options, launcher=options.launcher.lower(), **left_out)  # type: ignore[arg-type]  # each may be None


def _check(options: Options) -> None:
    for name, reason in _REFUSED:
        if getattr(options, name):
            raise LaunchError(f"--{name}: {reason}")
    if options.launcher not in ("", "pdsh", "ssh", "torchrun"):
        way = "--slurm writes a Slurm job" if options.launcher == "slurm" else "leave it out: machines need only ssh"
        raise LaunchError(
            f"--launcher {options.launcher}: machines are reached by ssh, ranks started by torchrun; {way}"
        )
    _check_values(options)
    if options.num_gpus is not None and options.nproc is not None:
        raise LaunchError("--num_gpus and --nproc both say how many ranks a machine has; give one")
    if options.module and options.no_python:
        raise LaunchError("--module and --no_python contradict each other")
    if sum((options.slurm, options.kubernetes, options.jobset)) > 1:
        raise LaunchError("--slurm, --kubernetes and --jobset: give one")
    if not options.scheduler:
        _check_no_scheduler(options)
    if options.no_ssh and options.node_rank is None:
        raise LaunchError("--no_ssh starts this machine's part only: say which with --node_rank")
    if options.bind_core_list and not options.bind_cores:
        raise LaunchError("--bind_core_list and --no_bind_cores contradict each other")
    if options.min_nodes is not None and options.min_nodes < 1:
        raise LaunchError(f"--min_nodes {options.min_nodes}: at least one machine has to be left")


def _check_values(options: Options) -> None:
    if options.log_level not in _LEVELS:
        raise LaunchError(f"--log_level {options.log_level}: expected one of {', '.join(_LEVELS)}")
    for name, number in (("num_nodes", options.num_nodes), ("num_gpus", options.num_gpus)):
        if number is not None and number < 1:
            raise LaunchError(f"--{name} {number}: expected at least 1; leave it out for all there are")


def _check_no_scheduler(options: Options) -> None:
    for name in ("output", "submit", "job_name", "image", "sbatch", "account", "comment"):
        if getattr(options, name):
            raise LaunchError(f"--{name} needs --slurm, --kubernetes or --jobset")


def _script(options: Options, path: str, args: tuple[str, ...]) -> Script:
    wanted = options.local_rank
    if wanted is None:  # what DeepSpeed's launcher does for every script breaks those that parse their arguments
        flags = {word.partition("=")[0] for word in args}
        wanted = bool(flags & {"--deepspeed", "--deepspeed_config"}) and not flags & {"--local_rank", "--local-rank"}
    return Script(path=path, args=args, module=options.module, no_python=options.no_python, local_rank=wanted)


def _tell(options: Options, text: str) -> None:
    """Say what is good to know, unless only warnings are wanted."""
    if options.log_level in ("debug", "info") and not options.quiet:
        print(f"onefold run: {text}", file=sys.stderr)


# --- which machines


def _hosts(options: Options) -> list[Machine] | None:
    """The hosts of the hostfile that are to be used; None without a hostfile."""
    path = options.hostfile
    if path is None and not options.as_node and _CLUSTER_HOSTFILE.exists():
        path = _CLUSTER_HOSTFILE
        _tell(options, f"the hosts are those of {path}, as for DeepSpeed's launcher")
    if path is None:
        return None
    num_gpus = options.num_gpus if options.nproc is None else options.nproc
    return hostfile.choose(
        hostfile.read_hostfile(path),
        include=options.include,
        exclude=options.exclude,
        num_nodes=options.num_nodes,
        num_gpus=num_gpus,
    )


def _only_here(options: Options, hosts: Sequence[Machine]) -> bool:
    here = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}
    return len(hosts) == 1 and hosts[0].name in here and not options.force_multi


def _base(options: Options, script: Script) -> Node:
    """What does not depend on the machine."""
    cores = affinity.parse_cores(options.bind_core_list) if options.bind_core_list else None
    return Node(
        script=script,
        num_ranks=1,
        max_restarts=options.max_restarts,
        grace_s=options.grace,
        log_dir=options.log_dir,
        cores=cores if options.bind_cores else (),
        environment=_environment(options),
        reports=options.as_node,
    )


def _environment(options: Options) -> dict[str, str]:
    if options.as_node:  # it came over ssh
        return {}
    here = environ()
    found: dict[str, str] = {}
    for path in env_forwarding.env_files(here.get("DS_ENV_FILE", ".deepspeed_env"), [Path.home(), Path.cwd()]):
        read = env_forwarding.read_env_file(path)
        _tell(options, f"{len(read)} variables from {path}: {', '.join(read)}")
        found |= read
    return found | env_forwarding.given(options.env, here)


# --- on this machine


def _here(options: Options, script: Script, hosts: Sequence[Machine] | None) -> Node:
    num_nodes = len(hosts) if hosts is not None else options.num_nodes or 1
    rank = options.node_rank or 0
    if options.node_rank is None and num_nodes > 1:
        raise LaunchError(
            f"--num_nodes {num_nodes} needs a --hostfile; or start each machine's part there, with --node_rank, "
            "--master_addr and --master_port"
        )
    if rank >= num_nodes:
        raise LaunchError(f"--node_rank {rank}: with {num_nodes} machine(s) it is 0 to {num_nodes - 1}")
    node = replace(
        _base(options, script),
        num_nodes=num_nodes,
        min_nodes=_min_nodes(options, num_nodes),
        node_rank=rank,
        master=_master_here(options, num_nodes),
        peer=options.peer or None,
        restarts=options.restarts,
        silence_s=options.silence,
    )
    if hosts is not None:
        slots = hosts[rank].slots
        return replace(node, num_ranks=len(slots), devices=tuple(map(str, slots)))
    num_ranks, devices = _local_ranks(options)
    return replace(node, num_ranks=num_ranks, devices=devices)


def _master_here(options: Options, num_nodes: int) -> tuple[str, int] | None:
    if num_nodes < 2 and options.master_port is None:
        return None
    if num_nodes > 1 and not (options.master_addr and options.master_port):
        raise LaunchError("--node_rank needs --master_addr and --master_port, the same on every machine")
    return options.master_addr or "127.0.0.1", options.master_port or 0


def _min_nodes(options: Options, num_nodes: int) -> int:
    least = num_nodes if options.min_nodes is None else options.min_nodes
    if least > num_nodes:
        raise LaunchError(f"--min_nodes {least}: there are {num_nodes} machine(s)")
    if least < num_nodes and not options.max_restarts:
        raise LaunchError(f"--min_nodes {least} needs --max_restarts: to go on with fewer machines is to start again")
    return least


def _local_ranks(options: Options) -> tuple[int, tuple[str, ...] | None]:
    """(number of ranks, the GPUs to show to them or None for what the environment shows) without a hostfile."""
    if options.devices:
        devices = tuple(options.devices.split(","))
        return options.nproc or len(devices), devices
    visible = environ().get("CUDA_VISIBLE_DEVICES")
    if options.include or options.exclude:
        if visible is not None:
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={visible} and --include or --exclude both choose GPUs, and number them "
                "differently; unset the one or leave out the other"
            )
        # Without GPUs a slot is a core: somewhere for a rank to run.
        place = Machine("localhost", tuple(range(launch.num_gpus() or len(os.sched_getaffinity(0)))))
        (chosen,) = hostfile.choose(
            [place], include=options.include, exclude=options.exclude, num_gpus=options.num_gpus or options.nproc
        )
        return len(chosen.slots), tuple(map(str, chosen.slots))
    if options.nproc is not None:
        return options.nproc, None
    gpus = launch.num_gpus()
    if options.num_gpus is None:
        return gpus or 1, None
    if options.num_gpus < 1 or (gpus and options.num_gpus > gpus):
        raise LaunchError(f"--num_gpus {options.num_gpus}: this machine shows {gpus} GPU(s); --nproc starts more ranks")
    names = visible.split(",") if visible else [str(index) for index in range(options.num_gpus)]
    return options.num_gpus, tuple(names[: options.num_gpus])


def _start_here(options: Options, node: Node) -> int:
    if not options.dry_run:
        return launch.run_ranks(node)
    shown = launch.prepare(node)
    words = launch.torchrun_words(node, node.log_dir or Path("/tmp/onefold-run"), launcher=0)
    print(shlex.join(["env", *(f"{name}={value}" for name, value in shown.items())]) + " \\")
    print(shlex.join([sys.executable, "-m", "torch.distributed.run", *words]))
    return 0


# --- on the machines of a hostfile


def _start_there(options: Options, script: Script, hosts: Sequence[Machine]) -> int:
    cluster = _cluster(options, script, hosts)
    if not options.dry_run:
        return restarts.run_attempts(cluster)
    for words in restarts.first_commands(cluster).values():
        print(shlex.join(words))
    return 0


def _cluster(options: Options, script: Script, hosts: Sequence[Machine]) -> Cluster:
    base = replace(_base(options, script), max_restarts=0)  # the launcher starts all machines again, not each its own
    here = environ()
    path = os.pathsep.join(filter(None, (str(Path.cwd()), here.get("PYTHONPATH"))))  # as DeepSpeed's launcher
    travel = {**env_forwarding.forwarded(here), "PYTHONPATH": path, **base.environment}
    return Cluster(
        parts={
            host.name: replace(base, num_ranks=len(host.slots), devices=tuple(map(str, host.slots)), environment=travel)
            for host in hosts
        },
        ssh=preflight.ssh_words(options.ssh_command, options.ssh_port),
        folder=Path.cwd(),
        min_nodes=_min_nodes(options, len(hosts)),
        max_restarts=options.max_restarts,
        master=(options.master_addr or None, options.master_port),
    )


# --- by a scheduler


def _schedule(options: Options, script: Script) -> int:
    for name in ("hostfile", "include", "exclude", "master_addr", "master_port", "node_rank", "no_ssh", "min_nodes"):
        if getattr(options, name):
            raise LaunchError(f"--{name} and --{options.scheduler}: the scheduler chooses the machines")
    ranks = options.nproc or options.num_gpus
    if not ranks:
        raise LaunchError(f"--{options.scheduler} needs --num_gpus (or --nproc without GPUs): ranks on each machine")
    job = schedulers.Job(
        name=schedulers.check_name(options.job_name or schedulers.job_name(script.path), options.scheduler),
        words=_words(options, script),
        num_nodes=options.num_nodes or 1,
        ranks=ranks,
        gpus=options.num_gpus or 0,
        grace_s=options.grace,
        environment=_environment(options),
        image=options.image,
        extra=_sbatch_lines(options),
        restarts=options.max_restarts,
    )
    if options.slurm:
        return _write(options, schedulers.sbatch(job, sys.executable, Path.cwd()), f"{job.name}.sbatch", ["sbatch"])
    text = schedulers.trainjob(job) if options.kubernetes else schedulers.jobset(job)
    return _write(options, text, f"{job.name}.yaml", ["kubectl", "create", "-f"])


def _sbatch_lines(options: Options) -> list[str]:
    named = (("account", options.account), ("comment", options.comment))
    lines = [*options.sbatch, *(f"--{name}={shlex.quote(value)}" for name, value in named if value)]
    for line in lines:
        if not line.startswith("-") or len(line.splitlines()) != 1:
            raise LaunchError(f"--sbatch {line!r}: expected one line with an option of sbatch, e.g. --partition=long")
    return lines


def _words(options: Options, script: Script) -> list[str]:
    """What each machine's `onefold run` is told, but for the machine's number."""
    words = [f"--grace={options.grace}", f"--max_restarts={options.max_restarts}"]
    words += [f"--log_dir={options.log_dir}"] if options.log_dir else []
    words += [f"--bind_core_list={options.bind_core_list}"] if options.bind_core_list else []
    flags = (("--no_bind_cores", not options.bind_cores), ("-m", script.module), ("--no_python", script.no_python))
    words += [flag for flag, on in flags if on]
    return [*words, "--local_rank" if script.local_rank else "--no_local_rank", script.path, *script.args]


def _write(options: Options, text: str, default: str, submit: Sequence[str]) -> int:
    if options.dry_run or options.output == "-":
        if options.submit:
            raise LaunchError("--submit needs a file; leave out --dry_run and --output -")
        print(text, end="")
        return 0
    path = Path(options.output or default)
    if path.exists() and schedulers.WRITTEN_BY not in path.read_text(encoding="utf-8", errors="replace"):
        raise LaunchError(f"{path} is there and was not written by this command; give another name with --output")
    path.write_text(text, encoding="utf-8")
    command = [*submit, str(path)]
    if not options.submit:
        print(f"wrote {path}; start it with: {shlex.join(command)}")
        return 0
    try:
        return subprocess.run(command).returncode
    except FileNotFoundError as error:
        raise LaunchError(f"wrote {path}, but there is no {submit[0]} here to submit it with") from error
