"""Owns the gradients of one flat buffer, from autograd's tensors to the averaged shard.

A backward pass first adds the parameters' own gradients into `local` (this rank's sum, whole). A reduction turns
`local` into the mean over ranks and adds it to `reduced`, which rests as the plan says. Invariant: padding is zero in
both.

| grads / optim | `reduced` holds                     | elements on the wire |
|---------------|-------------------------------------|----------------------|
| part / part   | this rank's shard                   | n                    |
| whole / part  | whole, this rank's range averaged   | n                    |
| whole / whole | whole, all of it averaged           | 2 n                  |
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from onefold.buffer import views
from onefold.comm import Comm
from onefold.layout import Layout
from onefold.streams import Chain, Finish, Lanes, Ticket


class Keep(Protocol):
    """How reduced gradients rest."""

    start: int
    """Index in the flat buffer of the first element that `kept` tensors hold."""

    def target(self, local: Tensor) -> Tensor:
        """Where the mean of this rank's range goes, given `local` [numel]."""
        ...

    def finish(self, local: Tensor, own: Tensor) -> Finish | None:
        """What else the wire must do once `own` is the mean."""
        ...

    def add(self, kept: Tensor | None, local: Tensor, own: Tensor) -> Tensor:
        """`kept` with the new mean added."""
        ...

    def own(self, kept: Tensor) -> Tensor:
        """The averaged range of this rank, [shard_numel]."""
        ...

    def updated(self, kept: Tensor) -> Tensor:
        """The averaged gradients of the elements this rank updates."""
        ...


class PartKeep:
    """Only this rank's shard is kept."""

    def __init__(self, layout: Layout, comm: Comm) -> None:
        self._layout = layout
        self.start = layout.shard_range(comm.rank)[0]

    def target(self, local: Tensor) -> Tensor:
        return local.new_empty(self._layout.shard_numel)

    def finish(self, local: Tensor, own: Tensor) -> Finish | None:
        return None

    def add(self, kept: Tensor | None, local: Tensor, own: Tensor) -> Tensor:
        return own if kept is None else kept.add_(own)

    def own(self, kept: Tensor) -> Tensor:
        return kept

    def updated(self, kept: Tensor) -> Tensor:
        return kept


class WholeKeep:
    """The whole buffer is kept, this rank's range of it averaged."""

    start = 0

    def __init__(self, layout: Layout, comm: Comm) -> None:
        self._range = slice(*layout.shard_range(comm.rank))

    def target(self, local: Tensor) -> Tensor:
        return local[self._range]

    def finish(self, local: Tensor, own: Tensor) -> Finish | None:
        return None

    def add(self, kept: Tensor | None, local: Tensor, own: Tensor) -> Tensor:
        if kept is None:
            return local
        kept[self._range] += own
        return kept

    def own(self, kept: Tensor) -> Tensor:
        return kept[self._range]

    def updated(self, kept: Tensor) -> Tensor:
        return kept[self._range]


class ReplicatedKeep(WholeKeep):
    """The whole buffer is kept, averaged everywhere: every rank updates every element."""

    def __init__(self, layout: Layout, comm: Comm) -> None:
        super().__init__(layout, comm)
        self._comm = comm

    def finish(self, local: Tensor, own: Tensor) -> Finish | None:
        return self._comm.all_gather(local, own)

    def add(self, kept: Tensor | None, local: Tensor, own: Tensor) -> Tensor:
        return local if kept is None else kept.add_(local)

    def updated(self, kept: Tensor) -> Tensor:
        return kept


class Gradients:
    """Gradients of the parameters in one flat buffer."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, keep: Keep, comm: Comm) -> None:
        self.layout = layout
        self.dtype = dtype
        self.keep = keep
        self.local: Tensor | None = None  # [numel], this rank's sum, not yet reduced
        self.reduced: Tensor | None = None  # as `keep` says
        self._device = device
        self._comm = comm
        self._gaps = _gaps(layout)

    def collect(self, grads: Sequence[Tensor | None]) -> None:
        """Add one gradient per slot (None: no gradient) into `local`."""
        dense = [grad.to_dense() if grad is not None and grad.layout != torch.strided else grad for grad in grads]
        if self.local is None:
            self.local = torch.empty(self.layout.numel, dtype=self.dtype, device=self._device)
            places = views(self.local, self.layout)
            rest = [view for view, grad in zip(places, dense, strict=True) if grad is None]
            rest += [self.local[start:stop] for start, stop in self._gaps]
            if len(rest) < len(places) + len(self._gaps):
                torch._foreach_copy_(*_pairs(places, dense))
            if rest:
                torch._foreach_zero_(rest)
        elif any(grad is not None for grad in dense):
            torch._foreach_add_(*_pairs(views(self.local, self.layout), dense))

    def reduce(self, lanes: Lanes) -> Ticket:
        """Start turning `local` (zeros where there is none) into the mean over ranks, added to `reduced`."""
        local, self.local = self.local, None
        if local is None:
            local = torch.zeros(self.layout.numel, dtype=self.dtype, device=self._device)
        own = self.keep.target(local)

        def add() -> None:
            self.reduced = self.keep.add(self.reduced, local, own)

        def launch() -> Finish:
            return Chain(
                lambda: self._comm.reduce_scatter(own, local),
                lambda: self.keep.finish(local, own),
                add,
            )

        return lanes.reduce.run(launch, after=[lanes.mark()], keep=[local, own])

    def clear(self, slot: int) -> None:
        """Forget the gradient of one parameter."""
        place = self.layout.slots[slot]
        if self.local is not None:
            self.local[place.start : place.stop].zero_()
        for part, _ in self._kept_of(slot):
            part.zero_()

    def assign(self, slot: int, values: Tensor) -> None:
        """Replace the averaged gradient of one parameter; `values` has its shape and is the same on every rank."""
        for part, first in self._kept_of(slot):
            part.copy_(values.reshape(-1)[first : first + len(part)])

    def multiply(self, factor: float) -> None:
        """Multiply whatever is held."""
        for held in (self.local, self.reduced):
            if held is not None:
                held.mul_(factor)

    def own_of(self, slots: set[int]) -> list[Tensor]:
        """The parts of this rank's averaged range that belong to some parameters."""
        if self.reduced is None:
            return []
        own = self.keep.own(self.reduced)
        if len(slots) == len(self.layout.slots):
            return [own]
        pieces = self.layout.pieces(self._comm.rank)
        return [own[piece.start : piece.stop] for piece in pieces if piece.slot in slots]

    def _kept_of(self, slot: int) -> list[tuple[Tensor, int]]:
        """The part of one parameter's averaged gradient that is kept here, and the index of its first element."""
        if self.reduced is None:
            return []
        start = self.keep.start
        pieces = self.layout.pieces_between(start, start + len(self.reduced))
        return [(self.reduced[piece.start : piece.stop], piece.slot_start) for piece in pieces if piece.slot == slot]

    def drop(self) -> None:
        """Forget all gradients and free their memory."""
        self.local = self.reduced = None

    def whole(self) -> list[Tensor]:
        """The averaged gradients, one per slot in the parameter's shape; a collective. `reduced` must be there."""
        if self.reduced is None:
            raise RuntimeError("no reduced gradient")
        whole = torch.empty(self.layout.numel, dtype=self.dtype, device=self._device)
        Ticket(self._comm.all_gather(whole, self.keep.own(self.reduced).contiguous())).wait()
        return views(whole, self.layout)


def _pairs(views: Sequence[Tensor], grads: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    kept = [(view, grad) for view, grad in zip(views, grads, strict=True) if grad is not None]
    return [view for view, _ in kept], [grad for _, grad in kept]


def _gaps(layout: Layout) -> list[tuple[int, int]]:
    """The ranges of the flat buffer that belong to no parameter."""
    gaps, end = [], 0
    for slot in layout.slots:
        if end < slot.start:
            gaps.append((end, slot.start))
        end = slot.stop
    return [*gaps, (end, layout.numel)] if end < layout.numel else gaps
