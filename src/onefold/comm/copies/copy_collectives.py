"""Owns gathers and reductions without messages: ranks of one machine copy each other's shards from memory that all of
them see, and their gradients into it.

On GPUs with peer access the copies are made by the copy engines and take no processors from the computation; on CPUs
they save the way through sockets. What is gathered is what a collective gathers, bit for bit; for what is reduced see
[Note: The order of a sum].

[Note: Who may read whose shard]
A copy asks nobody, so two rules stand in for the meeting that a collective is. Before a rank changes shards it meets
all others (`before_change`): whoever was reading them has read them. The first gather of a shard that changed meets
them again: everybody has changed theirs. That is a meeting a shard, so that the first ones are gathered while others
are still being updated. Between two changes gathers need no meeting at all. Only what is updated where it rests is
exposed: an update beside the computation may be done on one rank and not on another.

Where weights rest whole, a rank's shard is a part of them, and a user may write into them at any time. There every
gather meets twice, so that once it is done on one rank nobody reads that rank's weights any more.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from onefold.comm.comm import Comm
from onefold.comm.copies.shared_memory import SHARDS, WHOLE, Pool
from onefold.comm.copies.staging import Inbox
from onefold.comm.reductions import Mean
from onefold.comm.wrappers import OverComm
from onefold.memory.streams import Chain, Finish, Pending

Place = tuple[int, int]
"""A storage and an offset there. No address: torch moves what a storage holds where its user shares it."""


def place_of(shard: Tensor) -> Place:
    return int(shard.untyped_storage()._cdata), int(shard.storage_offset())


class PeerComm(OverComm[Comm]):
    """Gathers exposed shards, and reduces, by copies; all else goes through another `Comm`. See
    [Note: Who may read whose shard].

    Args:
        mean: takes the means of what is reduced.
    """

    def __init__(self, inner: Comm, pool: Pool, mean: Mean) -> None:
        super().__init__(inner)
        self.reads_parts = True
        self._pool = pool
        self._mean = mean
        self._inbox: Inbox | None = None
        self._latest: Finish | None = None
        """Finishes the reduction before: they run one after another."""
        self._shards: dict[Place, Sequence[Tensor]] = {}
        """Every rank's shard, as all see it, by the place of this rank's."""
        self._parts: set[Place] = set()
        """Places of those that are parts of whole weights."""
        self._changed: set[Place] = set()
        """Places of shards that changed since the ranks last met for a gather of them."""
        self._met: dict[Place, Finish | None] = {}
        """By place, waits for that meeting; None where the gathers' stream is ordered after it."""

    @property
    def shared_bytes(self) -> int:
        """What this rank's shards and inbox take of memory that all ranks see."""
        return self._pool.held_bytes

    @property
    def inbox_bytes(self) -> int:
        """What reductions take of it."""
        return 0 if self._inbox is None else self._inbox.nbytes

    def expose(self, shard: Tensor) -> Tensor:
        if not shard.numel():
            return shard
        own, everyone = self._pool.allocate(shard.numel(), shard.dtype)
        own.copy_(shard)
        self._shards[place_of(own)] = everyone
        self.changed(own)
        return own

    def expose_whole(self, whole: Tensor) -> Tensor:
        own, everyone = self._pool.allocate(whole.numel(), whole.dtype)
        own.copy_(whole)
        parts = [each.chunk(self.num_shards)[shard] for shard, each in enumerate(everyone)]
        place = place_of(own.chunk(self.num_shards)[self.shard])
        self._shards[place] = parts
        self._parts.add(place)
        return own

    def before_change(self) -> None:
        self._meet(SHARDS)

    def expect_reductions(self, shard_bytes: int) -> None:
        self._inbox = Inbox(self._pool, self.shard, self.num_shards, shard_bytes, self._mean)

    def reduce_scatter(self, shard: Tensor, *parts: Tensor) -> Finish | None:
        if not shard.numel():
            return None
        if self._inbox is None:
            raise RuntimeError("a reduction that nobody expected")
        before = self._latest
        self._latest = Chain(
            lambda: before,
            *self._inbox.steps(shard, parts),
            lambda: self.mean_of_replicas(shard),
        )
        return self._latest

    def _meet(self, line: int) -> None:
        finish = self._pool.meet(line)
        if finish is not None:
            finish()

    def changed(self, shard: Tensor) -> None:
        self._changed.add(place_of(shard))

    def all_gather(self, whole: Tensor, shard: Tensor) -> Finish | None:
        place = place_of(shard)
        everyone = self._shards.get(place)
        if everyone is None:
            return super().all_gather(whole, shard)
        if place in self._parts:
            seen = everyone[self.shard]
            if seen.data_ptr() != shard.data_ptr():  # torch moved weights to send them to another process
                seen.copy_(shard)
            self._meet(WHOLE)
            _copy(whole, everyone, self.shard)
            self._meet(WHOLE)
            return None
        if place in self._changed:
            self._changed.remove(place)
            self._met[place] = self._pool.meet(SHARDS)
        copy, met = partial(_copy, whole, everyone, self.shard), self._met[place]
        if met is None:
            copy()
            return None

        def finish() -> None:
            met()
            copy()

        return Pending(finish, met.is_done) if isinstance(met, Pending) else finish


def _copy(whole: Tensor, everyone: Sequence[Tensor], own: int) -> None:
    """Fill `whole` with everyone's shards. Each rank starts with the one after its `own`, so that no link has two
    readers while another has none."""
    parts = whole.chunk(len(everyone))
    for place in range(1, len(everyone) + 1):
        index = (own + place) % len(everyone)
        if parts[index].data_ptr() != everyone[index].data_ptr():
            parts[index].copy_(everyone[index])
