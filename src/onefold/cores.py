"""Owns the choice of processor cores for updates on the host.

The thread that launches the computation must never wait for a core: a GPU that gets its kernels late stands still. So a
rank's updates run on its share of the machine's cores but one, and threads that they start stay there too. The rest of
the process keeps the cores it was given.
"""

import logging
import os
import socket
from collections.abc import Sequence

from onefold.comm import Comm


def update_cores(comm: Comm) -> tuple[int, ...]:
    """The cores for this rank's updates; never none. Ranks that may run on the same cores of one machine share them out
    evenly; those that a launcher already keeps apart keep theirs."""
    mine = socket.gethostname(), _allowed()
    together = [rank for rank, theirs in enumerate(comm.exchange_objects(mine)) if theirs == mine]
    return share_of(mine[1], together.index(comm.rank), len(together))


def share_of(cores: Sequence[int], index: int, num_sharing: int) -> tuple[int, ...]:
    """What number `index` of `num_sharing` ranks updates with, of `cores`: its share without the first, which is left
    to the thread that launches. Where there are too few cores they are used several times."""
    start, stop = index * len(cores) // num_sharing, (index + 1) * len(cores) // num_sharing
    share = tuple(cores[start:stop]) or (cores[index % len(cores)],)
    return share[1:] or share


def bind_thread(cores: Sequence[int]) -> None:
    """Let the calling thread, and threads it starts, run on `cores` only."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logging.getLogger("onefold").warning("updates are not bound to cores %s: %s", list(cores), error)


def _allowed() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))
