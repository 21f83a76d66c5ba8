"""Owns the first moment of a rank's process: it binds itself to its cores, then becomes the script.

torchrun starts `python -I -S start_rank.py LOCAL_RANK LAUNCHER RESTARTS CORES COMMAND...`. Invariant: nothing of
Onefold or torch is imported (that would cost each rank seconds), and the process that torchrun watches is the script's
own.

LAUNCHER is the process to die with (0: none). RESTARTS is how often the run was started again before torchrun was
started, which counts only its own. CORES is one comma-separated list for each local rank, joined by `;`; an
empty list binds nothing.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_COUNT = "TORCHELASTIC_RESTART_COUNT"


def main(words: list[str]) -> None:
    local_rank, launcher, restarts, cores, *command = words
    # A launcher that is killed outright (SIGKILL) cannot end its ranks: the kernel does, also after exec.
    if int(launcher):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # it died before the line above
            sys.exit(128 + signal.SIGKILL)
    counted = int(os.environ.get(_COUNT, "0"))
    os.environ[_COUNT] = str(counted + int(restarts))
    mine = cores.split(";")[int(local_rank)]
    if mine:
        try:
            os.sched_setaffinity(0, [int(core) for core in mine.split(",")])
        except OSError as error:
            print(f"onefold run: rank is not bound to cores {mine}: {error}", file=sys.stderr)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"onefold run: cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
