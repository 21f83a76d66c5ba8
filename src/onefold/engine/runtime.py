"""Owns a sharded model at run time: it brings units in before they are used and lets them go after.

[Note: When a unit is needed]
A unit is needed at one of four events: a forward of one of its modules starts; an operation touches a released
parameter (released.py); autograd unpacks a tensor it saved; the frozen order says it comes next (prefetch). During
forward, autograd's saved tensors that lie in a unit's buffer are replaced by `SavedView`s - an address, not a tensor -
so a unit can be released after its forward, and whatever path a backward pass takes into the model, unpacking brings
the unit back.

[Note: When a unit is released]
In forward when its module has returned (one that was joined of several: when another unit is needed after that); in
backward when nothing that autograd saved points into it any more, seen whenever another unit is needed; and at the end
of every outermost forward and every backward. A `KeptUnit` is not released in a forward with gradients: it rests,
gathered, until a backward has used it, or until the next forward or step begins without one. Ranks come to these points
together, so all of them keep the same units.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from onefold.comm.control import Control
from onefold.engine.flat import Flat
from onefold.engine.grad_report import Told
from onefold.engine.param_guard import Bound
from onefold.engine.reducer import Key, Reducer
from onefold.engine.released import name_of
from onefold.engine.running import Running, in_backward, outside_of_modes
from onefold.engine.saved_tensors import SavedView, SavingHooks, is_plain, others_save
from onefold.engine.schedule import ACCUMULATING, BACKWARD, Schedule, Unscheduled
from onefold.engine.sharded_unit import ShardedUnit
from onefold.engine.unit import Unit, Use
from onefold.errors import OnefoldError, PrecisionError, ReleasedParameterError
from onefold.memory.trace_labels import label

_TRIES, _PAUSE_S = 100, 0.0005


class Runtime:
    """Runs one sharded model. `root` is unit 0; `prefetch_bytes` bounds units gathered ahead of their use."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        control: Control,
        reducer: Reducer,
        prefetch_bytes: int,
        is_scaled: Callable[[], bool],
    ) -> None:
        self.units = tuple(units)
        self._rank = control.rank
        self.reducer = reducer
        self.prefetch_bytes = prefetch_bytes
        self._is_scaled = is_scaled
        self._flats = {
            flat.buffer.storage_id: (unit, flat)
            for unit in units
            if isinstance(unit, ShardedUnit)
            for flat in unit.flats
        }
        self.schedule: Schedule | Unscheduled = (
            Schedule([unit.name or "(root)" for unit in units], control, self._issue) if self._flats else Unscheduled()
        )
        self._places = {
            id(param): (unit, flat, slot)
            for unit in units
            for flat in unit.flats
            for slot, param in enumerate(flat.params)
        }
        self._bound = Bound(model, units, self.describe)
        self._entered: list[tuple[nn.Module, Unit, AbstractContextManager[Any]]] = []
        """Running forwards: module, unit, and the label a profiler shows."""
        self._saving = SavingHooks(self)
        self._pushed: list[bool] = []
        self._backward_open = False
        self._is_recorded = False
        """Whether a backward may follow the outermost forward."""
        self._unfreed: list[Unit] = []
        self._running = Running()
        self._written: list[nn.Parameter] = []
        control.serve_with(self.gather_asked)

    # --- forward ---------------------------------------------------------------------------------------------------

    @property
    def is_outermost(self) -> bool:
        """Whether no forward of a hooked module is running (recomputation in backward does not count)."""
        return not self._entered

    def enter(self, module: nn.Module, unit: Unit, name: str) -> None:
        """The forward of a unit's module starts."""
        if any(entered is module for entered, _, _ in self._entered) and self._running.is_lost:
            self._abandon()
        if self.is_outermost and not in_backward():
            self.settle()
            self._release_kept()
            self._is_recorded = torch.is_grad_enabled()
            self._bound.check(self._is_recorded)
            self.push_saving()
            self._begin_forward(name)
            for each in self.units:
                each.use = Use()
            self._running.begin()
        self._entered.append((module, unit, label("forward", name)))
        self._entered[-1][2].__enter__()
        unit.depth += 1
        self.need(unit)

    def _begin_forward(self, name: str) -> None:
        if all(unit.pins for unit in self.units if unit.flats):
            return  # nothing will be gathered, and ranks need not meet
        try:
            self.schedule.begin(f"forward of {name or 'the model'}")
        except OnefoldError:
            self.pop_saving()
            raise

    def leave(self, module: nn.Module) -> None:
        """The forward of a unit's module ended, normally or by an exception (which may have skipped inner calls)."""
        if all(entered is not module for entered, _, _ in self._entered):
            return
        left = None
        while left is not module:
            left, unit = self._end_entered()
            unit.depth -= 1
            self._leave_unit(unit)
        if self.is_outermost and not in_backward():
            self._running.end()
            self.pop_saving()
            self.release_unpinned(self._is_recorded)
            self.schedule.end()  # which may gather what other ranks need
            self.release_unpinned(self._is_recorded)
            self.check_written()

    def _abandon(self) -> None:
        """Clean up after a forward that ended without a word."""
        while self._entered:
            _, unit = self._end_entered()
            unit.depth = 0
        self._running.end()
        self.pop_saving()
        self.schedule.abort()
        self.release_unpinned()

    def _end_entered(self) -> tuple[nn.Module, Unit]:
        module, unit, shown = self._entered.pop()
        shown.__exit__(None, None, None)
        return module, unit

    def _leave_unit(self, unit: Unit) -> None:
        if unit.is_done() and not unit.is_joined and not in_backward():
            self._release(unit, self._is_recorded)

    def need(self, unit: Unit) -> None:
        """Make a unit's parameters readable on the current stream, and start gathering what comes next."""
        if unit.is_readable:
            return
        self._release_done(unit)
        with outside_of_modes():  # what a selective checkpoint records of a forward is not ours
            if not unit.is_gathered:
                self.schedule.request(unit.index)
            elif not unit.is_kept:  # that was no gather of this phase
                self.schedule.use(unit.index)
            unit.show()
            self._prefetch()

    def touch(self, params: Sequence[nn.Parameter], func: Callable[..., Any]) -> None:
        """Gather released parameters that `func` is about to read, if a pass of the model is running."""
        for param in params:
            unit, _, _ = self.locate(param)
            if self.schedule.phase is None and (unit.is_kept or not unit.is_gathered):
                raise ReleasedParameterError(
                    f"{self.describe(param)} is not gathered: its values rest in shards, "
                    f"so {name_of(func)} cannot read it here. Use it inside the model's "
                    "forward, or inside `with onefold.gathered(model):` (write=True to change it)"
                )
            self.need(unit)

    def is_whole(self, param: nn.Parameter) -> bool:
        """Whether the parameter rests whole."""
        return not isinstance(self.locate(param)[0], ShardedUnit)

    def locate(self, param: nn.Parameter) -> tuple[Unit, Flat, int]:
        """The unit, flat buffer and slot of a parameter."""
        return self._places[id(param)]

    def finish_updates(self) -> None:
        """Wait for every update that is under way. See [Note: The gated step]. What goes wrong in several of them is
        raised once: they have one cause, mostly."""
        errors = []
        for unit in self.units:
            try:
                unit.finish_updates()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def catch_up(self) -> None:
        """Wait for every update that is under way or late, and let all results be seen: [Note: The delayed update].
        Raises ShardError where parameters hold other values than those kept: see `Bound.check`."""
        self.finish_updates()
        self._bound.check()
        self._release_kept()
        for unit in self.units:
            unit.finish_late_updates()
        for unit in self.units:
            unit.show_updated()

    def manages(self, param: nn.Parameter) -> bool:
        """Whether the parameter belongs to a unit."""
        return id(param) in self._places

    def describe(self, param: nn.Parameter) -> str:
        unit, flat, slot = self.locate(param)
        return f"{flat.names[slot]!r} {flat.layout.slots[slot].shape} (unit {unit.name!r}, rank {self._rank})"

    # --- saved tensors ---------------------------------------------------------------------------------------------

    def push_saving(self) -> None:
        """From here on autograd saves addresses instead of views of units. See [Note: When a unit is needed].

        Not where other saving hooks are active: activation checkpoints and offloaders take care of what they see.
        """
        is_pushed = bool(self._flats) and not others_save()
        if is_pushed:
            self._saving.push()
        self._pushed.append(is_pushed)

    def pop_saving(self) -> None:
        """Undo the latest `push_saving`."""
        if self._pushed.pop():
            self._saving.pop()

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        if not is_plain(tensor) or tensor.layout != torch.strided:
            return tensor
        found = self._flats.get(tensor.untyped_storage()._cdata)
        if found is None or found[1].buffer.whole.dtype != tensor.dtype:
            return tensor.detach()  # a saved output would hold the node that holds it
        return SavedView(*found, tensor)

    def unpack(self, saved: Tensor | SavedView) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.version != saved.flat.version:
            raise OnefoldError(
                f"parameters of unit {saved.unit.name!r} were updated between this forward and its backward; run "
                "backward before optimizer.step()"
            )
        if in_backward():
            self.open_backward()
        saved.unit.open_uses.add(saved.use)
        self.need(saved.unit)
        return saved.flat.buffer.whole.data.as_strided(saved.shape, saved.strides, saved.offset)

    # --- backward --------------------------------------------------------------------------------------------------

    def open_backward(self, at_output: bool = False) -> None:
        """Called at every event inside a backward pass; the first one arranges for the end.

        Raises:
            PrecisionError: gradients are scaled as they enter at the model's outputs, but these entered elsewhere.
        """
        if self._backward_open:
            return
        if self._is_scaled() and not at_output:
            raise PrecisionError(
                "this backward pass entered the model at a tensor that its forward did not return (an attribute, an "
                "opaque object), where loss_scale is not applied; return that tensor from forward, in a tuple, list, "
                'dict or dataclass, or use Precision(params="bf16"), which needs no loss scale'
            )
        self._backward_open = True
        self.finish_updates()
        torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)
        phase = ACCUMULATING if self.reducer.accumulating else BACKWARD
        self.reducer.begin()
        self.schedule.begin(phase)
        self._prefetch()

    def settle(self) -> None:
        """Clean up after a pass that an exception ended. Outside of passes nothing is left open."""
        if self._running.is_lost and not in_backward():
            self._abandon()
        if self._backward_open and not in_backward():
            self._backward_open = False
            self.schedule.abort()
            self.reducer.abort()
            while self._entered:
                self._end_entered()
            self.release_unpinned()
        self._free_released()

    def _close_backward(self) -> None:
        self._backward_open = False
        self.release_unpinned()
        self.schedule.end()  # first: a rank that is done early must go on serving gathers before it waits for anything
        self.release_unpinned()
        self.reducer.end()

    def agree(self, what: str, settings: int = 0, squares: Callable[[], float] = float) -> tuple[set[Key], Told, bool]:
        """Where all ranks have come to `what`: make every gradient reduced, and agreed on between them.

        Args:
            settings: a number that must be the same on all ranks: what is to be done with the gradients.
            squares: of this rank's range of the means, which other ranks are told.
        Returns:
            The parameters that have a gradient on any rank; what ranks told; whether the means have changed since.
        Raises:
            OrderMismatchError: on every rank, where one came to something else, or did something else before.
        """
        report = self.reducer.report(settings, self.schedule)
        told = self.reducer.tell(what, replace(report, squares=squares()))
        self.schedule.compare([each.order for each in told.reports])
        if told.is_order_stale:
            self.schedule.forget()
        active, is_changed = self.reducer.settle(told)
        return active, told, is_changed

    def gather_asked(self, index: int, is_wanted: bool) -> None:
        self.units[index].gather_on_host(is_wanted)

    # --- gathering and releasing -----------------------------------------------------------------------------------

    def _issue(self, index: int) -> None:
        unit = self.units[index]
        if unit.is_gathered:
            unit.show()
        unit.gather()

    def _prefetch(self) -> None:
        if self.schedule.upcoming is None:
            return
        ahead = sum(unit.nbytes for unit in self.units if unit.is_ahead)
        while self.schedule.upcoming is not None:
            unit = self.units[self.schedule.upcoming]
            ahead += unit.nbytes
            if unit.is_gathered or unit.is_updating or ahead > self.prefetch_bytes:
                return
            self.schedule.issue_next()

    def _release_done(self, wanted: Unit) -> None:
        is_forward = not in_backward()
        for unit in self.units:
            if unit.is_readable and unit is not wanted and unit.is_done() and (unit.is_joined or not is_forward):
                self._release(unit, is_forward and self._is_recorded)
        self._free_released()

    def release_unpinned(self, may_keep: bool = False) -> None:
        """Release every unit that no `gathered` context holds; those that are kept for backward rest if they may."""
        for unit in self.units:
            if unit.pins == 0:
                unit.depth = 0
                if unit.is_gathered:
                    self._release(unit, may_keep)
        self._free_after_pass()

    def _free_released(self) -> None:
        self._unfreed = [unit for unit in self._unfreed if not unit.is_gathered and not unit.try_free()]

    def _free_after_pass(self) -> None:
        """A communication thread may hold a buffer a moment longer than its collective lasts."""
        for _ in range(_TRIES):
            self._free_released()
            if not self._unfreed:
                return
            time.sleep(_PAUSE_S)

    def check_written(self) -> None:
        """Raise if a parameter was written while it was gathered: the shards know nothing of it.

        Raises:
            ReleasedParameterError: naming the parameter.
        """
        written, self._written = self._written, []
        if written:
            raise ReleasedParameterError(
                f"{self.describe(written[0])} was changed in place while it was gathered, and the change is lost when "
                "it is released. A forward that writes into its parameters (nn.Embedding(max_norm=), say) needs a plan "
                "that keeps them whole (ZERO_2); between steps, use `with onefold.gathered(model, write=True):`"
            )

    def _release_kept(self) -> None:
        for unit in self.units:
            if unit.is_kept:  # no backward came
                self._release(unit)

    def _release(self, unit: Unit, may_keep: bool = False) -> None:
        self._written += unit.written()
        if may_keep and unit.keep():
            return
        unit.release()
        if not unit.try_free():
            self._unfreed.append(unit)
