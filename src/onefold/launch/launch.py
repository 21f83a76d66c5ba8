"""Owns the ranks of one machine: `torch.distributed.run` starts and watches them, inside this process.

What is added here: the words torchrun is given, each rank's cores, a check of the port, the exit code and last words
of the rank that failed first, and the promise that nothing outlives the run: torchrun ends the ranks, whatever they
started is found by a mark in its environment (`teardown.py`), and a rank whose launcher is killed dies with it
(`start_rank.py`).

[Note: Dollars]
torchrun replaces `${local_rank}` in every word of a script's command line, and `$$` by `$`. So that arguments arrive as
they were written, each `$` is doubled on the way in.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed.run as torchrun
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from onefold.errors import LaunchError
from onefold.launch import failure_report, start_rank, teardown
from onefold.system import affinity, network_interfaces
from onefold.system.cores import threads_each


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What every rank runs. `local_rank`: hand it `--local_rank=N` first, as DeepSpeed's launcher does."""

    path: str
    args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    local_rank: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine's part of a run.

    Attributes:
        devices: the GPUs to show to the ranks; None leaves the choice to the environment.
        num_nodes, min_nodes: with fewer than `num_nodes` machines left, but `min_nodes`, torchrun goes on.
        master: where the ranks meet; None picks a free port of this machine, and needs `num_nodes` to be 1.
        peer: an address of another machine of the run; None: only `master` is known.
        restarts: how often the whole run was started again before this.
        grace_s: how long ranks may take to end after SIGTERM or SIGINT.
        log_dir: each rank writes its own files there; None: everything goes to the screen, each line with its rank.
        cores: the cores to share out; None: all that this process may use; empty: ranks are not bound.
        reports: tell of a failure in a line for the launcher (on stderr), and obey signals that come on stdin.
        silence_s: with `reports`, how long the launcher may be silent before it is taken for gone.
    """

    script: Script
    num_ranks: int
    devices: tuple[str, ...] | None = None
    num_nodes: int = 1
    min_nodes: int = 1
    node_rank: int = 0
    master: tuple[str, int] | None = None
    peer: str | None = None
    restarts: int = 0
    max_restarts: int = 0
    grace_s: int = 30
    log_dir: Path | None = None
    cores: tuple[int, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    reports: bool = False
    silence_s: int = 60

    @property
    def elastic(self) -> bool:
        """Ranks may be started again, or machines be lost: their numbers are then torchrun's to give."""
        return self.max_restarts > 0 or self.min_nodes < self.num_nodes

    @property
    def to_screen(self) -> bool:
        """A single rank without a log folder keeps the terminal itself: progress bars and debuggers work."""
        return self.log_dir is None and self.num_ranks * self.num_nodes < 2 and not self.reports


def num_gpus() -> int:
    """How many GPUs this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def torchrun_words(node: Node, log_dir: Path, *, launcher: int) -> list[str]:
    """The command line for `torch.distributed.run`, the script and its arguments included. Ranks die with the process
    `launcher`; 0 for none."""
    words = [f"--nproc-per-node={node.num_ranks}", f"--max-restarts={node.max_restarts}", "--monitor-interval=0.1"]
    if node.master is None:
        words += ["--standalone", "--local-addr=127.0.0.1"]  # the machine's own name may mean nothing to itself
    else:
        words += _meeting(node, *node.master)
    words.append(f"--log-dir={log_dir}")
    if not node.to_screen:
        words.append("--tee=3" if node.log_dir is None else "--redirects=3")
    return [*words, "--no-python", "--", sys.executable, *_rank_words(node, launcher)]


def _meeting(node: Node, address: str, port: int) -> list[str]:
    if not node.elastic:  # ranks are numbered in the order of the machines
        static = ("--rdzv-backend=static", f"--node-rank={node.node_rank}")
        return [f"--nnodes={node.num_nodes}", *static, f"--master-addr={address}", f"--master-port={port}"]
    return [
        f"--nnodes={node.min_nodes}:{node.num_nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={address}:{port}",
        "--rdzv-id=onefold",
        f"--rdzv-conf=is_host={int(node.node_rank == 0)}",
    ]


def _rank_words(node: Node, launcher: int) -> list[str]:
    """What torchrun starts as each rank, from the words after the interpreter on. [Note: Dollars]"""
    script = node.script
    words = [] if script.no_python else [sys.executable, "-u"]
    words += ["-m", script.path] if script.module else [script.path]
    args = [word.replace("$", "$$") for word in (*words, *script.args)]
    if script.local_rank:
        args.insert(len(words), "--local_rank=${local_rank}")
    cores = ";".join(",".join(map(str, mine)) for mine in cores_of_ranks(node))
    return ["-I", "-S", start_rank.__file__, "${local_rank}", str(launcher), str(node.restarts), cores, *args]


def cores_of_ranks(node: Node) -> list[tuple[int, ...]]:
    """Each local rank's cores; empty ones where ranks are not bound."""
    if node.cores == ():
        return [()] * node.num_ranks
    allowed = os.sched_getaffinity(0)
    wanted = allowed if node.cores is None else allowed.intersection(node.cores)
    if not wanted:
        raise LaunchError(f"none of the cores {list(node.cores or ())} is this process's; it has {sorted(allowed)}")
    return affinity.share(affinity.read_cores(wanted), _numa_nodes(node))


def _numa_nodes(node: Node) -> list[int | None]:
    """The NUMA node of each local rank's GPU; None where there is no such GPU, or the system does not tell."""
    if not torch.cuda.is_available() or node.num_ranks > torch.cuda.device_count():
        return [None] * node.num_ranks
    found: list[int | None] = []
    for index in range(node.num_ranks):
        gpu = torch.cuda.get_device_properties(index)
        domain, bus, slot = (getattr(gpu, f"pci_{name}_id", -1) for name in ("domain", "bus", "device"))
        place = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        path = Path("/sys/bus/pci/devices") / place / "numa_node"
        number = int(path.read_text(encoding="ascii")) if path.exists() else -1
        found.append(None if number < 0 else number)
    return found


def prepare(node: Node) -> dict[str, str]:
    """Put what every rank is to find in its environment into this process's, and return it."""
    added = dict(node.environment)
    if node.devices is not None:
        added["CUDA_VISIBLE_DEVICES"] = ",".join(node.devices)
    os.environ.update(added)  # before anything asks for GPUs
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # Kubeflow's defaults for torchrun, which would join in with the words it is given here
    added["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank ${rank}] "
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun would say 1, and say so
        added["OMP_NUM_THREADS"] = str(_threads(node))
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # States, activations and gathered units differ in size: else none could take the place of another.
        added["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if node.elastic:
        # torch 2.13 keeps one store for all attempts, where ranks find the addresses of those of the attempt before.
        added["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if node.master is not None and node.num_nodes > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = network_interfaces.leading_to(node.peer or node.master[0])
        added |= {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    os.environ.update(added)
    return added


def _threads(node: Node) -> int:
    """Computing threads of a rank: its physical cores, within what its container may use; unbound ranks get one."""
    cores = cores_of_ranks(node)
    fewest = min(len(affinity.read_cores(mine)) for mine in cores)
    return max(1, min(fewest, threads_each(node.num_ranks)))


def run_ranks(node: Node) -> int:
    """Run this machine's ranks to their end; the exit code is the first failing rank's, or 128 plus a signal's.

    Raises:
        LaunchError: the port is in use, or what was asked for cannot be bound or started.
    """
    _check_script(node.script)
    prepare(node)
    if node.master is not None and node.node_rank == 0:
        check_port(node.master[1])
    mark = uuid.uuid4().hex
    os.environ[teardown.RUN_VARIABLE] = mark
    if node.reports:
        _obey_stdin(node.silence_s)
    with _log_folder(node) as folder, teardown.signals(_signalled):
        code = _run(node, folder)
        if code:
            teardown.end_leftovers(mark)
    return code


def _signalled(number: signal.Signals) -> SignalException:
    return SignalException(f"got {number.name}", sigval=number)


def _is_news(record: logging.LogRecord) -> bool:
    """Not what is said here anyway, in better words, and would stand after a rank's traceback."""
    return not str(record.msg).startswith(("failed (exitcode", "Sending process %s closing signal"))


def _run(node: Node, folder: Path) -> int:
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_is_news)
    parsed = torchrun.parse_args(torchrun_words(node, folder, launcher=os.getpid()))
    if not hasattr(parsed, "shutdown_timeout") and node.grace_s != 30:
        print("onefold run: this torch gives ranks 30 s to end; --grace needs a newer one", file=sys.stderr)
    parsed.shutdown_timeout = node.grace_s
    parsed.signals_to_handle = "SIGQUIT"  # the others are handled in teardown.py, which torchrun would replace
    try:
        torchrun.run(parsed)
    except ChildFailedError as error:
        failed = failure_report.first(
            {rank: (end.exitcode, _stderr(folder, end.local_rank)) for rank, end in _ends(error)}
        )
        _tell(node, failed)
        return failed.code
    except SignalException as error:
        if not node.reports:
            print(f"onefold run: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    except (DistError, RendezvousError) as error:
        raise LaunchError(f"the machines of the run did not meet at {node.master}: {error}") from error
    return 0


def _ends(error: ChildFailedError) -> list[tuple[int, Any]]:
    return list(error.failures.items())


def _tell(node: Node, failed: failure_report.Failure) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if node.reports:
        sys.stderr.buffer.write(failed.encode())
    elif not node.to_screen or failed.signal:
        sys.stderr.write(failed.text())
    sys.stderr.flush()


def _stderr(folder: Path, local_rank: int) -> Path | None:
    """The file with the stderr of a rank's last attempt: torchrun writes <run>/attempt_<n>/<local rank>/stderr.log."""
    found = sorted(folder.glob(f"*/attempt_*/{local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime_ns)
    return found[-1] if found else None


@contextlib.contextmanager
def _log_folder(node: Node) -> Iterator[Path]:
    if node.log_dir is not None:
        node.log_dir.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="run-", dir=node.log_dir)
        print(f"onefold run: each rank writes to its own files in {folder}", file=sys.stderr)
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="onefold-run-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _check_script(script: Script) -> None:
    if not script.module and not script.no_python and not Path(script.path).exists():
        raise LaunchError(f"there is no script {script.path} in {Path.cwd()}; -m runs a module, --no_python a program")


def check_port(port: int) -> None:
    """Make sure that ranks can meet at a port of this machine.

    Raises:
        LaunchError: it is in use; by which process, where that can be seen.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} of this machine cannot be used ({error.strerror}){_owner(port)}; choose another with "
                "--master_port, or leave it out to have a free one picked"
            ) from error


def _owner(port: int) -> str:
    try:
        holders = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid]
        process = psutil.Process(holders[0].pid)
        return f"; process {process.pid} has it: {' '.join(process.cmdline())[:100]}"
    except (psutil.Error, IndexError):  # it is another user's, or gone
        return ""


def _obey_stdin(silence_s: int) -> None:
    """Let the launcher at the other end of stdin send signals, by name, a line each; an empty line says that it is
    there. Its end, or a long silence, is a SIGTERM: when ssh, the launcher or the connection dies, nothing of the run
    stays on this machine. Ranks get an empty stdin."""
    commands = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def obey() -> None:
        rest = b""
        while select.select([commands], [], [], silence_s)[0]:
            read = os.read(commands, 1 << 10)
            if not read:
                break
            *lines, rest = (rest + read).split(b"\n")
            for name in filter(None, (line.decode().strip() for line in lines)):
                os.kill(os.getpid(), signal.Signals[name])
        else:
            print(f"onefold run: nothing from the launcher for {silence_s} s; ending", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=obey, daemon=True).start()
