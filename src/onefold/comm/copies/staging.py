"""Owns the memory into which ranks of one machine copy their gradients for each other, and the means taken there.

[Note: Two slots]
A gradient goes by chunks, each into one of two slots of every rank's inbox in turn: everybody copies there, all meet,
and each rank sums what came. So a chunk may go into a slot as soon as this rank has left the meeting of the chunk
before: all ranks were there, and had summed what the slot held before they came. One meeting a chunk is enough, as long
as no rank comes to it before it has summed: reductions run one after another.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from onefold.comm.copies.shared_memory import GRADIENTS, Pool
from onefold.comm.reductions import Mean
from onefold.memory.streams import Finish

_SLOTS = 2
_BYTES = 2**28
"""Most that an inbox takes; larger shards go in more chunks."""
_ALIGNMENT = 256


class Inbox:
    """What all ranks copy into. See [Note: Two slots].

    Args:
        pool: where it is taken from, and where its ranks meet.
        shard_bytes: of the largest shard that will be reduced.
    """

    def __init__(self, pool: Pool, shard: int, num_shards: int, shard_bytes: int, mean: Mean) -> None:
        self._pool = pool
        self._shard = shard
        self._num_shards = num_shards
        self._mean = mean
        most = max(_BYTES // (_SLOTS * num_shards), _ALIGNMENT)
        self._row_bytes = -(-min(shard_bytes, most) // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = _SLOTS * num_shards * self._row_bytes
        _, everyone = pool.allocate(self.nbytes, torch.uint8)
        self._slots = [
            [each.view(_SLOTS, num_shards, self._row_bytes)[slot] for each in everyone] for slot in range(_SLOTS)
        ]
        self._next = 0

    def steps(self, shard: Tensor, parts: Sequence[Tensor]) -> Iterator[Callable[[], Finish | None]]:
        """What is to be done, one after another, so that `shard` holds the mean of all ranks' `parts`."""
        chunk = self._row_bytes // shard.element_size()
        for start in range(0, shard.numel(), chunk):
            stop = min(start + chunk, shard.numel())
            slot, self._next = self._next, (self._next + 1) % _SLOTS
            rows = [whole.view(shard.dtype)[:, : stop - start] for whole in self._slots[slot]]
            places = [range(each * shard.numel() + start, each * shard.numel() + stop) for each in range(len(rows))]
            yield partial(self._send, rows, places, parts)
            yield partial(self._mean, shard[start:stop], rows[self._shard])

    def _send(self, rows: Sequence[Tensor], places: Sequence[range], parts: Sequence[Tensor]) -> Finish | None:
        """Copy to every rank its place of the whole. Each starts with the rank after its own, so that no link has two
        writers while another has none."""
        for step in range(1, self._num_shards + 1):
            to = (self._shard + step) % self._num_shards
            _copy(rows[to][self._shard], parts, places[to])
        return self._pool.meet(GRADIENTS)


def _copy(target: Tensor, parts: Sequence[Tensor], place: range) -> None:
    """Copy elements `place` of what lies in `parts`, one after another, to `target`."""
    begin = 0
    for part in parts:
        end = begin + part.numel()
        start, stop = max(begin, place.start), min(end, place.stop)
        if start < stop:
            target[start - place.start : stop - place.start].copy_(part[start - begin : stop - begin])
        begin = end
