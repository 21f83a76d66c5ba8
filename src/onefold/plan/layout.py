"""Owns geometry: where each parameter lies in its flat buffer, and which part of it each rank holds.

Integers only - no tensors, no torch. The runtime, the budget, the optimizer and the checkpoint read the same `Layout`,
so they cannot disagree. Invariant: every shard of a layout has the same number of elements (the last ones padding).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

ALIGN_NUMEL = 16
"""Every parameter and every shard starts at a multiple of this many elements: 32 bytes in 16-bit, 64 bytes in fp32,
which vectorized loads on every device need."""


def align(numel: int) -> int:
    """`numel` rounded up to a multiple of `ALIGN_NUMEL`."""
    return -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter's place in a flat buffer: elements `[start, start + numel)`, in row-major order."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of one parameter that one shard holds.

    `start:stop` index the shard; `slot_start` is the index of the first of these elements within the flattened
    parameter.
    """

    slot: int
    start: int
    stop: int
    slot_start: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangular part of an N-D parameter: `offsets` and `sizes`, one per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parameters packed one after another into one flat buffer that splits evenly into `num_shards` shards."""

    slots: tuple[Slot, ...]
    num_shards: int
    numel: int

    @classmethod
    def pack(cls, shapes: Sequence[tuple[str, tuple[int, ...]]], num_shards: int) -> "Layout":
        """Pack `(name, shape)` pairs in the order given; every slot and every shard is aligned."""
        slots, start = [], 0
        for name, shape in shapes:
            slots.append(Slot(name=name, shape=tuple(shape), start=start))
            start = align(start + prod(shape))
        return cls(slots=tuple(slots), num_shards=num_shards, numel=align(-(-start // num_shards)) * num_shards)

    @property
    def shard_numel(self) -> int:
        """Elements in each shard, padding included."""
        return self.numel // self.num_shards

    @property
    def used_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding_numel(self) -> int:
        """Elements that exist only so that slots are aligned and shards are equal."""
        return self.numel - self.used_numel

    def shard_range(self, shard: int) -> tuple[int, int]:
        """The half-open range of the flat buffer that shard number `shard` holds."""
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def pieces(self, shard: int) -> tuple[Piece, ...]:
        """The non-empty parts of parameters that shard number `shard` holds, in order."""
        return self.pieces_between(*self.shard_range(shard))

    def pieces_between(self, low: int, high: int) -> tuple[Piece, ...]:
        """The non-empty parts of parameters in `[low, high)` of the flat buffer; `start:stop` count from `low`."""
        found = []
        for index, slot in enumerate(self.slots):
            start, stop = max(low, slot.start), min(high, slot.stop)
            if start < stop:
                found.append(Piece(slot=index, start=start - low, stop=stop - low, slot_start=start - slot.start))
        return tuple(found)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut elements `[start, stop)` of a row-major array into rectangular boxes, in order.

    A contiguous range of a d-dimensional array is at most 2d - 1 boxes. A 0-dim array is one box of no dims.
    """
    if start >= stop:
        return
    if not shape:
        yield Box(offsets=(), sizes=())
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        for box in boxes(shape[1:], start - first * row, stop - first * row):
            yield Box(offsets=(first, *box.offsets), sizes=(1, *box.sizes))
        return
    if start % row:
        yield from boxes(shape, start, (first + 1) * row)
        first += 1
    whole = stop // row - first
    if whole > 0:
        yield Box(offsets=(first, *(0 for _ in shape[1:])), sizes=(whole, *shape[1:]))
    if stop % row:
        yield from boxes(shape, (first + max(whole, 0)) * row, stop)
