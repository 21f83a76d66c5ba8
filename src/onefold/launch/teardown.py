"""Owns how the processes of a run on one machine are ended: on signals, and after it what ranks have left behind.

Invariant: the first signal lets ranks end in their grace, a second one ends them at once, and nothing that carries a
run's mark outlives a run that failed.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

import psutil  # type: ignore[import-untyped]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RUN_VARIABLE = "ONEFOLD_RUN"
"""The variable by which processes of a run are found; its value is new for each run."""
AGAIN_S = 1.0
"""A signal that comes sooner after the first is the same one: wrappers pass on what the terminal has sent already."""
_LEAVE_S = 3.0
"""How long processes that ranks left behind may take to end themselves."""
_ROUNDS = 3


@contextlib.contextmanager
def signals(made: Callable[[signal.Signals], Exception]) -> Iterator[None]:
    """Within this, the first signal raises what `made` makes of it; a later one kills all children of this process."""
    came: list[float] = []

    def got(number: int, _: FrameType | None) -> None:
        if not came:
            came.append(time.monotonic())
            raise made(signal.Signals(number))
        if time.monotonic() - came[0] >= AGAIN_S:
            kill_children()

    before = {number: signal.signal(number, got) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_children() -> None:
    """SIGKILL for all that this process has started, and what that has."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


def end_leftovers(mark: str) -> None:
    """End what ranks started and left behind: SIGTERM, then SIGKILL, until there is nothing more."""
    left = _marked(mark)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(left, timeout=_LEAVE_S)
    for _ in range(_ROUNDS):  # one that is being ended may have started another
        left = _marked(mark)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=_LEAVE_S)


def _marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _has(process, mark)]


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.environ().get(RUN_VARIABLE) == mark)
    except (psutil.Error, OSError):  # another user's, or gone
        return False
