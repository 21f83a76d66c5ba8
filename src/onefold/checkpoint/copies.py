"""Owns the copies that an asynchronous save makes before training goes on."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onefold.checkpoint.entries import Entry, part_reader
from onefold.tier import pinned

_ALIGN_BYTES = 64


def room_for(entries: Sequence[Entry], device: torch.device, have: Tensor | None, num_threads: int) -> Tensor:
    """Host memory for the copies of these entries, 1-D bytes: `have` if it is enough. Locked where the computation is
    on a GPU, so that copies go at full speed; it is kept for the next save, since locking takes longer than copying."""
    needed = sum(map(_room_of, entries))
    if have is not None and have.numel() >= needed:
        return have
    if device.type == "cuda" and needed:
        return pinned(needed, torch.uint8, num_threads)
    return torch.empty(needed, dtype=torch.uint8)


def copied(entries: Sequence[Entry], device: torch.device, room: Tensor) -> list[Entry]:
    """Entries that can be read while training goes on: those at rest on the host as they are, copies of the others."""
    made, start = [], 0
    for entry in entries:
        size = _room_of(entry)
        if size == 0:
            made.append(entry)
            continue
        copy = room[start : start + entry.nbytes].view(entry.dtype)
        copy.copy_(entry.read(entry.start, entry.stop), non_blocking=True)
        made.append(replace(entry, read=part_reader(copy, entry.start)))
        start += size
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return made


def _room_of(entry: Entry) -> int:
    nbytes = 0 if entry.is_still else entry.nbytes
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
