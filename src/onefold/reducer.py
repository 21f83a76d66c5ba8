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
parameter's gradient is forgotten before anything is added, and a step leaves the parameter alone, as torch does. Where
only other ranks had a gradient, the stand-in comes with the step (or `gathered`), which all ranks make: what the user
clears after it is cleared of all parts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from onefold.errors import OrderMismatchError
from onefold.flat import Flat, Trained
from onefold.labels import label
from onefold.meeting import Meeting
from onefold.released import ReducedGradient, metadata_only
from onefold.schedule import BACKWARD
from onefold.streams import Lanes, Ticket, wait_for_oldest
from onefold.unit import Unit, stand_in

_IN_FLIGHT = 2
Bound = Callable[[list[Ticket], int], None]


class Slots:
    """The state of the gradients of one trained flat buffer between and during backward passes."""

    def __init__(self, flat: Flat, trained: Trained, scale: Callable[[], float], rank: int) -> None:
        self.flat = flat
        self._scale = scale
        self.gradients = trained.gradients
        self.stand_ins = [stand_in(flat, slot, rank) for slot in range(len(flat.params))]
        self.arrived: set[int] = set()
        self.shown: dict[int, Tensor] = {}
        """Whole gradients that a `gathered` context shows in `.grad`: as good as the stand-in."""
        self.touched = [False] * len(flat.params)
        """Slots whose gradient lies in `gradients`."""
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

    def holds(self, slot: int) -> bool:
        """Whether `.grad` still stands for what lies in `gradients`."""
        return self._stands(slot, self.flat.params[slot].grad)

    def _stands(self, slot: int, grad: Tensor | None) -> bool:
        return isinstance(grad, ReducedGradient) or (grad is not None and grad is self.shown.get(slot))

    def forget_cleared(self) -> None:
        with metadata_only():
            for slot in range(len(self.flat.params)):
                if self.touched[slot] and slot not in self.arrived and not self.holds(slot):
                    self.gradients.clear(slot)
                    self.touched[slot] = False

    def stand(self, slot: int) -> None:
        """A gradient is there, of this rank or of others: it is the user's to clear here, too."""
        if not self.touched[slot]:
            self.touched[slot] = True
            self.flat.params[slot].grad = self.stand_ins[slot]

    def survey(self) -> list[tuple[bool, bool, bool]]:
        """Of each slot: whether it has a gradient, one that was reduced and stands, and one that was and is gone.
        Gradients that the user assigned by hand count as arrived."""
        with metadata_only():
            grads = [param.grad for param in self.flat.params]
        found = []
        for slot, (grad, was_touched) in enumerate(zip(grads, self.touched, strict=True)):
            is_held = self._stands(slot, grad)
            found.append((grad is not None, was_touched and is_held, was_touched and not is_held))
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
        self.arrived = set()

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


class Reducer:
    """Collects and reduces the gradients of all units.

    `bound` keeps the number of reductions under way, and so their memory, small. `scale` is the loss scale that
    gradients carry.
    """

    def __init__(
        self, units: Sequence[Unit], meeting: Meeting, lanes: Lanes, bound: Bound, scale: Callable[[], float]
    ) -> None:
        self._meeting = meeting
        self._lanes = lanes
        self._bound = bound
        self._scale = scale
        self.slots = {
            unit.index: [Slots(flat, trained, scale, meeting.rank) for flat, trained in unit.trained_flats]
            for unit in units
        }
        self.slots = {index: slots for index, slots in self.slots.items() if slots}
        self._names = {unit.index: unit.name for unit in units}
        self._order = sorted(self.slots, reverse=True)
        self._is_order_agreed = False
        self.accumulating = 0
        """`accumulate` contexts that are open."""
        self._missing: dict[int, int] = {}
        """Gradients that each unit waits for in this backward."""
        self._closed: list[int] = []
        self._position = 0
        self._num_reduced = 0
        self._num_failed = 0
        self._has_met = False
        self._meet: Callable[[], object] | None = None
        """Waits for the other ranks where this one came to the meeting of a backward."""
        self._has_arrivals = False
        self._tickets: list[Ticket] = []

    def all_slots(self) -> Iterator[Slots]:
        """The slots of every trained flat buffer."""
        return chain.from_iterable(self.slots.values())

    def begin(self, has_met: bool) -> None:
        """A backward pass starts; what the last one reduced is there first, since this one may add to it.

        Args:
            has_met: all ranks are known to start it (else they meet before the first reduction: they must not make
                it for different reasons. Each comes there with its first gradient, and waits only when it reduces).
        """
        self.finish()
        self._missing = {
            index: sum(slots.expected() - len(slots.arrived) for slots in group) for index, group in self.slots.items()
        }
        is_scaled = self._scale() != 1
        for slots in self.all_slots():
            slots.is_fresh = not is_scaled and not any(slots.touched)
        self._reset()
        self._has_met = has_met

    def _reset(self) -> None:
        self._closed = []
        self._position = 0
        self._has_met = self._has_arrivals = False
        self._meet = None

    def before(self, slots: Slots, slot: int, grad: Tensor) -> Tensor | None:
        """Autograd has the gradient of one parameter, and is about to accumulate it into `.grad` (see
        [Note: What .grad tells]) or to return it from `torch.autograd.grad`: then as this method returns it, without
        the loss scale."""
        param, is_scaled = slots.flat.params[slot], self._scale() != 1
        if (is_scaled or slots.touched[slot]) and is_captured(param):
            return grad / self._scale() if is_scaled else None
        if slots.touched[slot]:
            if slots.holds(slot):
                param.grad = None
                return None
            slots.gradients.clear(slot)
            slots.touched[slot] = False
        if param.grad is not None and slot not in slots.arrived:
            param.grad = slots.scaled(param.grad)
        return None

    def arrive(self, index: int, slots: Slots, slot: int) -> None:
        """Autograd accumulated into one parameter's `.grad`."""
        if not (self._has_arrivals or self._has_met or self.accumulating):
            self._meet = self._meeting.begin(BACKWARD)
        is_first = slot not in slots.arrived
        slots.arrived.add(slot)
        self._has_arrivals = True
        self._missing[index] -= is_first
        if not self._missing[index] and index not in self._closed:
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
        """An exception ended the backward pass; gradients that came stay in `.grad`, as in torch. Other ranks may have
        gone on: they get the reductions they wait for, and the next meeting tells them."""
        with suppress(OrderMismatchError):  # the other ranks raise it, too; here the first exception goes on
            self._come_together()
        if self._has_met and not self.accumulating and not self._meeting.is_apart:
            for index in self._order[self._position :]:
                self._reduce(index)
            self._num_failed += 1
        self.finish()
        for slots in self.all_slots():
            slots.abandon()
        self._reset()

    def finish(self) -> None:
        """Wait until every reduction that was started is done."""
        wait_for_oldest(self._tickets, 0)

    def meet(self, what: str) -> None:
        """Go on where every rank has come to `what`, beside the passes and steps.

        Raises:
            OrderMismatchError: another rank came to something else.
        """
        self.finish()
        self._meeting.exchange(what)

    def flush(self, settings: int = 0) -> set[tuple[int, int, int]]:
        """Make every gradient reduced, on every rank; a collective.

        Args:
            settings: a number that must be the same on all ranks: what is to be done with the gradients.
        Returns:
            The parameters that have a gradient on any rank, as (unit, flat among the trained ones, slot).
        Raises:
            OrderMismatchError: ranks made different numbers of reductions since the last flush.
        """
        self.finish()  # first: what is under way may need the other ranks, and they come to the meeting
        keys: list[tuple[int, int, int]] = []
        found: list[tuple[bool, bool, bool]] = []
        for index, group in sorted(self.slots.items()):
            for position, slots in enumerate(group):
                keys += [(index, position, slot) for slot in range(len(slots.touched))]
                found += slots.survey()
                if slots.arrived:
                    slots.collect()
        active, kept, cleared = zip(*found, strict=True) if found else ((), (), ())
        pending = [any(slots.gradients.local.is_there for slots in self.slots[index]) for index in self._order]
        counts, merged = self._meeting.exchange(
            "optimizer step (or gathered)",
            [self._num_reduced, self._num_failed, settings],
            [*active, *kept, *cleared, *pending],
        )
        self._check_counts(counts)
        num = len(keys)
        self._check_cleared(keys, merged[num : 2 * num], merged[2 * num : 3 * num])
        for (index, position, slot), is_cleared in zip(keys, merged[2 * num : 3 * num], strict=True):
            if is_cleared:
                self.slots[index][position].gradients.clear_kept(slot)
        self._num_reduced = 0
        for index, is_pending in zip(self._order, merged[3 * num :], strict=True):
            if is_pending:
                self._reduce(index)
        self.finish()
        for slots in self.all_slots() if any(cleared) else ():
            slots.forget_cleared()
        found_active = {key for key, is_active in zip(keys, merged, strict=False) if is_active}
        for index, position, slot in found_active:
            self.slots[index][position].stand(slot)
        return found_active

    def _check_counts(self, counts: Sequence[Sequence[int]]) -> None:
        self._num_reduced = self._num_failed = 0
        if any(count[1] != counts[0][1] for count in counts):
            failed = ", ".join(str(rank) for rank, count in enumerate(counts) if count[1])
            raise OrderMismatchError(
                f"the backward pass failed on rank {failed} alone before this step, and the exception was caught "
                f"there (this is rank {self._meeting.rank}): its gradients are missing in the mean. Let the exception "
                "end the run, or skip the step on every rank (optimizer.zero_grad() instead of step())"
            )
        if any(count[2] != counts[0][2] for count in counts):
            raise OrderMismatchError(
                f"optimizers differ between ranks (this is rank {self._meeting.rank}): rule, max_grad_norm, learning "
                "rate, every other hyper-parameter and the parameters of each group must be the same on all of them, "
                "or their weights part"
            )
        if any(count[0] != counts[0][0] for count in counts):
            numbers = ", ".join(f"rank {rank}: {count[0]}" for rank, count in enumerate(counts))
            raise OrderMismatchError(
                f"ranks reduced gradients different numbers of times before this step ({numbers}); every rank "
                "must run as many backwards, inside and outside of accumulate(model), as the others"
            )

    def _check_cleared(
        self, keys: Sequence[tuple[int, int, int]], kept: Sequence[bool], cleared: Sequence[bool]
    ) -> None:
        for (index, position, slot), is_kept, is_cleared in zip(keys, kept, cleared, strict=True):
            if is_kept and is_cleared:
                raise OrderMismatchError(
                    f"the gradient of {self.slots[index][position].flat.names[slot]!r} was cleared or replaced on some "
                    f"ranks only (this is rank {self._meeting.rank}), but it is the mean over all; assign "
                    "to .grad on every rank or on none"
                )

    def rescale(self, factor: float) -> None:
        """The loss scale changed by `factor`: so do gradients that are kept for another step."""
        for slots in self.all_slots():
            slots.gradients.multiply(factor)

    def _close(self, index: int) -> None:
        for slots in self.slots[index]:
            slots.collect()
        self._closed.append(index)

    def _advance(self) -> None:
        while (
            not self.accumulating and self._position < len(self._order) and self._order[self._position] in self._closed
        ):
            self._come_together()
            self._reduce(self._order[self._position])
            self._position += 1

    def _come_together(self) -> None:
        meet, self._meet = self._meet, None
        if meet is not None:
            self._has_met = True
            meet()

    def _reduce(self, index: int) -> None:
        with label("reduce", self._names[index]):
            for slots in self.slots[index]:
                self._tickets.append(slots.gradients.reduce(self._lanes))
        self._num_reduced += 1
        self._bound(self._tickets, _IN_FLIGHT)

    def _agree(self) -> None:
        if self._is_order_agreed or self.accumulating:
            return
        self._order = self._meeting.exchange_order(self._closed)
        self._is_order_agreed = True


def is_captured(param: nn.Parameter) -> bool:
    """Whether the running backward pass returns the gradient of `param` (torch.autograd.grad) instead of accumulating
    it into `.grad`."""
    will_execute: Callable[[object], bool] = torch._C._will_engine_execute_node  # type: ignore[assignment]
    with torch.enable_grad(), metadata_only():
        view: Any = param.view_as(param).grad_fn
    if will_execute(view):
        return False  # a pass over everything says so even of what is not part of it
    try:
        return not will_execute(view.next_functions[0][0])
    except RuntimeError:  # torch's answer for a leaf whose gradient is returned
        return True
