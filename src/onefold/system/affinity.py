"""Owns which processor cores each rank of one machine runs on.

Every rank gets whole physical cores of its own, on the NUMA node of its GPU; `cores.py` then divides what a rank got
between its computation and its updates on the host. Invariant: no rank gets no core, and two ranks share cores only
where there are fewer cores than ranks.

torchrun has `--numa-binding` too. It is not used here: it stops every run on a machine without the `numactl` program,
it needs a GPU, and its default mode lets all ranks of a NUMA node run on each other's cores.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from onefold.errors import LaunchError

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: the numbers by which the system knows its hardware threads, and its NUMA node."""

    threads: tuple[int, ...]
    node: int


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers in a list such as `0-3,8`, ascending.

    Raises:
        LaunchError: the text is no such list.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise LaunchError(f"{text!r} is no list of cores; write numbers and ranges, e.g. 0-3,8")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def read_cores(allowed: Collection[int], system: Path = SYSTEM) -> list[Core]:
    """The physical cores that have a hardware thread in `allowed`, with those threads only. Where the system does not
    tell (some containers), each thread counts as a core of node 0."""
    nodes = {
        thread: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for thread in _list(folder / "cpulist")
    }
    cores: dict[tuple[int, ...], Core] = {}
    for thread in sorted(allowed):
        siblings = _list(system / f"cpu/cpu{thread}/topology/thread_siblings_list") or (thread,)
        threads = tuple(sibling for sibling in siblings if sibling in allowed)
        cores.setdefault(threads, Core(threads, nodes.get(thread, 0)))
    return list(cores.values())


def share(cores: Sequence[Core], nodes: Sequence[int | None]) -> list[tuple[int, ...]]:
    """The hardware threads of each rank, whose GPU is on the NUMA node `nodes[rank]` (None: no GPU, or unknown).
    Ranks of one node share out that node's cores; all ranks share out all cores if any node is unknown or has fewer
    cores than ranks."""
    by_node = {node: [core for core in cores if core.node == node] for node in set(nodes) if node is not None}
    if None in nodes or any(len(found) < nodes.count(node) for node, found in by_node.items()):
        return [_part(cores, rank, len(nodes)) for rank in range(len(nodes))]
    return [
        _part(by_node[node], nodes[:rank].count(node), nodes.count(node))
        for rank, node in enumerate(nodes)
        if node is not None
    ]


def _part(cores: Sequence[Core], index: int, num_sharing: int) -> tuple[int, ...]:
    start, stop = index * len(cores) // num_sharing, (index + 1) * len(cores) // num_sharing
    mine = cores[start:stop] or [cores[index % len(cores)]]
    return tuple(sorted(thread for core in mine for thread in core.threads))


def _list(path: Path) -> tuple[int, ...]:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return ()
    return parse_cores(text) if text else ()
