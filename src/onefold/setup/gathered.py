"""Owns what users do with a sharded model between steps: read it whole, write it, accumulate, count its bytes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onefold.engine.flat import Flat
from onefold.engine.grad_states import GradStates
from onefold.engine.hooks import register_state_dict_hooks
from onefold.engine.session import Session, session_of
from onefold.engine.sharded_unit import KeptUnit
from onefold.engine.unit import Unit
from onefold.errors import ReleasedParameterError
from onefold.optim.optimizer import Optimizer
from onefold.plan.accounting import FlatSpec
from onefold.plan.budget import Budget
from onefold.plan.table import Tier

Target = nn.Module | nn.Parameter | Iterable[nn.Parameter]


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Inside, backward passes only add up gradients on this rank; the first one after it reduces the sum.

    Gradients are kept whole on every rank meanwhile. (Without it, every backward reduces and adds to the shards: more
    traffic, less memory, the same mean.) The caller divides its loss by the number of micro-batches.
    """
    reducer = session_of(model, "accumulate").reducer
    reducer.accumulating += 1
    try:
        yield
    finally:
        reducer.accumulating -= 1


@contextmanager
def gathered(target: Target, write: bool = False) -> Iterator[None]:
    """Inside, parameters are whole and readable on every rank, and so are their gradients.

    `.grad` is the whole gradient, averaged and unscaled, where one is pending between backward and `zero_grad`; else
    None. Changed in place, the same on every rank, it is what the next step uses. Every rank must enter and leave.

    Args:
        target: a sharded model, a module of it, a parameter, or parameters. Units are gathered as a whole.
        write: keep changes: what rank 0 wrote is what every rank's shard and master weights hold afterwards.
    """
    if isinstance(target, nn.Module):
        session, params = session_of(target, "gathered"), list(target.parameters())
    else:
        params = [target] if isinstance(target, nn.Parameter) else list(target)
        session = session_of(params, "gathered")
    view = _Gathered(session, params, write)
    view.enter()
    try:
        yield
    finally:
        view.leave()


class _Gathered:
    def __init__(self, session: Session, params: list[nn.Parameter], write: bool) -> None:
        wanted = {id(param) for param in params}
        self._session = session
        self._write = write
        self._units = [
            unit
            for unit in session.runtime.units
            if any(id(param) in wanted for flat in unit.flats for param in flat.params)
        ]
        self._before: dict[int, Tensor] = {}
        self._shown: list[tuple[GradStates, int, int]] = []
        """Whose gradient is shown, its slot, and its version then."""

    def enter(self) -> None:
        runtime = self._session.runtime
        runtime.settle()
        runtime.catch_up()
        if self._write:
            self._session.finish_readers()
        active, _, _ = runtime.agree("start of gathered")
        for unit in self._units:
            if not unit.is_gathered:
                unit.gather()
            unit.show()
            unit.pins += 1
            if self._write:
                self._before.update({id(flat): _resting(flat).clone() for flat in unit.flats})
        with torch.inference_mode(False):  # they are seen outside of it, too
            self._show_gradients(active)
        runtime.push_saving()

    def leave(self) -> None:
        runtime = self._session.runtime
        runtime.pop_saving()
        for states, slot, version in self._shown:
            shown = states.hide(slot)
            if shown is not None and shown._version != version:  # changed in place, to be stepped with
                states.gradients.assign(slot, states.scaled(shown))
        if self._write:
            self._session.wait_for_readers()  # other ranks may still gather from what is written now
        for unit in self._units:
            if self._write:
                self._keep(unit)
                unit.keep_written()
            unit.pins -= 1
        runtime.release_unpinned()
        runtime.check_written()

    def _show_gradients(self, active: set[tuple[int, int, int]]) -> None:
        scale = self._session.scaler.scale
        for unit in self._units:
            for position, states in enumerate(self._session.reducer.states.get(unit.index, ())):
                here = [slot for slot in range(len(states.flat.params)) if (unit.index, position, slot) in active]
                whole = states.gradients.whole() if here else []
                for slot in here:
                    averaged = whole[slot].to(states.flat.params[slot].dtype)
                    shown = averaged / scale if scale != 1 else averaged
                    states.show(slot, shown)
                    self._shown.append((states, slot, shown._version))

    def _keep(self, unit: Unit) -> None:
        """Make rank 0's values everyone's; weights that did not change keep their exact master."""
        for flat in unit.flats:
            self._session.comm.broadcast(flat.buffer.whole)
            before = self._before[id(flat)]
            after = flat.buffer.whole[flat.start : flat.start + flat.weight.numel()]
            flat.arrival.wait_on_host()
            if flat.trained is None:
                flat.weight.copy_(after)
                continue
            resting = _resting(flat)
            after = after.to(resting.device, copy=True)
            resting.copy_(before)
            exact = flat.trained.master.load()
            changed = before != after
            exact[changed] = after[changed].to(exact.dtype)
            flat.trained.master.store(exact)
        unit.show_stored(unit.flats)


def _resting(flat: Flat) -> Tensor:
    """The compute weights beside their exact ones."""
    return flat.weight if flat.trained is None else flat.trained.weight


def guard_state_dict(model: nn.Module, session: Session) -> None:
    """Let `load_state_dict` write through to shards and master weights, and `state_dict` say where it can be called."""
    open_views: list[_Gathered] = []

    def before_load(*_: Any) -> None:
        view = _Gathered(session, list(model.parameters()), write=True)
        view.enter()
        open_views.append(view)

    def after_load(*_: Any) -> None:
        open_views.pop().leave()

    def before_save(*_: Any) -> None:
        if any(unit.is_late_elsewhere for unit in session.runtime.units):
            raise ReleasedParameterError(
                "model.state_dict() while delayed updates are under way, whose results come from all ranks: call it "
                "inside `with onefold.gathered(model):` on every rank (and clone what should outlive the block)"
            )
        session.runtime.catch_up()
        if any(not unit.is_gathered for unit in session.runtime.units):
            raise ReleasedParameterError(
                "model.state_dict() needs whole parameters, but they rest in shards: call it inside "
                "`with onefold.gathered(model):` on every rank (and clone what should outlive the block)"
            )

    register_state_dict_hooks(model, before_load, after_load, before_save)


def predicted(model: nn.Module, optimizer: Optimizer) -> Budget:
    """What one rank should hold and send, by the plan and the geometry alone."""
    session = session_of(model, "predicted")
    specs = [[_spec(flat, optimizer) for flat in unit.flats] for unit in session.runtime.units]
    kept = [unit.index for unit in session.runtime.units if isinstance(unit, KeptUnit)]
    return Budget.of(session.plan, specs, kept=kept, num_replicas=session.comm.num_replicas)


def measured(model: nn.Module, optimizer: Optimizer) -> Budget:
    """What this rank really holds now: bytes of parameters, gradients and optimizer state, summed over its tensors.

    Gradients count from backward until `zero_grad`. Every rank must call it: it waits for reductions under way.
    """
    session = session_of(model, "measured")
    session.reducer.finish()
    session.runtime.finish_updates()
    params, grads, optim = ({tier: 0 for tier in Tier} for _ in range(3))
    for flat in (flat for unit in session.runtime.units for flat in unit.flats):
        params[flat.rest.tier] += flat.resting_bytes
        if flat.trained is not None:
            for tier, nbytes in flat.trained.gradients.held_bytes().items():
                grads[tier] += nbytes
            optim[flat.trained.rest.tier] += sum(tensor.nbytes for tensor in optimizer.held(flat))
    return Budget(params_bytes=params, grads_bytes=grads, optim_bytes=optim)


def _spec(flat: Flat, optimizer: Optimizer) -> FlatSpec:
    param_itemsize, trained = flat.weight.element_size(), flat.trained
    if trained is None:
        return FlatSpec(layout=flat.layout, param_itemsize=param_itemsize, grad_itemsize=0, optim_itemsize=0)
    return FlatSpec(
        layout=flat.layout,
        param_itemsize=param_itemsize,
        grad_itemsize=trained.gradients.dtype.itemsize,
        num_grad_buffers=max(1, len(trained.gradients.keep.reserved)),
        optim_itemsize=trained.master.itemsize,
        twin_itemsize=param_itemsize,
        state_itemsize=optimizer.state_itemsize(flat),
    )
