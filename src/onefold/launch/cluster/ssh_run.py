"""Owns one attempt of a run on several machines: one `onefold run --as_node` on each, over ssh, watched from here.

Invariant: when this process ends, however it ends, so do the ranks on every machine. Each node reads signals from its
stdin and takes its end for SIGTERM; ssh closes it when the launcher is gone. A connection that is cut closes nothing:
the launcher is heard every few seconds, and a node that has not heard it for `_SILENCE_S` ends as well.
"""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO

from onefold.launch.failure_report import FAILURE_MARK, Failure, shell_code
from onefold.launch.launch import Node
from onefold.launch.teardown import AGAIN_S, SIGNALS

_MARGIN_S = 10
"""How long a node may take beyond the grace it gives its ranks."""
_BEAT_S = 10
_SILENCE_S = 60
_SSH_FAILED = 255
_REFUSED = 2
"""The code of a node that raised a `LaunchError`."""


def node_words(node: Node) -> list[str]:
    """The command line that makes a machine run its part of a run."""
    words = ["run", "--as_node", f"--num_nodes={node.num_nodes}", f"--silence={_SILENCE_S}"]
    words += [f"--node_rank={node.node_rank}", f"--nproc={node.num_ranks}", f"--restarts={node.restarts}"]
    if node.master is not None:
        words += [f"--master_addr={node.master[0]}", f"--master_port={node.master[1]}"]
    if node.peer is not None:
        words.append(f"--peer={node.peer}")
    if node.devices is not None:
        words.append(f"--devices={','.join(node.devices)}")
    if node.log_dir is not None:
        words.append(f"--log_dir={node.log_dir}")
    words.append(f"--grace={node.grace_s}")
    if node.cores is not None:
        words.append(f"--bind_core_list={','.join(map(str, node.cores))}" if node.cores else "--no_bind_cores")
    script = node.script
    words.append("--local_rank" if script.local_rank else "--no_local_rank")
    words += [flag for flag, on in (("--module", script.module), ("--no_python", script.no_python)) if on]
    return [sys.executable, "-m", "onefold", *words, script.path, *script.args]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an attempt ended.

    Attributes:
        code: the first failing rank's exit code; 128 plus a signal's number; 255 for a machine that was lost; or 0.
        signalled: this process was told to end.
        refused: a machine refused what it was asked to start, and would again; it has said why.
        lost: the machines whose connections failed.
        words: what to print last.
    """

    code: int = 0
    signalled: bool = False
    refused: bool = False
    lost: tuple[str, ...] = ()
    words: str = ""


class _Remote:
    """One machine's part: its ssh process, and threads that carry its output to the screen."""

    def __init__(self, host: str, words: Sequence[str], events: "SimpleQueue[_Event]", screen: threading.Lock) -> None:
        self.host, self.ended_at, self._screen = host, 0.0, screen
        self.failure: Failure | None = None
        pipe = subprocess.PIPE
        # In a session of its own: Ctrl-C at the terminal must reach the ranks through their node, not kill ssh.
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        streams = ((self.process.stdout, sys.stdout.buffer), (self.process.stderr, sys.stderr.buffer))
        self._pumps = [threading.Thread(target=self._pump, args=pair, daemon=True) for pair in streams]
        threading.Thread(target=self._wait, args=(events,), daemon=True).start()

    def send(self, line: str) -> None:
        """Have the node send itself the signal of that name, or with an empty line know that it is not alone."""
        with contextlib.suppress(OSError, ValueError):  # it has ended
            if self.process.stdin is not None:
                self.process.stdin.write(f"{line}\n".encode())
                self.process.stdin.flush()

    def _wait(self, events: "SimpleQueue[_Event]") -> None:
        for pump in self._pumps:
            pump.start()
        code = self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # what it did not read any more
                self.process.stdin.close()
        for pump in self._pumps:  # something left behind there may hold the pipes open
            pump.join(timeout=2)
        self.ended_at = time.monotonic()
        events.put((self, code))

    def _pump(self, source: IO[bytes], screen: IO[bytes]) -> None:
        with source:
            for line in source:
                if line.startswith(FAILURE_MARK):
                    self.failure = Failure.decode(line)
                    continue
                with self._screen, contextlib.suppress(BrokenPipeError):  # `| head`: read on, or ranks would wait
                    screen.write(line)
                    screen.flush()

    @property
    def failed_at(self) -> float:
        return self.ended_at - (0.0 if self.failure is None else self.failure.ago_s)


_Event = tuple[_Remote | None, int]
"""(a machine, its exit code), or (None, a signal that this process got)."""


def run_attempt(commands: Mapping[str, Sequence[str]], *, grace_s: int) -> Ended:
    """Run {host: command} to the end. When one machine's part fails, or a signal comes, all are ended."""
    events: SimpleQueue[_Event] = SimpleQueue()
    screen = threading.Lock()
    with _signals(events):
        remotes = [_Remote(host, words, events, screen) for host, words in commands.items()]
        with _beats(remotes):
            ended, signalled = _watch(remotes, events, grace_s)
    if signalled:
        name = signal.Signals(signalled).name
        return Ended(code=128 + signalled, signalled=True, words=f"onefold run: ended by {name}\n")
    failed = {remote: code for remote, code in ended.items() if code}
    return _told(failed) if failed else Ended()


def _told(failed: Mapping[_Remote, int]) -> Ended:
    # A machine that is lost fails the ranks of all others, and is noticed last.
    lost = [remote for remote, code in failed.items() if code == _SSH_FAILED and remote.failure is None]
    if lost:
        names = tuple(remote.host for remote in lost)
        words = f"onefold run: lost {', '.join(names)}: ssh failed, or the machine is gone\n"
        return Ended(code=_SSH_FAILED, lost=names, words=words)
    first = min(failed, key=lambda remote: remote.failed_at)
    code = shell_code(failed[first])
    if first.failure is None:
        words = f"onefold run: {first.host} ended with code {code}; its messages are above\n"
        return Ended(code=code, refused=code == _REFUSED, words=words)
    return Ended(code=first.failure.code, words=first.failure.text(f" on {first.host}"))


def _watch(remotes: Sequence[_Remote], events: "SimpleQueue[_Event]", grace_s: int) -> tuple[dict[_Remote, int], int]:
    """Wait until all have ended: ({machine: exit code}, the signal that ended them or 0)."""
    ended: dict[_Remote, int] = {}
    signalled, signalled_at, deadline = 0, 0.0, None
    while len(ended) < len(remotes):
        try:
            remote, code = events.get(timeout=None if deadline is None else max(0, deadline - time.monotonic()))
        except Empty:
            _kill(remotes)
            deadline = None
            continue
        if remote is not None:
            ended[remote] = code
        elif signalled:
            if time.monotonic() - signalled_at >= AGAIN_S:  # asked twice: at once
                _kill(remotes)
            continue
        else:
            signalled, signalled_at = code, time.monotonic()
        if deadline is None and (signalled or any(ended.values())):
            deadline = time.monotonic() + grace_s + _MARGIN_S
            for each in remotes:
                each.send(signal.Signals(signalled or signal.SIGTERM).name)
    return ended, signalled


def _kill(remotes: Sequence[_Remote]) -> None:
    """End the ssh processes; nodes take the end of their stdin for SIGTERM."""
    for remote in remotes:
        remote.process.kill()


@contextlib.contextmanager
def _beats(remotes: Sequence[_Remote]) -> Iterator[None]:
    """Let every node hear from time to time that the launcher is there."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_BEAT_S):
            for remote in remotes:
                remote.send("")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _signals(events: "SimpleQueue[_Event]") -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP become events."""
    before = {number: signal.signal(number, lambda got, _: events.put((None, got))) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
