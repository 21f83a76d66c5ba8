"""Owns the way of gradients out of a backward pass: collected per unit, reduced in one order on all ranks.

[Note: When a unit closes]
A unit's gradients are collected into its flat buffer when every trained parameter has its gradient, or at the end of
the backward pass for those that have none this time. Reductions are issued in a fixed order that all ranks agreed on
(the order in which rank 0's units closed in the first backward), each unit exactly once in every backward that
produced gradients, so ranks whose graphs differ still match. A gradient that arrives after its unit was reduced
(reentrant checkpoints of a module used twice) stays local and joins the next reduction, or the one that `flush` makes
before a step.

[Note: What .grad tells]
After a reduction `.grad` of a parameter is a stand-in (released.py). It is the user's to clear: where it is gone, the
parameter's gradient is forgotten before anything is added, and a step leaves the parameter alone, as torch does.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from torch import Tensor

from onefold.errors import OrderMismatchError
from onefold.meeting import Meeting
from onefold.released import ReducedGradient, metadata_only
from onefold.streams import Lanes, Ticket, wait_for_oldest
from onefold.unit import Flat, Trained, Unit, stand_in

_IN_FLIGHT = 2
Bound = Callable[[list[Ticket], int], None]


class Slots:
    """The state of the gradients of one trained flat buffer between and during backward passes."""

    def __init__(self, flat: Flat, trained: Trained) -> None:
        self.flat = flat
        self.gradients = trained.gradients
        self.stand_ins = [stand_in(flat, slot) for slot in range(len(flat.params))]
        self.arrived: set[int] = set()
        self.shown: dict[int, Tensor] = {}
        """Whole gradients that a `gathered` context shows in `.grad`: as good as the stand-in."""
        self.touched = [False] * len(flat.params)
        """Slots whose gradient lies in `gradients`."""

    def expected(self) -> int:
        with metadata_only():
            return sum(param.requires_grad for param in self.flat.params)

    def collect(self) -> None:
        """Move the arrived gradients into the flat buffer; slots that the user cleared are forgotten first."""
        self.forget_cleared()
        grads: list[Tensor | None] = [None] * len(self.flat.params)
        for slot in self.arrived:
            grads[slot] = self.flat.params[slot].grad
        self.gradients.collect(grads)
        for slot in self.arrived:
            self.flat.params[slot].grad = self.stand_ins[slot]
            self.touched[slot] = True
        self.arrived = set()

    def holds(self, slot: int) -> bool:
        """Whether `.grad` still stands for what lies in `gradients`."""
        grad = self.flat.params[slot].grad
        return isinstance(grad, ReducedGradient) or (grad is not None and grad is self.shown.get(slot))

    def forget_cleared(self) -> None:
        with metadata_only():
            for slot in range(len(self.flat.params)):
                if self.touched[slot] and slot not in self.arrived and not self.holds(slot):
                    self.gradients.clear(slot)
                    self.touched[slot] = False

    def take_assigned(self) -> list[bool]:
        """Count gradients that the user assigned by hand as arrived; returns which slots have a gradient."""
        with metadata_only():
            grads = [param.grad for param in self.flat.params]
        for slot, grad in enumerate(grads):
            if grad is None or self.holds(slot):
                continue
            if self.touched[slot]:
                self.gradients.clear(slot)
            self.arrived.add(slot)
        return [grad is not None for grad in grads]

    def drop(self) -> None:
        self.gradients.drop()
        self.arrived = set()
        self.touched = [False] * len(self.flat.params)
        with metadata_only():
            for param in self.flat.params:
                param.grad = None


class Reducer:
    """Collects and reduces the gradients of all units.

    `meet` is called before the first reduction of a backward pass: ranks must not start it for different reasons.
    `bound` keeps the number of reductions under way, and so their memory, small.
    """

    def __init__(
        self, units: Sequence[Unit], meeting: Meeting, lanes: Lanes, meet: Callable[[], object], bound: Bound
    ) -> None:
        self._meeting = meeting
        self._lanes = lanes
        self._meet = meet
        self._bound = bound
        self.slots = {unit.index: [Slots(flat, trained) for flat, trained in unit.trained_flats] for unit in units}
        self.slots = {index: slots for index, slots in self.slots.items() if slots}
        self._order = sorted(self.slots, reverse=True)
        self._is_order_agreed = False
        self.accumulating = 0
        """`accumulate` contexts that are open."""
        self._expected: dict[int, int] = {}
        self._closed: list[int] = []
        self._position = 0
        self._num_reduced = 0
        self._has_arrivals = False
        self._tickets: list[Ticket] = []

    def all_slots(self) -> Iterator[Slots]:
        """The slots of every trained flat buffer."""
        return chain.from_iterable(self.slots.values())

    def begin(self) -> None:
        """A backward pass starts; what the last one reduced is there first, since this one may add to it."""
        self.finish()
        self._expected = {index: sum(slots.expected() for slots in group) for index, group in self.slots.items()}
        self._reset()

    def _reset(self) -> None:
        self._closed = []
        self._position = 0
        self._has_arrivals = False

    def before(self, slots: Slots, slot: int) -> None:
        """Autograd is about to accumulate into one parameter's `.grad`. See [Note: What .grad tells]."""
        if not slots.touched[slot]:
            return
        param = slots.flat.params[slot]
        if slots.holds(slot):
            param.grad = None
        else:
            slots.gradients.clear(slot)
            slots.touched[slot] = False

    def arrive(self, index: int, slots: Slots, slot: int) -> None:
        """Autograd accumulated into one parameter's `.grad`."""
        slots.arrived.add(slot)
        self._has_arrivals = True
        if index in self._closed:
            return
        if sum(len(group.arrived) for group in self.slots[index]) == self._expected[index]:
            self._close(index)
            self._advance()

    def end(self) -> None:
        """The backward pass is over: collect what is left, and reduce unless accumulating."""
        if self._has_arrivals:
            rest = [index for index in self._order if index not in self._closed]
            for index in rest:
                self._close(index)
            self._advance()
            for slots in self.all_slots():
                if slots.arrived:
                    slots.collect()
            self._agree()
        self._reset()

    def abort(self) -> None:
        """An exception ended the backward pass; gradients that came stay in `.grad`, as in torch."""
        self.finish()
        for slots in self.all_slots():
            slots.arrived = set()
        self._reset()

    def finish(self) -> None:
        """Wait until every reduction that was started is done."""
        wait_for_oldest(self._tickets, 0)

    def flush(self) -> set[tuple[int, int, int]]:
        """Make every gradient reduced, on every rank; a collective.

        Returns:
            The parameters that have a gradient on any rank, as (unit, flat among the trained ones, slot).
        Raises:
            OrderMismatchError: ranks made different numbers of reductions since the last flush.
        """
        keys: list[tuple[int, int, int]] = []
        active: list[bool] = []
        for index in sorted(self.slots):
            for position, slots in enumerate(self.slots[index]):
                has_gradient = slots.take_assigned()
                keys += [(index, position, slot) for slot in range(len(has_gradient))]
                active += has_gradient
                if slots.arrived:
                    self.finish()
                    slots.collect()
        pending = [any(slots.gradients.local is not None for slots in self.slots[index]) for index in self._order]
        counts, merged = self._meeting.exchange(
            "optimizer step (or gathered)", [self._num_reduced], [*active, *pending]
        )
        if any(count != counts[0] for count in counts):
            raise OrderMismatchError(
                f"ranks reduced gradients different numbers of times before this step (by rank: {counts}); every rank "
                "must run as many backwards, inside and outside of accumulate(model), as the others"
            )
        self._num_reduced = 0
        for index, is_pending in zip(self._order, merged[len(active) :], strict=True):
            if is_pending:
                self._reduce(index)
        self.finish()
        for slots in self.all_slots():
            slots.forget_cleared()
        return {key for key, is_active in zip(keys, merged, strict=False) if is_active}

    def drop(self) -> None:
        """Forget every gradient."""
        self.finish()
        for slots in self.all_slots():
            slots.drop()

    def _close(self, index: int) -> None:
        for slots in self.slots[index]:
            slots.collect()
        self._closed.append(index)

    def _advance(self) -> None:
        while (
            not self.accumulating and self._position < len(self._order) and self._order[self._position] in self._closed
        ):
            if self._position == 0:
                self._meet()
            self._reduce(self._order[self._position])
            self._position += 1

    def _reduce(self, index: int) -> None:
        for slots in self.slots[index]:
            self._tickets.append(slots.gradients.reduce(self._lanes))
        self._num_reduced += 1
        self._bound(self._tickets, _IN_FLIGHT)

    def _agree(self) -> None:
        if self._is_order_agreed or self.accumulating:
            return
        self._order = self._meeting.exchange_order(self._closed)
        self._is_order_agreed = True
