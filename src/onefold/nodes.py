"""Owns a run on several machines: one `onefold run --as_node` on each, started over ssh, watched from here.

Invariant: when this process ends, however it ends, so do the ranks on every machine. Each node reads signals from its
stdin and takes its end for SIGTERM; ssh closes it when the launcher, or the connection, is gone.
"""

import contextlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from onefold.errors import LaunchError
from onefold.failure import MARK, Failure, shell_code
from onefold.launch import Node

_MARGIN_S = 10
"""How long a node may take beyond the grace it gives its ranks."""
_SSH_FAILED = 255
# Prints an address and a free port of the machine it runs on. An alias of ~/.ssh/config means nothing to others.
_MEETING = """
import socket, sys
address = sys.argv[1]
try:
    socket.getaddrinfo(address, None)
except OSError:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address = probe.getsockname()[0]
with socket.socket() as probe:
    probe.bind(("", 0))
    print(address, probe.getsockname()[1])
"""


def remote_line(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """One line for the shell at the other end, which takes it apart into `words` again, whatever is in them."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    return f"cd {shlex.quote(str(folder))} && exec {shlex.join(['env', *variables, *words])}"


def node_words(node: Node) -> list[str]:
    """The command line that makes a machine run its part of a run."""
    words = ["run", "--as_node", f"--num_nodes={node.num_nodes}", f"--min_nodes={node.min_nodes}"]
    words += [f"--node_rank={node.node_rank}", f"--nproc={node.num_ranks}", f"--run_id={node.run_id}"]
    if node.master is not None:
        words += [f"--master_addr={node.master[0]}", f"--master_port={node.master[1]}"]
    if node.name is not None:
        words.append(f"--node_name={node.name}")
    if node.devices is not None:
        words.append(f"--devices={','.join(node.devices)}")
    if node.log_dir is not None:
        words.append(f"--log_dir={node.log_dir}")
    words += [f"--max_restarts={node.max_restarts}", f"--grace={node.grace_s}"]
    if node.cores is not None:
        words.append(f"--bind_core_list={','.join(map(str, node.cores))}" if node.cores else "--no_bind_cores")
    script = node.script
    words.append("--local_rank" if script.local_rank else "--no_local_rank")
    words += [flag for flag, on in (("--module", script.module), ("--no_python", script.no_python)) if on]
    return [sys.executable, "-m", "onefold", *words, script.path, *script.args]


def meeting(ssh: Sequence[str], host: str) -> tuple[str, int]:
    """An address of `host` that other machines know, and a port that is free there.

    Raises:
        LaunchError: ssh does not get there, or Python does not run there.
    """
    name = host.rpartition("@")[2]
    line = shlex.join([sys.executable, "-I", "-S", "-c", _MEETING, name])
    try:
        asked = subprocess.run([*ssh, host, line], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        raise LaunchError(f"cannot run {ssh[0]}: {error.strerror}") from error
    found = asked.stdout.split()
    if asked.returncode or len(found) < 2 or not found[-1].isdigit():
        raise LaunchError(
            f"{host} did not tell a free port (exit code {asked.returncode}); `{shlex.join([*ssh, host])}` must log in "
            f"without a password, and {sys.executable} must be there. It said: {(asked.stderr or asked.stdout).strip()}"
        )
    return found[-2], int(found[-1])


def commands(nodes: Sequence[tuple[str, Node]], ssh: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """{host: the command that starts its part of the run}. `nodes` are in the order of their ranks."""
    return {
        host: [*ssh, host, remote_line(node_words(replace(node, node_rank=rank)), node.environment, folder)]
        for rank, (host, node) in enumerate(nodes)
    }


class _Remote:
    """One machine's part: its ssh process, and threads that carry its output to the screen."""

    def __init__(self, host: str, words: Sequence[str], events: "SimpleQueue[_Event]", screen: threading.Lock) -> None:
        self.host, self.failed_at, self._screen = host, 0.0, screen
        self.failure: Failure | None = None
        pipe = subprocess.PIPE
        # In a session of its own: Ctrl-C at the terminal must reach the ranks through their node, not kill ssh.
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        streams = ((self.process.stdout, sys.stdout.buffer), (self.process.stderr, sys.stderr.buffer))
        self._pumps = [threading.Thread(target=self._pump, args=pair, daemon=True) for pair in streams]
        threading.Thread(target=self._wait, args=(events,), daemon=True).start()

    def send(self, name: str) -> None:
        """Have the node send itself a signal."""
        with contextlib.suppress(OSError, ValueError):  # it has ended
            if self.process.stdin is not None:
                self.process.stdin.write(f"{name}\n".encode())
                self.process.stdin.flush()

    def _wait(self, events: "SimpleQueue[_Event]") -> None:
        for pump in self._pumps:
            pump.start()
        code = self.process.wait()
        for pump in self._pumps:  # something left behind there may hold the pipes open
            pump.join(timeout=2)
        if code and self.failure is None:
            self.failed_at = time.monotonic()
        events.put((self, code))

    def _pump(self, source: IO[bytes], screen: IO[bytes]) -> None:
        for line in iter(source.readline, b""):
            if line.startswith(MARK):
                self.failure = Failure.decode(line)
                self.failed_at = time.monotonic() - self.failure.ago_s
                continue
            with self._screen, contextlib.suppress(BrokenPipeError):  # `| head`: read on, or the ranks would wait
                screen.write(line)
                screen.flush()

    def last_words(self, code: int) -> str:
        if self.failure is not None:
            return self.failure.text(f" on {self.host}")
        how = "ssh failed, or lost the machine" if code == _SSH_FAILED else "its messages are above"
        return f"onefold run: {self.host} ended with code {shell_code(code)}; {how}\n"


_Event = tuple[_Remote | None, int]
"""(a machine, its exit code), or (None, a signal that this process got)."""


def run(commands: Mapping[str, Sequence[str]], *, min_nodes: int, grace_s: int) -> int:
    """Run {host: command} to the end; the exit code is the first failing rank's, or 128 plus a signal's. Machines may
    be lost as long as `min_nodes` are left."""
    events: SimpleQueue[_Event] = SimpleQueue()
    screen = threading.Lock()
    with _signals(events):
        remotes = [_Remote(host, words, events, screen) for host, words in commands.items()]
        ended, signalled = _watch(remotes, events, min_nodes, grace_s)
    failed = {remote: code for remote, code in ended.items() if code}
    if signalled:
        print(f"onefold run: ended by {signal.Signals(signalled).name}", file=sys.stderr)
        return 128 + signalled
    if len(ended) - len(failed) >= min_nodes:
        for remote in failed:
            print(f"onefold run: went on without {remote.host}", file=sys.stderr)
        return 0
    first = min(failed, key=lambda remote: remote.failed_at)
    sys.stderr.write(first.last_words(failed[first]))
    return shell_code(failed[first]) if first.failure is None else first.failure.code


def _watch(
    remotes: Sequence[_Remote], events: "SimpleQueue[_Event]", min_nodes: int, grace_s: int
) -> tuple[dict[_Remote, int], int]:
    """Wait until all have ended: ({machine: exit code}, the signal that ended them or 0)."""
    ended: dict[_Remote, int] = {}
    signalled, deadline = 0, None
    while len(ended) < len(remotes):
        try:
            remote, code = events.get(timeout=None if deadline is None else max(0, deadline - time.monotonic()))
        except Empty:
            _kill(remotes)
            deadline = None
            continue
        if remote is not None:
            ended[remote] = code
        elif signalled:  # asked twice: at once
            _kill(remotes)
            continue
        else:
            signalled = code
        lost = sum(1 for each in ended.values() if each)
        if deadline is None and (signalled or len(remotes) - lost < min_nodes):
            deadline = time.monotonic() + grace_s + _MARGIN_S
            for each in remotes:
                each.send(signal.Signals(signalled or signal.SIGTERM).name)
    return ended, signalled


def _kill(remotes: Sequence[_Remote]) -> None:
    """End the ssh processes; nodes take the end of their stdin for SIGTERM."""
    for remote in remotes:
        remote.process.kill()


@contextlib.contextmanager
def _signals(events: "SimpleQueue[_Event]") -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP become events."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda got, _: events.put((None, got))) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
