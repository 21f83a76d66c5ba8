"""Owns flat buffers: storage that is released and refilled, and the three forms of master weights.

[Note: Flat storage]
All parameters of one unit that share a dtype are views of one flat buffer, so gathers and reductions need no copies.
The buffer's storage is shrunk to nothing on release and grown again on gather - the same storage object, because the
parameters, and views of them that are still in use, point into it.

[Note: A view keeps its storage]
A storage counts its holders. Between release and gather only the buffer itself and its parameters hold it; any other
holder is a view that is still needed - by a recomputed activation checkpoint, by the user's code. `shrink` then refuses
and the runtime tries again later. So no operation ever reads memory that was given back.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from onefold.memory.streams import Lanes
from onefold.plan.layout import Layout
from onefold.plan.precision import join, split


class Buffer:
    """A flat buffer whose storage can be given back and taken again. See [Note: Flat storage].

    Args:
        whole: its memory, of the gather lane unless it will never be given back.
    """

    def __init__(self, layout: Layout, whole: Tensor, lanes: Lanes) -> None:
        self.layout = layout
        self.whole = whole  # [numel]
        self._lanes = lanes
        self._storage = whole.untyped_storage()
        self.nbytes = whole.nbytes
        self.storage_id: int = self._storage._cdata
        self._holders = 0

    def bind(self, params: Sequence[nn.Parameter]) -> None:
        """Make `params` (one per slot) views of this buffer. See [Note: Version counters]."""
        for param, view in zip(params, views(self.whole, self.layout), strict=True):
            param.data = view

    def note_holders(self) -> None:
        """From now on any further holder of the storage keeps it from shrinking."""
        self._holders = self._count_holders()

    @property
    def is_grown(self) -> bool:
        """Whether the storage is there."""
        return self._storage.nbytes() == self.nbytes

    def grow(self) -> None:
        """Take the storage again, uninitialized, as memory of the gather lane."""
        if not self.is_grown:
            with self._lanes.allocate_for_gather():
                self._storage.resize_(self.nbytes)

    def shrink(self) -> bool:
        """Give the storage back; False if a view of it is left. See [Note: A view keeps its storage]."""
        if self.is_watched:
            return False
        if not self._is_sent():
            self._storage.resize_(0)
        return True

    @property
    def is_watched(self) -> bool:
        """Whether a view other than the parameters is left: code that holds one can read it without asking."""
        return self._count_holders() > self._holders

    def _is_sent(self) -> bool:
        """Whether it was sent to another process (torch.multiprocessing): then it is that one's as well, and torch
        crashes where it is to grow again."""
        return not self.whole.is_cuda and self._storage.is_shared()

    def _count_holders(self) -> int:
        return int(torch._C._storage_Use_Count(self.storage_id))


def views(whole: Tensor, layout: Layout) -> list[Tensor]:
    """One view of `whole` [numel] per slot of `layout`, in the parameter's shape."""
    return [whole[slot.start : slot.stop].view(slot.shape) for slot in layout.slots]


class Master(Protocol):
    """The exact weights behind a shard of compute-dtype weights."""

    itemsize: int
    """Bytes an element beyond the compute weight itself."""

    def load(self) -> Tensor:
        """The exact weights, 1-D, fp32 (or the weight's own wider dtype); a temporary or the resting tensor itself."""
        ...

    def store(self, values: Tensor) -> None:
        """Keep `values` (as `load` returned them, changed in place) and refresh the compute weights from them."""
        ...

    def held(self) -> Sequence[Tensor]:
        """The tensors kept beyond the compute weight."""
        ...

    def part(self, start: int, stop: int) -> "Master":
        """The exact weights of elements [start, stop) alone."""
        ...


class OwnMaster:
    """The weight is exact itself: fp32 or wider."""

    itemsize = 0

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def load(self) -> Tensor:
        return self._weight

    def store(self, values: Tensor) -> None:
        if values.data_ptr() != self._weight.data_ptr():
            self._weight.copy_(values)

    def held(self) -> Sequence[Tensor]:
        return ()

    def part(self, start: int, stop: int) -> "OwnMaster":
        return OwnMaster(self._weight[start:stop])


class SplitMaster:
    """A bf16 weight and the 16 bits that its rounding dropped: exact fp32 in 4 bytes."""

    itemsize = 2

    def __init__(self, weight: Tensor, low: Tensor) -> None:
        self._weight = weight
        self._low = low

    def load(self) -> Tensor:
        return join(self._weight, self._low)

    def store(self, values: Tensor) -> None:
        weight, low = split(values)
        self._weight.copy_(weight)
        self._low.copy_(low)

    def held(self) -> Sequence[Tensor]:
        return (self._low,)

    def part(self, start: int, stop: int) -> "SplitMaster":
        return SplitMaster(self._weight[start:stop], self._low[start:stop])


class CopyMaster:
    """A 16-bit weight and a whole fp32 copy."""

    itemsize = 4

    def __init__(self, weight: Tensor, copy: Tensor) -> None:
        self._weight = weight
        self._copy = copy

    def load(self) -> Tensor:
        # A weight that is not its copy's rounding was written by the user since (param.data.clamp_(), say).
        written = self._weight != self._copy.to(self._weight.dtype)
        return torch.where(written, self._weight.to(self._copy.dtype), self._copy)

    def store(self, values: Tensor) -> None:
        if values.data_ptr() != self._copy.data_ptr():
            self._copy.copy_(values)
        self._weight.copy_(self._copy)

    def held(self) -> Sequence[Tensor]:
        return (self._copy,)

    def part(self, start: int, stop: int) -> "CopyMaster":
        return CopyMaster(self._weight[start:stop], self._copy[start:stop])


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weights of `dtype` are updated: fp32, or their own where that is wider or not floating."""
    if not dtype.is_floating_point:
        return dtype
    return torch.float32 if dtype.itemsize < 4 else dtype
