"""Owns the copies that an asynchronous save writes from: what may change at any time is copied before `save` returns,
the rest beside the next forward and backward.

They go down in pieces, few of which are under way at once: other copies to the host go in between, and what is made for
a piece (joined exact weights) stays small.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from onefold.checkpoint.entries import Entry, Reading, copy_of
from onefold.memory.pinned import PIECE_BYTES, LockedRoom, PlainRoom, Room
from onefold.memory.streams import Lanes, Ticket

_ALIGN_BYTES = 64
_MOST_UNDER_WAY = 8


def room_bytes(entries: Sequence[Entry]) -> int:
    """What the copies of these entries take."""
    return sum(map(_room_of, entries))


def new_room(nbytes: int, device: torch.device, num_threads: int) -> Room:
    """Room for copies of what is on `device`."""
    return LockedRoom(nbytes, num_threads) if device.type == "cuda" and nbytes else PlainRoom(nbytes)


class Copies:
    """Copies of what one save writes, as it is after all that was queued when this was made.

    Attributes:
        entries: what to write. One that is copied gives place to its copy, and its memory is let go.
    """

    def __init__(self, entries: Sequence[Entry], device: torch.device, lanes: Lanes, room: Room) -> None:
        self.entries = list(entries)
        self._device = device
        self._lanes = lanes
        self._room = room
        self._mark = lanes.mark()
        self._places: dict[Reading, list[tuple[int, int]]] = {Reading.AT_ONCE: [], Reading.BEFORE_STEP: []}
        start = 0
        for reading, places in self._places.items():
            for index, entry in enumerate(entries):
                if entry.reading == reading:
                    places.append((index, start))
                    start += _room_of(entry)

    @property
    def are_all(self) -> bool:
        """Whether nothing is read in place."""
        return len(self.entries) == sum(map(len, self._places.values()))

    def make_at_once(self) -> None:
        """Copy what may change at any time."""
        self._make(Reading.AT_ONCE)

    @torch.no_grad()
    def make_beside(self) -> None:
        """Copy what the next update changes; on a thread of its own."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has one
        self._make(Reading.BEFORE_STEP)

    def _make(self, reading: Reading) -> None:
        under_way: list[Ticket] = []
        try:
            for index, start in self._places[reading]:
                entry = self.entries[index]
                copy = self._room.whole[start : start + entry.nbytes].view(entry.dtype)
                for first, last in _pieces(start, start + entry.nbytes):
                    self._room.reach(last)
                    part = slice((first - start) // entry.dtype.itemsize, (last - start) // entry.dtype.itemsize)
                    launch = partial(self._copy, entry, part, copy[part])
                    under_way.append(self._lanes.down.run(launch, after=[self._mark], keep=[entry]))
                    _finish(under_way, _MOST_UNDER_WAY)
                self.entries[index] = copy_of(entry, copy)
        finally:
            _finish(under_way, 0)

    def _copy(self, entry: Entry, part: slice, copy: Tensor) -> None:
        values = entry.read(entry.start + part.start, entry.start + part.stop)
        copy.copy_(values, non_blocking=values.device == self._device)  # what is elsewhere is not on our lanes


def _finish(under_way: list[Ticket], limit: int) -> None:
    """Wait until so many are left."""
    while len(under_way) > limit:
        under_way.pop(0).wait_on_host()


def _pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """Bytes [start, stop) of the room, cut where its pieces end."""
    edges = [start, *range((start // PIECE_BYTES + 1) * PIECE_BYTES, stop, PIECE_BYTES), stop]
    return list(pairwise(edges))


def _room_of(entry: Entry) -> int:
    nbytes = 0 if entry.reading == Reading.IN_PLACE else entry.nbytes
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
