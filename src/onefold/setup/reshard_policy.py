"""Owns `keep_bytes=`: which units stay gathered between a forward and its backward. Integers only, but for what is
free on the device."""

import logging
from collections.abc import Sequence
from typing import Literal

import torch

from onefold.comm.comm import Comm
from onefold.errors import ShardError
from onefold.plan.table import Plan
from onefold.setup.offload_fraction import UnitStates, on_device, room

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


def bytes_to_keep(
    choice: KeepChoice, plan: Plan, units: Sequence[UnitStates], comm: Comm, device: torch.device, present: int
) -> int:
    """What `keep_bytes=choice` comes to under `plan`, the same on every rank. "auto" takes what the states leave of the
    room on a GPU, and nothing elsewhere. `present`: as for `room`."""
    if not plan.params.partitioned or choice is None:
        return 0
    if choice != "auto":
        return choice
    if device.type != "cuda":
        return 0
    available = max(room(units, comm, device, present) - on_device(plan, units, comm.num_shards), 0)
    logging.getLogger("onefold").info("keep_bytes='auto' has room for %.1f GiB of gathered units", available / 2**30)
    return available


def check_choice(choice: KeepChoice) -> None:
    """Raises ShardError: `choice` is none of a number of bytes, "auto" and None."""
    is_number = isinstance(choice, int) and not isinstance(choice, bool)
    if not (choice is None or choice == "auto" or (is_number and int(choice) >= 0)):
        raise ShardError(f'keep_bytes={choice!r}: give a number of bytes, "auto" for what the device has left, or None')
