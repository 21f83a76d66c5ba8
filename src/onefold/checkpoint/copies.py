"""Owns the copies that an asynchronous save writes from: what may change at any time is copied before `save` returns,
the rest beside the next forward and backward.

They go down in pieces, few of which are under way at once: other copies to the host go in between, and what is made for
a piece (joined exact weights) stays small. Each way into the room has a thread.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from onefold.checkpoint.entries import Entry, Reading, copy_of
from onefold.crew import Crew
from onefold.pages import PIECE_BYTES, LockedWay, Room, StraightWay, Way, pinned
from onefold.streams import Lanes, Ticket

_ALIGN_BYTES = 64
_MOST_WAYS = 16
"""Each a thread and locked memory. Eight bring 12 GB/s into memory that is only found then, a fifth of a fast link."""
_Piece = tuple[Entry, int, int, int]
"""An entry, where its copy begins in the room, and the bytes of the room that this piece of it fills."""


def room_bytes(entries: Sequence[Entry]) -> int:
    """What the copies of these entries take."""
    return sum(map(_room_of, entries))


def new_room(nbytes: int, device: torch.device, num_threads: int) -> Room:
    """Room for copies of what is on `device`.

    Raises:
        HostMemoryError: the system refuses to lock the little that is locked.
    """
    if device.type == "cpu":
        return Room(nbytes, [StraightWay()])
    number = max(min(num_threads, _MOST_WAYS, -(-nbytes // PIECE_BYTES)), 1)
    locked = pinned(number * PIECE_BYTES, torch.uint8, num_threads)
    return Room(nbytes, [LockedWay(part) for part in locked.split(PIECE_BYTES)])


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

    def make_beside(self) -> None:
        """Copy what the next update changes; on a thread of its own."""
        self._make(Reading.BEFORE_STEP)

    def _make(self, reading: Reading) -> None:
        places = self._places[reading]
        pieces = deque(
            (self.entries[index], start, first, last)
            for index, start in places
            for first, last in _pieces(start, start + self.entries[index].nbytes)
        )
        mine, *others = self._room.ways[: max(len(pieces), 1)]
        crew = Crew(len(others), "onefold-copy")
        try:
            jobs = [crew.submit(partial(self._carry, pieces, way)) for way in others]
            self._carry(pieces, mine)
            for job in jobs:
                job.result()
        finally:
            pieces.clear()  # one that failed is enough
            crew.leave()
        for index, start in places:
            entry = self.entries[index]
            self.entries[index] = copy_of(entry, self._room.whole[start : start + entry.nbytes].view(entry.dtype))

    @torch.no_grad()
    def _carry(self, pieces: "deque[_Piece]", way: Way) -> None:
        """Take pieces down, one after another, until none is left."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has one
        while (piece := _next(pieces)) is not None:
            entry, start, first, last = piece
            way.bring(partial(self._launch, entry, first - start), self._room.whole[first:last])

    def _launch(self, entry: Entry, start: int, target: Tensor) -> Ticket:
        """Copy what lies `start` bytes behind the entry's first element."""
        copy, first = target.view(entry.dtype), entry.start + start // entry.dtype.itemsize
        after, keep = [self._mark.copy()], [entry]
        return self._lanes.down.run(partial(self._copy, entry, first, copy), after=after, keep=keep)

    def _copy(self, entry: Entry, first: int, copy: Tensor) -> None:
        values = entry.read(first, first + len(copy))
        copy.copy_(values, non_blocking=values.device == self._device)  # what is elsewhere is not on our lanes


def _next(pieces: "deque[_Piece]") -> _Piece | None:
    try:
        return pieces.popleft()
    except IndexError:
        return None


def _pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """Bytes [start, stop) of the room, cut where its pieces end."""
    edges = [start, *range((start // PIECE_BYTES + 1) * PIECE_BYTES, stop, PIECE_BYTES), stop]
    return list(pairwise(edges))


def _room_of(entry: Entry) -> int:
    nbytes = 0 if entry.reading == Reading.IN_PLACE else entry.nbytes
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
