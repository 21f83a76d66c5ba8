"""Owns one rank's own sum of the gradients of one flat buffer, before it is reduced.

Invariant: padding is zero in it.

[Note: Loose gradients]
Copying gradients into one buffer takes as long as an update of half of them. Where the wire can read them one by one
(`Comm.reads_parts`), large ones that come for the first time stay as autograd made them, and only a second backward
before the reduction has them copied.
"""

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from onefold.memory.buffer import views
from onefold.plan.layout import Layout

_LOOSE_BYTES = 2**26
"""Of a buffer. Below, launching a copy for every gradient takes the host longer than one for all takes a GPU."""


class LocalSum:
    """The sum, if there is one. See [Note: Loose gradients].

    Args:
        may_be_loose: whether it may be taken in parts.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, may_be_loose: bool) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._may_be_loose = may_be_loose and layout.numel * dtype.itemsize >= _LOOSE_BYTES
        self._gaps = _gaps(layout)
        self._whole: Tensor | None = None  # [numel]
        self._loose: Sequence[Tensor] = ()  # in its place: each 1-D; one after another they are [numel]

    @property
    def is_there(self) -> bool:
        return self._whole is not None or bool(self._loose)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts())

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add one gradient per slot (None: no gradient)."""
        dense = [grad.to_dense() if grad is not None and grad.layout != torch.strided else grad for grad in grads]
        if not self.is_there:
            self._begin(dense)
        elif any(grad is not None for grad in dense):
            torch._foreach_add_(*_pairs(views(self._packed(), self._layout), dense))

    def take(self) -> Sequence[Tensor]:
        """The sum (zeros where there is none), in parts that follow one another; it is forgotten here."""
        parts = self._parts() or [torch.zeros(self._layout.numel, dtype=self._dtype, device=self._device)]
        self.drop()
        return parts

    def clear(self, slot: int) -> None:
        """Forget the gradient of one parameter."""
        if self.is_there:
            place = self._layout.slots[slot]
            self._packed()[place.start : place.stop].zero_()

    def multiply(self, factor: float) -> None:
        if self.is_there:
            self._packed().mul_(factor)

    def drop(self) -> None:
        self._whole, self._loose = None, ()

    def _parts(self) -> Sequence[Tensor]:
        return self._loose if self._whole is None else [self._whole]

    def _packed(self) -> Tensor:
        """The sum, which must be there, in one tensor of its own from now on."""
        if self._whole is None:
            self._whole, self._loose = self._joined(self._loose), ()
        return self._whole

    def _begin(self, dense: Sequence[Tensor | None]) -> None:
        plain = [g for g in dense if g is not None and g.is_contiguous() and g.dtype == self._dtype]
        if len(plain) < len(dense):
            self._whole = self._filled(dense)
        elif self._may_be_loose:
            self._loose = [part for part in self._in_order(plain) if len(part)]
        else:
            self._whole = self._joined(self._in_order(plain))

    def _in_order(self, plain: Sequence[Tensor]) -> list[Tensor]:
        """All gradients, and zeros for what belongs to none, by where they lie."""
        most = max((stop - start for start, stop in self._gaps), default=0)
        zeros = torch.zeros(most, dtype=self._dtype, device=self._device)
        starts = [slot.start for slot in self._layout.slots] + [start for start, _ in self._gaps]
        parts = [grad.reshape(-1) for grad in plain] + [zeros[: stop - start] for start, stop in self._gaps]
        return [part for _, part in sorted(zip(starts, parts, strict=True), key=itemgetter(0))]

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """One kernel at the rate of a copy, of which foreach reaches two thirds (log.md); it copies others twice."""
        return torch.cat(list(parts), out=self._empty())

    def _filled(self, dense: Sequence[Tensor | None]) -> Tensor:
        """Of gradients of which some are missing, or in another form."""
        whole = self._empty()
        places = views(whole, self._layout)
        missing = [view for view, grad in zip(places, dense, strict=True) if grad is None]
        if len(missing) < len(places):
            torch._foreach_copy_(*_pairs(places, dense))
        gaps = [whole[start:stop] for start, stop in self._gaps]
        if missing or gaps:
            torch._foreach_zero_([*missing, *gaps])
        return whole

    def _empty(self) -> Tensor:
        return torch.empty(self._layout.numel, dtype=self._dtype, device=self._device)


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
