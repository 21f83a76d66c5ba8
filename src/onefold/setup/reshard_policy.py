"""Owns `keep_bytes=`: which units stay gathered between a forward and its backward. Integers only, but for what is
free on the device."""

import logging
from collections.abc import Sequence
from typing import Literal

from onefold.plan.table import Plan
from onefold.setup.free_memory import Demand

KeepChoice = int | Literal["auto"] | None


def kept_units(keep_bytes: int, gathered_bytes: Sequence[int]) -> frozenset[int]:
    """The units that stay, `keep_bytes` at most in all; `gathered_bytes` in the order of forward, the root first.

    Units that forward uses last are needed first in backward, so they stay for the shortest time; the root, which both
    ends of a forward use, comes before them. One that does not fit is passed over for smaller ones.
    """
    kept, left = set(), keep_bytes
    for index in (0, *range(len(gathered_bytes) - 1, 0, -1)):
        if 0 < gathered_bytes[index] <= left:
            kept.add(index)
            left -= gathered_bytes[index]
    return frozenset(kept)


def bytes_to_keep(choice: KeepChoice, plan: Plan, demand: Demand) -> int:
    """What `keep_bytes=choice` comes to under `plan`, the same on every rank. "auto" takes what the states leave of the
    room on a GPU, and nothing elsewhere."""
    if not plan.params.partitioned or choice is None:
        return 0
    if choice != "auto":
        return choice
    if demand.device.type != "cuda":
        return 0
    available = max(demand.room() - demand.under(plan).device_bytes, 0)
    logging.getLogger("onefold").info("keep_bytes='auto' has room for %.1f GiB of gathered units", available / 2**30)
    return available
