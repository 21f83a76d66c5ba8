"""Owns the choice of processor cores for updates on the host.

The thread that launches the computation must never wait for a core: a GPU that gets its kernels late stands still. So a
rank's updates run on its share of the machine's cores but one, and threads that they start stay there too. The rest of
the process keeps the cores it was given.

A control group may have a quota of processors (Kubernetes' limits, docker run --cpus) and see all cores all the same.
More threads than that would use it up early in each period, and then all stand still, the one that launches with them.
"""

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank's updates may use: `num_threads` threads, anywhere on `cores`."""

    cores: tuple[int, ...]
    num_threads: int


Cores = tuple[str, tuple[int, ...]]
"""The name of a machine, and what cores of it a process may run on."""


def cores_here() -> Cores:
    """Those of this process."""
    return socket.gethostname(), tuple(sorted(os.sched_getaffinity(0)))


def update_cores(rank: int, told: Sequence[Cores]) -> Share:
    """For the updates of `rank`, given `cores_here()` of every rank; never none. Ranks that may run on the same cores
    of one machine share them out evenly; those that a launcher already keeps apart keep theirs. All of a machine share
    its quota."""
    mine = told[rank]
    together = [other for other, theirs in enumerate(told) if theirs == mine]
    cores = share_of(mine[1], together.index(rank), len(together))
    num_here = sum(host == mine[0] for host, _ in told)
    # One thread of the quota is left to the thread that launches.
    return Share(cores, min(len(cores), max(1, threads_each(num_here) - 1)))


def share_of(cores: Sequence[int], index: int, num_sharing: int) -> tuple[int, ...]:
    """What number `index` of `num_sharing` ranks updates with, of `cores`: its share without the first, which is left
    to the thread that launches. Where there are too few cores they are used several times."""
    start, stop = index * len(cores) // num_sharing, (index + 1) * len(cores) // num_sharing
    share = tuple(cores[start:stop]) or (cores[index % len(cores)],)
    return share[1:] or share


def threads_each(num_ranks: int) -> int:
    """Threads that the control group's quota leaves to each of so many ranks; it may be none."""
    return int(min(quota(), 1 << 20)) // num_ranks


def quota(file: Path = CPU_MAX) -> float:
    """How many processors this process's control group may use; infinity where it has no limit."""
    try:
        limit, _, period = file.read_text(encoding="ascii").strip().partition(" ")
    except OSError:
        return float("inf")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else float("inf")


def bind_thread(cores: Sequence[int]) -> None:
    """Let the calling thread, and threads it starts, run on `cores` only."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logging.getLogger("onefold").warning("updates are not bound to cores %s: %s", list(cores), error)
