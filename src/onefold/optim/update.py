"""Owns the update of one flat buffer: which runs of it a rule works on, with whose hyper-parameters and which step.

Neighbouring parameters of one group at the same step form one run, so a rule sees few long tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, dtype

from onefold.engine.flat import Flat, Trained
from onefold.engine.grad_states import GradStates
from onefold.errors import OptimizerError
from onefold.memory.buffer import exact_dtype
from onefold.optim.elementwise import TorchRule
from onefold.optim.kernels.host import Run, Step, Updater
from onefold.optim.rules import Rule, check_state
from onefold.plan.layout import Piece
from onefold.plan.table import Tier

Group = Mapping[str, Any]
Key = tuple[int, int]
"""Unit index, and position among its trained flat buffers."""


class FlatUpdate(Protocol):
    """Updates one flat buffer."""

    flat: Flat
    unit_index: int
    tier: Tier
    """Where it runs."""

    def prepare(self, active: set[tuple[int, int, int]], factors: Sequence[float]) -> Callable[[], None] | None:
        """What updates the parameters in `active`, with everything it depends on as it is now; None: there is nothing
        to do. Gradients are first multiplied by `factors`, one after another."""
        ...

    def squares(self, is_exact: bool = False) -> Tensor:
        """The sum of the squares of the gradients of the parameters updated here, over this rank's range (0-dim);
        `is_exact`: summed in fp64 throughout."""
        ...

    def drop_gradients(self) -> None:
        """Forget the gradients of the parameters updated here."""
        ...

    @property
    def state_itemsize(self) -> int:
        """Bytes of state an element, master weights not counted."""
        ...

    def held(self) -> list[Tensor]:
        """State tensors and master weights of this rank."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def expect(self, rule: str, saved: Mapping[int, Mapping[str, dtype]]) -> None:
        """Say whether state can be taken over: the name of the rule it is of, names and dtypes of its tensors by slot.

        Raises:
            OptimizerError: this rule keeps other state.
        """
        ...

    def make_room(self, saved: Mapping[int, Mapping[str, dtype]]) -> None:
        """Have just the state that was told to `expect`, with whatever values."""
        ...

    def parts(self) -> "Iterator[StatePart]":
        """The element-wise state that rests here."""
        ...

    def scalars(self) -> dict[int, dict[str, Any]]:
        """What else is kept of each parameter, by slot: the same for all its elements."""
        ...

    def take_scalars(self, scalars: Mapping[int, Mapping[str, Any]]) -> None:
        """Take back what `scalars` returned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """Some elements of one state tensor: those from element `first` of the flattened parameter on."""

    slot: int
    name: str
    first: int
    tensor: Tensor  # [elements]


_Slice = tuple[slice, dict[str, Any], Group]


@dataclass(frozen=True, slots=True)
class _Run:
    start: int
    stop: int
    group: Group
    step: int


Work = TypeVar("Work")


class _Update(Generic[Work]):
    """What both kinds share: loading exact weights and gradients, and storing the weights again."""

    def __init__(self, states: GradStates, key: Key, groups: Sequence[Group | None]) -> None:
        trained = states.flat.trained
        if trained is None:
            raise ValueError(f"{states.flat.names} are frozen")
        self.flat = states.flat
        self._trained: Trained = trained
        self._states_of = states
        self._mine = {slot for slot, group in enumerate(groups) if group is not None}
        self.unit_index = key[0]
        self.tier = trained.rest.tier
        self._key = key
        self._groups = groups
        self._dtype = exact_dtype(states.flat.weight.dtype)
        self._pieces = states.flat.pieces

    def prepare(self, active: set[tuple[int, int, int]], factors: Sequence[float]) -> Callable[[], None] | None:
        slots = {slot for slot, group in enumerate(self._groups) if group is not None and (*self._key, slot) in active}
        if not slots or self._trained.gradients.reduced is None:
            return None
        work = self._plan(slots)
        reduced, ticket = self._trained.gradients.updated_at(self._trained.rest)

        def update() -> None:
            ticket.wait_on_host()
            self.flat.arrival.wait_on_host()
            self._apply(work, reduced, factors)

        return update

    def _plan(self, slots: set[int]) -> list[Work]:
        """What to do to these slots, with all that may change before it is done."""
        raise NotImplementedError

    def _apply(self, work: list[Work], reduced: Tensor, factors: Sequence[float]) -> None:
        master = self._trained.master.load()
        grad = reduced.to(self._dtype, copy=True)
        for factor in factors:
            grad.mul_(factor)
        self._update(master, grad, work)
        self._trained.master.store(master)

    def squares(self, is_exact: bool = False) -> Tensor:
        return self._trained.gradients.squares_of(self._mine, is_exact)

    def drop_gradients(self) -> None:
        self._states_of.drop(self._mine)

    def _update(self, master: Tensor, grad: Tensor, work: list[Work]) -> None:
        raise NotImplementedError

    def _group(self, slot: int) -> Group:
        group = self._groups[slot]
        if group is None:
            raise KeyError(slot)
        return group

    def _held_twin(self) -> list[Tensor]:
        return [self._trained.weight] if self.flat.has_twin else []

    def _held_master(self) -> list[Tensor]:
        return list(self._trained.master.held())

    def _load_master(self, saved: Sequence[Tensor]) -> None:
        for mine, theirs in zip(self._held_master(), saved, strict=True):
            mine.copy_(theirs)


class RuleUpdate(_Update[_Run]):
    """Runs one of Onefold's rules over long runs, with flat state."""

    def __init__(self, rule: Rule, states: GradStates, key: Key, groups: Sequence[Group | None]) -> None:
        super().__init__(states, key, groups)
        self._rule = rule
        self._steps = [0] * len(groups)
        self._state: dict[str, Tensor] = {}
        for group in groups:  # also of parameters that other ranks hold: every rank keeps the same bytes
            for name in rule.state_names(group) if group is not None else ():
                if name not in self._state:
                    self._state[name] = self._trained.rest.allocate(self._trained.numel, self._dtype)
        for piece in self._pieces:
            part, group = slice(piece.start, piece.stop), groups[piece.slot]
            for name in rule.state_names(group) if group is not None else ():
                rule.init_state(name, self._state[name][part], self._group(piece.slot))

    @property
    def state_itemsize(self) -> int:
        return sum(tensor.element_size() for tensor in self._state.values())

    def held(self) -> list[Tensor]:
        return [*self._held_twin(), *self._held_master(), *self._state.values()]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self._steps), "state": dict(self._state), "master": self._held_master()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state["state"]) != set(self._state):
            raise _other_state(self.flat.names[0], self._rule.name, set(self._state), state["state"])
        self._steps = list(state["steps"])
        for name, tensor in self._state.items():
            tensor.copy_(state["state"][name])
        self._load_master(state["master"])

    def expect(self, rule: str, saved: Mapping[int, Mapping[str, dtype]]) -> None:
        for slot, group in enumerate(self._groups):
            is_kept = group is not None and 0 not in self.flat.layout.slots[slot].shape  # none is kept of no elements
            wanted = set(self._rule.state_names(group)) if group is not None else set()
            if is_kept and wanted != set(saved.get(slot, ())):
                raise _other_state(self.flat.names[slot], self._rule.name, wanted, saved.get(slot, ()))

    def make_room(self, saved: Mapping[int, Mapping[str, dtype]]) -> None:
        """It is there from the start."""

    def parts(self) -> Iterator[StatePart]:
        for piece in self._pieces:
            group = self._groups[piece.slot]
            for name in self._rule.state_names(group) if group is not None else ():
                tensor = self._state[name][piece.start : piece.stop]
                yield StatePart(slot=piece.slot, name=name, first=piece.slot_start, tensor=tensor)

    def scalars(self) -> dict[int, dict[str, Any]]:
        return {slot: {"step": self._steps[slot]} for slot, group in enumerate(self._groups) if group is not None}

    def take_scalars(self, scalars: Mapping[int, Mapping[str, Any]]) -> None:
        for slot, values in scalars.items():
            self._steps[slot] = int(values["step"])

    def _update(self, master: Tensor, grad: Tensor, work: list[_Run]) -> None:
        for run in work:
            part = slice(run.start, run.stop)
            self._rule.update(master[part], grad[part], self._state_of(run), run.group, run.step)

    def _state_of(self, run: _Run) -> dict[str, Tensor]:
        return {name: self._state[name][run.start : run.stop] for name in self._rule.state_names(run.group)}

    def _plan(self, slots: set[int]) -> list[_Run]:
        for slot in slots:
            self._steps[slot] += 1
        runs = [replace(run, group=_settled(run.group)) for run in self._runs(slots)]
        for run in runs:
            check_state(self._rule, self._state, self._rule.state_names(run.group))
        return runs

    def _runs(self, slots: set[int]) -> Iterator[_Run]:
        run: _Run | None = None
        previous: Piece | None = None
        for piece in self._pieces:
            if piece.slot not in slots:
                previous = None
                continue
            group, step = self._group(piece.slot), self._steps[piece.slot]
            if run is not None and previous is not None and run.group is group and run.step == step:
                run = _Run(run.start, piece.stop, group, step)
            else:
                if run is not None:
                    yield run
                run = _Run(piece.start, piece.stop, group, step)
            previous = piece
        if run is not None:
            yield run


class KernelUpdate(RuleUpdate):
    """Runs one of Onefold's rules where a kernel knows it: one pass, from gradients as they came to compute weights as
    they go."""

    def __init__(
        self, kernel: Updater, rule: Rule, states: GradStates, key: Key, groups: Sequence[Group | None]
    ) -> None:
        super().__init__(rule, states, key, groups)
        self._kernel = kernel

    def _apply(self, work: list[_Run], reduced: Tensor, factors: Sequence[float]) -> None:
        weight, held = self._trained.weight, self._trained.master.held()
        for run in work:
            part = slice(run.start, run.stop)
            self._kernel.update(
                Run(
                    weight=weight[part],
                    exact=held[0][part] if held else None,
                    grad=reduced[part],
                    state=self._state_of(run),
                ),
                Step(rule=self._rule, hyper=run.group, number=run.step, factors=factors),
            )


class SliceUpdate(_Update[_Slice]):
    """Runs a torch.optim class over each parameter's slice, with the class's own state."""

    def __init__(self, rule: TorchRule, states: GradStates, key: Key, groups: Sequence[Group | None]) -> None:
        super().__init__(states, key, groups)
        self._rule = rule
        self._states = [rule.new_state() for _ in self._pieces]

    @property
    def state_itemsize(self) -> int:
        return self._rule.state_itemsize(self._dtype)

    def held(self) -> list[Tensor]:
        return [*self._held_twin(), *self._held_master()] + [
            value for state in self._states for value in state.values() if isinstance(value, Tensor) and value.dim()
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"states": [dict(state) for state in self._states], "master": self._held_master()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self._trained.weight.device
        self._states = [
            {name: value.to(device) if _is_element_wise(value, piece) else value for name, value in each.items()}
            for piece, each in zip(self._pieces, deepcopy(list(state["states"])), strict=True)
        ]
        self._load_master(state["master"])

    def expect(self, rule: str, saved: Mapping[int, Mapping[str, dtype]]) -> None:
        # State is opaque here: what one class left, even under the same names, is nothing that another can go on from.
        if rule != self._rule.name:
            raise OptimizerError(f"its optimizer state was saved with {rule}, and this optimizer is {self._rule.name}")

    def make_room(self, saved: Mapping[int, Mapping[str, dtype]]) -> None:
        for piece, state in zip(self._pieces, self._states, strict=True):
            if self._groups[piece.slot] is not None:
                state.clear()
                for name, kind in saved.get(piece.slot, {}).items():
                    state[name] = torch.zeros(piece.numel, dtype=kind, device=self._trained.weight.device)

    def parts(self) -> Iterator[StatePart]:
        for piece, state in zip(self._pieces, self._states, strict=True):
            for name, value in state.items():
                if _is_element_wise(value, piece):
                    yield StatePart(slot=piece.slot, name=name, first=piece.slot_start, tensor=value)

    def scalars(self) -> dict[int, dict[str, Any]]:
        return {
            piece.slot: {name: value for name, value in state.items() if not _is_element_wise(value, piece)}
            for piece, state in zip(self._pieces, self._states, strict=True)
            if self._groups[piece.slot] is not None
        }

    def take_scalars(self, scalars: Mapping[int, Mapping[str, Any]]) -> None:
        for piece, state in zip(self._pieces, self._states, strict=True):
            state.update(_settled(scalars.get(piece.slot, {})))

    def _plan(self, slots: set[int]) -> list[_Slice]:
        return [
            (slice(piece.start, piece.stop), state, _settled(self._group(piece.slot)))
            for piece, state in zip(self._pieces, self._states, strict=True)
            if piece.slot in slots
        ]

    def _update(self, master: Tensor, grad: Tensor, work: list[_Slice]) -> None:
        for part, state, group in work:
            self._rule.update_slice(master[part], grad[part], state, group)


def _is_element_wise(value: Any, piece: Piece) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == piece.numel


def _other_state(name: str, rule: str, wanted: Iterable[str], saved: Iterable[str]) -> OptimizerError:
    return OptimizerError(
        f"{rule} keeps {', '.join(sorted(wanted)) or 'no state'} for {name!r}, and what is loaded has "
        f"{', '.join(sorted(saved)) or 'none'}: it is of another optimizer, or the parameter was not trained then"
    )


def _settled(group: Group) -> Group:
    """The hyper-parameters as they are now: a schedule may change them before the update is made."""
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
