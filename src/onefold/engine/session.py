"""Owns what belongs to one sharded model: its plan, runtime, reducer and loss scale, found again from model or
parameter."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onefold.comm.comm import Comm
from onefold.comm.control import Control
from onefold.engine.loss_scale import Scaler
from onefold.engine.reducer import Reducer
from onefold.engine.runtime import Runtime
from onefold.errors import OnefoldError, OptimizerError
from onefold.memory.pinned import Room
from onefold.memory.streams import Lanes
from onefold.plan.precision import Precision
from onefold.plan.table import Plan, Tier
from onefold.tiers.tier import Storehouse

_ATTRIBUTE = "_onefold_session"


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Session:
    """One sharded model. It answers for released parameters (released.Owner)."""

    plan: Plan
    precision: Precision
    device: torch.device
    lanes: Lanes
    comm: Comm
    houses: Mapping[Tier, Storehouse]
    """Where state rests, by tier."""
    cores: Sequence[int]
    """Where updates on the host run."""
    num_threads: int
    """With so many threads."""
    control: Control
    runtime: Runtime
    reducer: Reducer
    scaler: Scaler
    fingerprint: str
    """Plan, shard and geometry in one word: equal where rank-local state can be exchanged."""
    readers: list[Callable[[], None]] = field(default_factory=list)
    """Waits for those who read state beside the loop (a save under way), or refusals to change it."""
    saves: list[Callable[[], None]] = field(default_factory=list)
    """Waits for the saves under way."""
    exchanged: list[object] = field(default_factory=list)
    """Averages that are in the place of the weights now."""
    optimizer: Callable[[], Any] = lambda: None
    """The optimizer made last for this model; None before there is one, and once it is gone."""
    room: Room | None = None
    """Host memory for what a save copies, kept for the next one."""

    def describe(self, param: nn.Parameter) -> str:
        return self.runtime.describe(param)

    def touch(self, params: Sequence[nn.Parameter], func: Callable[..., Any]) -> None:
        self.runtime.touch(params, func)

    def is_whole(self, param: nn.Parameter) -> bool:
        return self.runtime.is_whole(param)

    def come_to_rest(self, what: str) -> None:
        """Settle the model, so that shards and exact weights are those after the latest step.

        Raises:
            OnefoldError: inside `gathered`, where weights may be written that are not kept yet; `what` needs it.
            OptimizerError: see `take_written`.
        """
        self.runtime.settle()
        if any(unit.pins for unit in self.runtime.units):
            raise OnefoldError(
                f"{what} inside `with onefold.gathered(...)`: leave it first, so that its writes are kept"
            )
        self.catch_up()
        self.reducer.finish()

    def catch_up(self) -> None:
        """Let exact weights, wherever they rest, be those after the latest step, and what was written since.

        Raises:
            OptimizerError: see `take_written`.
        """
        self.runtime.finish_updates()
        self.take_written()
        self.runtime.catch_up()

    def take_written(self) -> None:
        """Let state that rests away from whole parameters have what was written into them since. Updates under way are
        finished before.

        Raises:
            OptimizerError: an update of what was written is under way, and would be lost; or averages are in the place
                of the weights.
        """
        whole = [flat for unit in self.runtime.units for flat in unit.flats if flat.is_open]
        pairs = [(flat, flat.written_since()) for flat in whole]
        flats, flags = [flat for flat, flag in pairs if flag is not None], [f for _, f in pairs if f is not None]
        for flat, is_written in zip(flats, torch.stack(flags).tolist() if flags else (), strict=True):
            if is_written and flat.late is not None:
                raise OptimizerError(
                    f"parameters of {flat.names[0]!r}'s unit were written while their delayed update was under way; "
                    "write inside `with onefold.gathered(model, write=True):`, which waits for it"
                )
            if is_written:
                self.finish_readers()  # no other rank sees what changes here
                flat.take_written()

    def wait_for_saves(self) -> None:
        """Come back when no save is under way.

        Raises:
            CheckpointError: one failed, and nobody heard of it yet.
        """
        _wait_for(self.saves)

    def wait_for_readers(self) -> None:
        """Come back when weights, exact weights and optimizer state may be changed; every rank calls it.

        Raises:
            OptimizerError: averages are in the place of the weights.
        """
        self.finish_readers()
        self.comm.before_change()

    def finish_readers(self) -> None:
        """Come back when nobody on this rank reads state beside the loop: for what other ranks never see.

        Raises:
            OptimizerError: averages are in the place of the weights.
        """
        _wait_for(self.readers)

    def attach(self, model: nn.Module) -> None:
        """Make the session findable from the model and from each of its parameters."""
        object.__setattr__(model, _ATTRIBUTE, self)
        for unit in self.runtime.units:
            unit.adopt(self)


def _wait_for(waits: list[Callable[[], None]]) -> None:
    """Call them, the latest first. One that raises is called again the next time: it may have been interrupted."""
    while waits:
        waits[-1]()
        waits.pop()


def owner_session(param: nn.Parameter) -> Session | None:
    """The session of a parameter of a sharded model; None of others."""
    found = getattr(param, "_onefold_owner", lambda: None)()
    return found if isinstance(found, Session) else None


def is_sharded(model: nn.Module) -> bool:
    """Whether `onefold.shard` already took this model, or a part of it."""
    owners = [getattr(param, "_onefold_owner", None) for param in model.parameters()]
    return any(_ATTRIBUTE in vars(module) for module in model.modules()) or any(
        owner is not None and isinstance(owner(), Session | None) for owner in owners
    )


def session_of(
    target: "nn.Module | nn.Parameter | Iterable[nn.Parameter]", what: str, kind: type[OnefoldError] = OnefoldError
) -> Session:
    """The session of a sharded model, of a part of one, or of its parameters.

    Raises:
        OnefoldError: of `kind`: it was not sharded; `what` says what needs it.
    """
    if isinstance(target, nn.Module):
        found = vars(target).get(_ATTRIBUTE)
        candidates: Iterable[nn.Parameter] = target.parameters()
    else:
        found = None
        candidates = [target] if isinstance(target, nn.Parameter) else target
    for param in candidates if found is None else ():
        found = getattr(param, "_onefold_owner", lambda: None)()
        break
    if not isinstance(found, Session):
        raise kind(f"{what} needs a model that onefold.shard returned; call model = onefold.shard(model, plan) first")
    return found


def session_met(model: nn.Module, what: str) -> Session:
    """The session of a sharded model, where every rank has come to `what`, which all do at the same time. Ranks that
    do not (a save on rank 0 alone) would take messages of another length for theirs, and end without a word of why.

    Raises:
        OnefoldError: the model is not sharded.
        OrderMismatchError: on every rank, if they came to different things; says to which.
    """
    session = session_of(model, what)
    session.runtime.settle()
    session.reducer.finish()
    session.control.meet(what)
    return session
