"""Owns what is known of the gradients of one flat buffer: which came, which were reduced, which the user cleared.

[Note: What .grad tells]
After a reduction `.grad` of a parameter is a stand-in (released.py). It is the user's to clear: where it is gone, the
parameter's gradient is forgotten before anything is added, and a step leaves the parameter alone, as torch does. Where
only other ranks had a gradient, the stand-in comes with the step (or `gathered`), which all ranks make. Before that
such a rank cannot see that the user cleared it, though it holds a part: the others tell it where all meet next, for a
backward or a step.
"""

from collections.abc import Callable

from torch import Tensor

from onefold.engine.flat import Flat, Trained
from onefold.engine.released import ReducedGradient, metadata_only
from onefold.engine.unit import stand_in
from onefold.memory.streams import Lanes, Ticket


class Slots:
    """The state of the gradients of one trained flat buffer between and during backward passes."""

    def __init__(self, flat: Flat, trained: Trained, scale: Callable[[], float], rank: int) -> None:
        self.flat = flat
        self._scale = scale
        self.gradients = trained.gradients
        self.stand_ins = [stand_in(flat, slot, rank) for slot in range(len(flat.params))]
        self.arrived: set[int] = set()
        self.incoming: set[int] = set()
        """Slots whose stand-in made way for what autograd is about to put into `.grad`."""
        self.shown: dict[int, Tensor] = {}
        """Whole gradients that a `gathered` context shows in `.grad`: as good as the stand-in."""
        self.touched = [False] * len(flat.params)
        """Slots whose gradient lies in `gradients`."""
        self.shared: set[int] = set()
        """Those of them that were reduced, so that other ranks hold parts."""
        self.gone: set[int] = set()
        """Slots that the user cleared, of which other ranks, which may hold parts of their gradients, do not know."""
        self.known: set[int] = set()
        """Slots whose gradient stands on every rank, where the user clears it like here."""
        self.is_fresh = False
        """Whether autograd may add to `.grad` as it likes: no gradient is kept, and none is scaled."""

    def expected(self) -> int:
        with metadata_only():
            return sum(param.requires_grad for param in self.flat.params)

    def collect(self) -> None:
        """Move the arrived gradients into the flat buffer; slots that the user cleared are forgotten first."""
        self.forget_cleared()
        grads: list[Tensor | None] = [None] * len(self.flat.params)
        for slot in self.arrived:
            grads[slot] = self.flat.params[slot].grad
        self.gradients.local.add(grads)
        self.is_fresh = False
        for slot in self.arrived:
            self.flat.params[slot].grad = self.stand_ins[slot]
            self.touched[slot] = True
        self.arrived = set()

    def reduce(self, lanes: Lanes) -> Ticket:
        """Start turning what was collected into the mean over ranks."""
        self.shared.update(slot for slot, is_touched in enumerate(self.touched) if is_touched)
        return self.gradients.reduce(lanes)

    def holds(self, slot: int) -> bool:
        """Whether `.grad` still stands for what lies in `gradients`."""
        return self._stands(slot, self.flat.params[slot].grad)

    def _stands(self, slot: int, grad: Tensor | None) -> bool:
        return isinstance(grad, ReducedGradient) or (grad is not None and grad is self.shown.get(slot))

    def forget_cleared(self) -> None:
        with metadata_only():
            for slot in range(len(self.flat.params)):
                is_new = slot in self.arrived or slot in self.incoming
                if self.touched[slot] and not is_new and not self.holds(slot):
                    self.forget(slot)

    def forget(self, slot: int) -> None:
        """The user cleared or replaced the gradient of one parameter."""
        self.gradients.clear(slot)
        self.touched[slot] = False
        if slot in self.shared and slot not in self.known:
            self.gone.add(slot)
        self.known.discard(slot)
        self.shared.discard(slot)

    def stand(self, slot: int) -> None:
        """A gradient is there, of this rank or of others: it is the user's to clear here, too."""
        self.known.add(slot)
        self.shared.add(slot)
        if not self.touched[slot]:
            self.touched[slot] = True
            self.flat.params[slot].grad = self.stand_ins[slot]

    def survey(self) -> list[tuple[bool, bool, bool]]:
        """Of each slot: whether it has a gradient, one that was reduced and stands, and one that was and is gone, be
        there a new one or not.
        Gradients that the user assigned by hand count as arrived."""
        with metadata_only():
            grads = [param.grad for param in self.flat.params]
        found = []
        for slot, (grad, was_touched) in enumerate(zip(grads, self.touched, strict=True)):
            is_held = self._stands(slot, grad)
            is_gone = slot in self.gone or (was_touched and not is_held)
            found.append((grad is not None, slot in self.shared and not is_gone, is_gone))
            if grad is None or is_held:
                continue
            if was_touched:
                self.gradients.clear(slot)
            self.flat.params[slot].grad = self.scaled(grad)
            self.arrived.add(slot)
        return found

    def scaled(self, grad: Tensor) -> Tensor:
        """A gradient that did not come out of a backward pass, as one that did: times the loss scale."""
        return grad if self._scale() == 1 else grad * self._scale()

    def abandon(self) -> None:
        """Leave gradients of a backward pass that failed in `.grad`, as torch does, without the loss scale."""
        with metadata_only():
            for slot in self.arrived:
                grad = self.flat.params[slot].grad
                if grad is not None and self._scale() != 1:
                    self.flat.params[slot].grad = grad / self._scale()
        self.arrived, self.incoming = set(), set()

    def drop(self, slots: set[int]) -> None:
        """Forget the gradients of some parameters; memory is freed when they are all."""
        if len(slots) == len(self.flat.params):
            self.gradients.drop()
        with metadata_only():
            for slot in slots:
                self.gradients.clear(slot)  # though this rank gave none: others may have
                self.touched[slot] = False
                self.flat.params[slot].grad = None
        self.arrived -= slots
        self.gone -= slots
        self.known -= slots
        self.shared -= slots
