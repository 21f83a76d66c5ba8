"""Owns processes that act as ranks on one machine: real collectives on the CPU (gloo over the loopback interface).

Starting a process that imports torch costs seconds, so workers stay alive between runs; the process group does not: it
is made fresh for each run, which costs milliseconds. Invariant: a run never meets what an earlier run left behind in a
collective - workers that did not all come back, group taken down, are killed and the next run starts new ones.

    with RankPool(2) as pool:
        results = pool.run(function, argument)       # function(rank, num_ranks, argument) on each rank
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onefold.errors import OnefoldError

_DEATH_S = 30.0
"""How long a process may take to end once its connection has closed."""
_START_S = 120.0
"""How long a worker may take to start: importing torch on a busy machine is slow."""
_LEAVE = b"leave"
_MOST_THREADS = 300
_RUNS_FROZEN = 20
"""Runs after which everything that was alive at their ends is searched for garbage again."""
"""Asks a worker to take its process group down; its answer is the same."""


class RankError(OnefoldError):
    """A rank ended without an exception to hand back: its process died, or the exception cannot be pickled."""


class RankTimeoutError(OnefoldError, TimeoutError):
    """A run did not end in time; the message holds the stack of every rank that was still running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One call for one rank. `call` is pickled by itself: if it cannot be read, that is an outcome like any other."""

    meeting: str  # URL of a file that no other run meets at
    num_ranks: int
    path: list[str]
    call: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankResult:
    """What one rank's call came to: a value, or an error with its traceback as text."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


class _RankProcess:
    """One process that acts as one rank: a connection for tasks and outcomes, a pipe for its stack on request."""

    def __init__(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self.tasks, tasks = context.Pipe()
        self.stacks, stacks = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(rank, tasks, stacks), daemon=True)
        self.process.start()
        tasks.close()
        stacks.close()

    def ready(self) -> None:
        """Wait until the process has imported what it needs."""
        if not self.tasks.poll(_START_S):
            raise RankTimeoutError(f"the worker for rank {self.rank} did not start within {_START_S:.0f} s")
        try:
            self.tasks.recv_bytes()
        except (EOFError, ConnectionError) as error:
            raise RankError(
                f"the worker for rank {self.rank} died while starting (exit code {self.exit_code()}); a script that "
                "uses RankPool needs `if __name__ == '__main__':` around what must not run again in the workers"
            ) from error

    def outcome(self) -> _RankResult:
        """The outcome that is waiting, or an error that names the exit code when the process has died."""
        try:
            return _unpickled(self.tasks.recv_bytes())
        except (EOFError, ConnectionError):
            died = RankError(f"rank {self.rank}: its process died in mid-run (exit code {self.exit_code()})")
            return _RankResult(error=died)

    def exit_code(self) -> int | None:
        self.process.join(_DEATH_S)
        return self.process.exitcode

    def stack(self) -> str:
        """The stacks of all threads of the process, written by a signal handler in C: also during a hung collective."""
        if self.process.pid is None or not hasattr(faulthandler, "register"):
            return "(no stack: this platform cannot dump it)"
        os.kill(self.process.pid, signal.SIGUSR1)
        text, patience_s = b"", 2.0
        while select.select([self.stacks.fileno()], [], [], patience_s)[0]:
            found = os.read(self.stacks.fileno(), 1 << 16)
            if not found:
                break
            text, patience_s = text + found, 0.2
        return text.decode(errors="replace")

    @property
    def is_worn(self) -> bool:
        """Whether runs that failed in the middle of a collective have left so many threads that it had better go."""
        threads = Path(f"/proc/{self.process.pid}/task")
        return threads.is_dir() and len(list(threads.iterdir())) > _MOST_THREADS

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.tasks.close()
        self.stacks.close()


class Workers:
    """Worker processes by rank, started when first needed. Pools of several sizes may share them, one run at a time."""

    def __init__(self) -> None:
        self._workers: list[_RankProcess] = []
        self._meetings: tempfile.TemporaryDirectory[str] | None = None
        self._runs = 0

    def take(self, num_ranks: int) -> list[_RankProcess]:
        """The first `num_ranks` workers, all ready."""
        started = [_RankProcess(rank) for rank in range(len(self._workers), num_ranks)]
        for rank, worker in enumerate(self._workers):
            if worker.is_worn:
                worker.kill()
                self._workers[rank] = _RankProcess(rank)
                started.append(self._workers[rank])
        self._workers += [worker for worker in started if worker.rank >= len(self._workers)]
        for worker in started:
            worker.ready()
        return self._workers[:num_ranks]

    def meeting(self) -> str:
        """Where the ranks of one run find each other: a new file each time, so that nothing old is ever read."""
        if self._meetings is None:
            self._meetings = tempfile.TemporaryDirectory(prefix="onefold-ranks-")
        self._runs += 1
        return f"file://{self._meetings.name}/run-{self._runs}"

    def kill(self) -> None:
        """End every process. The next `take` starts new ones."""
        while self._workers:
            self._workers.pop().kill()
        if self._meetings is not None:
            self._meetings.cleanup()
            self._meetings = None


class RankPool:
    """`num_ranks` processes that run functions as the ranks of one process group.

    One rank runs in a worker too, but without a process group, as a script without a launcher does. Each run has its
    own group (`torch.distributed` is ready when the function starts), one thread per rank, and torch's seed set to 0.

    Args:
        num_ranks: ranks of every run.
        workers: processes to share with other pools; None makes some for this pool alone.
        grace_s: how long the other ranks may go on after one has failed: they mostly wait for it, in vain.
    """

    def __init__(self, num_ranks: int, *, workers: Workers | None = None, grace_s: float = 3.0) -> None:
        if num_ranks < 1:
            raise ValueError(f"a RankPool has at least 1 rank, not {num_ranks}")
        self.num_ranks = num_ranks
        self._workers = Workers() if workers is None else workers
        self._grace_s = grace_s

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
        """Call `fn(rank, num_ranks, *args)` on every rank and return what each returned, in rank order.

        Args:
            fn: a function that pickle finds by name (top level of an importable module); so are the classes of `args`.
            timeout_s: seconds until the run counts as hung. Starting workers does not count.

        Raises:
            Exception: whatever a rank raised first; its notes hold the rank and the traceback there.
            RankTimeoutError: some ranks did not end in time; names them and shows their stacks.
            RankError: a rank's process died, or what it raised or returned cannot be pickled.
        """
        call = pickle.dumps((fn, args))
        healthy = False
        try:
            workers = self._workers.take(self.num_ranks)
            meeting = self._workers.meeting()
            task = _Task(meeting=meeting, num_ranks=self.num_ranks, path=list(sys.path), call=call, timeout_s=timeout_s)
            for worker in workers:
                worker.tasks.send_bytes(pickle.dumps(task))
            outcomes = _outcomes(workers, timeout_s, self._grace_s)
            is_good = all(outcome.error is None for outcome in outcomes.values())
            patience_s = timeout_s if is_good else self._grace_s
            stuck = _leave(workers, patience_s) if len(outcomes) == len(workers) else []
            healthy = len(outcomes) == len(workers) and not stuck
        finally:
            if not healthy:
                self.close()
        _raise_first(outcomes, self.num_ranks)
        if stuck:
            raise RankTimeoutError(f"every rank returned, but with a collective still pending: {', '.join(stuck)}")
        return [outcomes[rank].value for rank in range(self.num_ranks)]

    def close(self) -> None:
        """End the processes (also those shared with other pools; they start again when needed)."""
        self._workers.kill()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _outcomes(workers: Sequence[_RankProcess], timeout_s: float, grace_s: float) -> dict[int, _RankResult]:
    """Outcomes by rank, as they came in. After a first error the others get only a short grace, and may be missing."""
    deadline = time.monotonic() + timeout_s
    running = list(workers)
    outcomes: dict[int, _RankResult] = {}
    while running:
        ready = wait([worker.tasks for worker in running], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for worker in [worker for worker in running if worker.tasks in ready]:
            running.remove(worker)
            outcomes[worker.rank] = worker.outcome()
            if outcomes[worker.rank].error is not None:
                deadline = min(deadline, time.monotonic() + grace_s)
    if running and all(outcome.error is None for outcome in outcomes.values()):
        stacks = "\n".join(f"--- rank {worker.rank}\n{worker.stack()}" for worker in running)
        names = ", ".join(str(worker.rank) for worker in running)
        raise RankTimeoutError(f"after {timeout_s:g} s still running: rank {names} of {len(workers)}\n{stacks}")
    return outcomes


def _leave(workers: Sequence[_RankProcess], patience_s: float) -> list[str]:
    """Take the process group down on every rank; returns the ranks that cannot, since a collective holds them.

    Only now that all ranks have returned: leaving while a peer still reads from the group could cut that peer off.
    """
    stuck = []
    deadline = time.monotonic() + patience_s
    for worker in workers:
        with contextlib.suppress(OSError):  # a process that died has left too
            worker.tasks.send_bytes(_LEAVE)
    for worker in workers:
        try:
            left = worker.tasks.poll(max(0.0, deadline - time.monotonic())) and worker.tasks.recv_bytes() == _LEAVE
        except (EOFError, OSError):
            left = False
        if not left:
            stuck.append(f"rank {worker.rank}")
    return stuck


def _raise_first(outcomes: dict[int, _RankResult], num_ranks: int) -> None:
    """Raise what the first rank that failed raised; every different traceback goes along as a note."""
    failed = [(rank, outcome.error, outcome.trace) for rank, outcome in outcomes.items() if outcome.error is not None]
    if not failed:
        return
    first = failed[0][1]
    ranks_by_trace: dict[str, list[str]] = {}
    for rank, error, trace in failed:
        ranks_by_trace.setdefault(trace or str(error), []).append(str(rank))
    for trace, ranks in ranks_by_trace.items():
        first.add_note(f"--- rank {', '.join(ranks)} of {num_ranks}\n{trace}")
    for rank in sorted(set(range(num_ranks)) - set(outcomes)):
        first.add_note(f"--- rank {rank} of {num_ranks}: still running when the workers were ended")
    raise first


def _serve(rank: int, tasks: "Connection[Any, Any]", stacks: "Connection[Any, Any]") -> None:
    """A worker's life: run tasks until the other end of the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends the workers
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    torch.set_num_threads(1)
    tasks.send_bytes(b"ready")
    num_left = 0
    while True:
        try:
            message = tasks.recv_bytes()
        except EOFError:
            return
        if message == _LEAVE:
            if dist.is_initialized():
                dist.destroy_process_group()
            num_left += 1
            if num_left % _RUNS_FROZEN == 0:
                gc.unfreeze()  # what a thread still held when it was frozen would stay for ever, with all its threads
            gc.collect()  # models are cycles, and hold groups with threads of their own
            gc.freeze()  # what is left are modules; searching them again after each run would cost more than the run
            tasks.send_bytes(_LEAVE)
        else:
            tasks.send_bytes(_attempt(rank, pickle.loads(message)))


def _attempt(rank: int, task: _Task) -> bytes:
    """Run one task and pickle its outcome, whatever it is."""
    try:
        sys.path[:] = task.path
        if task.num_ranks > 1:
            dist.init_process_group(
                "gloo",
                init_method=task.meeting,
                rank=rank,
                world_size=task.num_ranks,
                timeout=timedelta(seconds=2 * task.timeout_s + 60),  # the parent's patience ends first, and knows more
            )
        torch.manual_seed(0)
        fn, args = pickle.loads(task.call)
        return pickle.dumps(_RankResult(value=fn(rank, task.num_ranks, *args)))
    except BaseException as error:  # SystemExit in a task is that task's failure, not the worker's end
        return _failure(rank, error)


def _failure(rank: int, error: BaseException) -> bytes:
    """A pickled outcome that holds the error itself, or its text where the error does not survive pickling."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            packed = pickle.dumps(_RankResult(error=error, trace=trace))
            pickle.loads(packed)
            return packed
    return pickle.dumps(_RankResult(error=RankError(f"rank {rank}: {type(error).__name__}: {error}"), trace=trace))


def _unpickled(data: bytes) -> _RankResult:
    outcome = pickle.loads(data)
    if not isinstance(outcome, _RankResult):
        raise RankError(f"a worker sent {type(outcome).__name__} where an outcome was expected")
    return outcome
