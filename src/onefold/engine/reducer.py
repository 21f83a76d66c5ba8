"""Owns the way of gradients out of a backward pass: collected per unit, reduced in one order on all ranks.

[Note: When a unit closes]
A unit's gradients are collected into its flat buffer when every trained parameter has its gradient, or at the end of
the backward pass for those that have none this time. Reductions are issued in a fixed order that all ranks agreed on
(the order in which rank 0's units closed in the first backward), each unit exactly once in every backward that
produced gradients, so ranks whose graphs differ still match. A gradient that arrives after its unit was reduced
(reentrant checkpoints of a module used twice) stays local and joins the next reduction, or the one that `flush` makes
before a step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from onefold.comm.control import Meeting
from onefold.engine.grad_state import Slots
from onefold.engine.released import metadata_only
from onefold.engine.schedule import BACKWARD
from onefold.engine.unit import Unit
from onefold.errors import OrderMismatchError
from onefold.memory.streams import Lanes, Ticket, wait_for_oldest
from onefold.memory.trace_labels import label

_IN_FLIGHT = 2
Bound = Callable[[list[Ticket], int], None]


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
        self._meet: Callable[[], Sequence[int]] | None = None
        """Waits for the other ranks where this one came to the meeting of a backward."""
        self._has_arrivals = self._is_gone = False
        self._tickets: list[Ticket] = []

    def all_slots(self) -> Iterator[Slots]:
        """The slots of every trained flat buffer."""
        return chain.from_iterable(self.slots.values())

    def has_gone(self) -> bool:
        """Whether the user cleared gradients of which the other ranks do not know. What was reduced is there first."""
        self.finish()
        for slots in self.all_slots():
            slots.forget_cleared()
        return any(slots.gone for slots in self.all_slots())

    def begin(self, is_gone: bool, told: Sequence[int] | None) -> None:
        """A backward pass starts, after `has_gone`: what the last one reduced is there, since this one may add to it.

        Args:
            is_gone: what `has_gone` said.
            told: that of each rank, where all are known to start it. None: they meet before the first
                reduction, since they must not make it for different reasons. Each comes there with its first gradient,
                and waits only when it reduces.
        """
        self._is_gone = is_gone
        self._missing = {
            index: sum(slots.expected() - len(slots.arrived) for slots in group) for index, group in self.slots.items()
        }
        is_scaled = self._scale() != 1
        for slots in self.all_slots():
            slots.is_fresh = not is_scaled and not any(slots.touched)
        self._reset()
        self._has_met = told is not None
        self._clear_gone(told or ())

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
        if slot in slots.arrived:  # `.grad` is what came earlier in this pass, not yet collected: more is added to it
            return None
        if slots.touched[slot]:
            if slots.holds(slot):
                param.grad = None
                slots.incoming.add(slot)
                return None
            slots.forget(slot)
        if param.grad is not None:
            param.grad = slots.scaled(param.grad)
        return None

    def arrive(self, index: int, slots: Slots, slot: int) -> None:
        """Autograd accumulated into one parameter's `.grad`."""
        if not (self._has_arrivals or self._has_met or self.accumulating):
            self._meet = self._meeting.begin(BACKWARD, self._is_gone)
        is_first = slot not in slots.arrived
        slots.arrived.add(slot)
        slots.incoming.discard(slot)
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
        for slots in self.all_slots() if any(cleared) else ():  # first: what is reduced next is new
            slots.forget_cleared()
            slots.gone.clear()
        for (index, position, slot), is_cleared in zip(keys, merged[2 * num : 3 * num], strict=True):
            if is_cleared:
                self.slots[index][position].gradients.clear_kept(slot)
        self._num_reduced = 0
        for index, is_pending in zip(self._order, merged[3 * num :], strict=True):
            if is_pending:
                self._reduce(index)
        self.finish()
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
            self._clear_gone(meet())

    def _clear_gone(self, told: Sequence[int]) -> None:
        """Where some rank has gradients that the user cleared, let all ranks clear their parts."""
        if not any(told):
            return
        places = [(slots, slot) for slots in self.all_slots() for slot in range(len(slots.touched))]
        _, gone = self._meeting.exchange("cleared gradients", (), [slot in slots.gone for slots, slot in places])
        for (slots, slot), is_gone in zip(places, gone, strict=True):
            if is_gone:
                slots.gradients.clear_kept(slot)
                slots.gone.discard(slot)

    def _reduce(self, index: int) -> None:
        with label("reduce", self._names[index]):
            for slots in self.slots[index]:
                self._tickets.append(slots.reduce(self._lanes))
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
