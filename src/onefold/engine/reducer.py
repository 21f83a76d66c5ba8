"""Owns the way of gradients out of a backward pass: collected per unit, reduced in one order on all ranks.

[Note: When a unit closes]
A unit's gradients are collected into its flat buffer when every trained parameter has its gradient, or at the end of
the backward pass for those that have none this time. Reductions are issued in a fixed order that all ranks agreed on
(the order in which rank 0's units closed in the first backward), each unit exactly once in every backward that
produced gradients, so ranks whose graphs differ still match. A gradient that arrives after its unit was reduced
(reentrant checkpoints of a module used twice) stays local and joins the next reduction, or the one that `settle` makes
before a step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import nn

from onefold.comm.control import Control
from onefold.engine.grad_report import GradientReport, Told, mask_of, places_in
from onefold.engine.grad_states import GradStates
from onefold.engine.released import metadata_only
from onefold.engine.schedule import Schedule, Unscheduled
from onefold.engine.unit import Unit
from onefold.errors import OrderMismatchError
from onefold.memory.streams import Lanes, Started, wait_for_all
from onefold.memory.trace_labels import label

_IN_FLIGHT = 2
"""Reductions under way, if all were as large as the largest."""
Bound = Callable[[list[Started], int], None]
Key = tuple[int, int, int]
"""A trained parameter: unit, flat buffer among the unit's trained ones, slot."""


class Reducer:
    """Collects and reduces the gradients of all units.

    `bound` keeps the memory of reductions under way small. `scale` is the loss scale that
    gradients carry. `enter_pass` is called before the first reduction of a pass.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        control: Control,
        lanes: Lanes,
        bound: Bound,
        scale: Callable[[], float],
        enter_pass: Callable[[], None],
    ) -> None:
        self._control = control
        self._enter_pass = enter_pass
        self._lanes = lanes
        self._bound = bound
        self._scale = scale
        states = {
            unit.index: [GradStates(flat, trained, scale, control.rank) for flat, trained in unit.trained_flats]
            for unit in units
        }
        self.states = {index: group for index, group in states.items() if group}
        self._names = {unit.index: unit.name for unit in units}
        self._places = [
            (states, (index, position, slot))
            for index, group in sorted(self.states.items())
            for position, states in enumerate(group)
            for slot in range(len(states.flat.params))
        ]
        self._order = sorted(self.states, reverse=True)
        self._first_order: list[int] = []
        """In which units closed in the first backward; empty before, and once ranks agreed on one."""
        self._is_order_agreed = False
        self.accumulating = 0
        """`accumulate` contexts that are open."""
        self._num_reduced = self._num_agreed = 0
        """Reductions so far, and how many of them ranks found that they had all made."""
        self._num_failed = 0
        self._started: list[Started] = []
        largest = max((sum(each.gradients.whole_bytes for each in group) for group in self.states.values()), default=0)
        self._most_bytes = _IN_FLIGHT * largest
        self._missing: dict[int, int] = {}
        """Gradients that each unit waits for in this backward."""
        self._closed: list[int] = []
        self._position = 0
        """Reductions of the order that were issued in this pass."""
        self._has_arrivals = False

    @property
    def scale(self) -> float:
        """The loss scale that gradients carry now."""
        return self._scale()

    def all_states(self) -> Iterator[GradStates]:
        """Those of every trained flat buffer."""
        return chain.from_iterable(self.states.values())

    @property
    def report_bytes(self) -> int:
        """Bytes of a packed report."""
        return GradientReport.num_bytes(len(self._places), len(self._order))

    # --- a backward pass

    def begin(self) -> None:
        """A backward pass starts: what the last one reduced is there, since this one may add to it."""
        self.finish()
        self._reset()
        for states in self.all_states():
            states.look()
        self._missing = {
            index: sum(states.num_expected() - states.num_arrived for states in group)
            for index, group in self.states.items()
        }

    def _reset(self) -> None:
        self._missing, self._closed, self._position, self._has_arrivals = {}, [], 0, False

    def arrive(self, index: int, states: GradStates, slot: int) -> None:
        """Autograd accumulated into one parameter's `.grad`."""
        self._has_arrivals = True
        self._missing[index] -= states.take(slot)
        if not self._missing[index] and index not in self._closed:
            self._close(index)
            self._advance()

    def end(self) -> None:
        """The backward pass is over: collect what is left, and reduce unless accumulating."""
        if self._has_arrivals:
            for index in self._order:
                if index not in self._closed:
                    self._close(index)
            self._advance()
            for states in self.all_states():
                states.collect()
            self._first_order = self._first_order or self._closed
        self._reset()

    def abort(self) -> None:
        """An exception ended the backward pass; gradients that came are kept, as in torch. Other ranks may have gone
        on: they get the reductions they wait for, and the next step tells them."""
        for states in self.all_states():
            states.abandon()
        if not self.accumulating:
            with suppress(OrderMismatchError):  # the other ranks raise it, too; here the first exception goes on
                self._reduce_up_to(len(self._order))
            self._num_failed += 1
        self.finish()
        self._reset()

    def finish(self) -> None:
        """Wait until every reduction that was started is done."""
        wait_for_all(self._started)

    def _close(self, index: int) -> None:
        for states in self.states[index]:
            states.collect()
        self._closed.append(index)

    def _advance(self) -> None:
        ready = self._position
        while ready < len(self._order) and self._order[ready] in self._closed:
            ready += 1
        if not self.accumulating:
            self._reduce_up_to(ready)

    def _reduce_up_to(self, position: int) -> None:
        if position and not self._position:
            self._enter_pass()
        for index in self._order[self._position : position]:
            self._reduce(index)
            self._position += 1

    def _reduce(self, index: int) -> None:
        with label("reduce", self._names[index]):
            for states in self.states[index]:
                self._started.append((states.reduce(self._lanes), states.gradients.whole_bytes))
        self._num_reduced += 1
        self._bound(self._started, self._most_bytes)

    # --- between ranks

    def report(self, settings: int, schedule: Schedule | Unscheduled) -> GradientReport:
        """What this rank tells the others before gradients are used; `settings` must be equal on all ranks."""
        self.finish()  # first: what is under way may need the other ranks, and they come to tell
        for states in self.all_states():
            states.take_assigned()
        states_in_order = [states for _, group in sorted(self.states.items()) for states in group]
        return GradientReport(
            num_reduced=self._num_reduced,
            num_failed=self._num_failed,
            settings=settings,
            is_order_stale=schedule.is_stale,
            order=schedule.digests,
            squares=0.0,
            given=mask_of(chain.from_iterable(states.given() for states in states_in_order)),
            kept=mask_of(chain.from_iterable(states.kept() for states in states_in_order)),
            cleared=mask_of(chain.from_iterable(states.cleared() for states in states_in_order)),
            pending=mask_of(
                any(states.gradients.local.is_there for states in self.states[index]) for index in sorted(self.states)
            ),
        )

    def tell(self, what: str, report: GradientReport) -> Told:
        """Every rank's report, where all ranks came to `what`.

        Raises:
            OrderMismatchError: a rank came to something else, or made other passes since the last report.
        """
        sizes = len(self._places), len(self._order)
        told = Told([GradientReport.unpack(each, *sizes) for each in self._control.meet(what, report.pack(*sizes))])
        self._check(told)
        return told

    def settle(self, told: Told) -> tuple[set[Key], bool]:
        """Make every gradient reduced and agreed on, on every rank.

        Returns:
            The parameters that have a gradient on any rank; whether the means are others than when it was told.
        """
        given, cleared, pending = told.given, told.cleared, told.pending
        for place in places_in(cleared):
            states, (_, _, slot) = self._places[place]
            states.clear(slot)
        in_order = sorted(self.states)
        waiting = {in_order[place] for place in places_in(pending)}
        for index in self._order:
            if index in waiting:
                self._reduce(index)
        self.finish()
        for place, (states, (_, _, slot)) in enumerate(self._places):
            states.agree(slot, bool(given >> place & 1))
        if self._num_agreed and not self._is_order_agreed:
            self._order = self._control.order_of_rank_0(self._first_order or self._order)
            self._is_order_agreed = True
        return {self._places[place][1] for place in places_in(given)}, bool(pending or cleared)

    def _check(self, told: Told) -> None:
        reports, rank = told.reports, self._control.rank
        self._num_failed = 0
        if any(report.num_failed != reports[0].num_failed for report in reports):
            failed = ", ".join(str(place) for place, report in enumerate(reports) if report.num_failed)
            raise OrderMismatchError(
                f"the backward pass failed on rank {failed} alone before this step, and the exception was caught "
                f"there (this is rank {rank}): its gradients are missing in the mean. Let the exception "
                "end the run, or skip the step on every rank (optimizer.zero_grad() instead of step())"
            )
        if any(report.settings != reports[0].settings for report in reports):
            raise OrderMismatchError(
                f"optimizers differ between ranks (this is rank {rank}): rule, max_grad_norm, learning "
                "rate, every other hyper-parameter and the parameters of each group must be the same on all of them, "
                "or their weights part"
            )
        if any(report.num_reduced != reports[0].num_reduced for report in reports):
            made = [report.num_reduced - self._num_agreed for report in reports]
            numbers = ", ".join(f"rank {place}: {number}" for place, number in enumerate(made))
            raise OrderMismatchError(
                f"ranks reduced gradients different numbers of times before this step ({numbers}); every rank "
                "must run as many backwards, inside and outside of accumulate(model), as the others"
            )
        self._num_agreed = reports[rank].num_reduced
        for place in places_in(told.torn):
            states, (_, _, slot) = self._places[place]
            raise OrderMismatchError(
                f"the gradient of {states.flat.names[slot]!r} was cleared or replaced on some ranks only (this is rank "
                f"{rank}), but it is the mean over all; assign to .grad on every rank or on none, and throw gradients "
                "away with optimizer.zero_grad(), which reaches those that only other ranks have"
            )

    def forget_failures(self) -> None:
        """The gradients of the passes until now were thrown away on every rank, and with them what failed."""
        self._num_failed = 0

    def rescale(self, factor: float) -> None:
        """The loss scale changed by `factor`: so do gradients that are kept for another step."""
        for states in self.all_states():
            states.gradients.multiply(factor)


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
