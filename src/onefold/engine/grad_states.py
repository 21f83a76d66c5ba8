"""Owns what is known of the gradients of one flat buffer: the state of each, and the steps from one to the next.

[Note: The states of a gradient]
The gradient of a parameter is in one of five states on a rank, whatever the plan. Between them it goes as `_NEXT` says;
what is not there is no step, and raises.

| state   | what lies where                                                        | `.grad`                      |
|---------|------------------------------------------------------------------------|------------------------------|
| NONE    | nothing that this rank knows of                                        | the caller's: None, or a tensor |
| LOCAL   | a sum of this rank's own, in the accumulator                           | the stand-in                 |
| REDUCED | a part of the mean over ranks, in the shard; more of this rank's own, perhaps | the stand-in          |
| FOREIGN | perhaps a part of a mean that other ranks gave                         | the stand-in                 |
| AGREED  | a part of the mean, and every rank has the stand-in                    | the stand-in                 |

Autograd's own tensor is in `.grad` only while autograd accumulates: a hook before puts in what is to be added to, a
hook after takes the sum out and puts the stand-in back. So whatever else is in `.grad` than the stand-in was put there
by the caller, at any time, in or between passes: the gradient that was there before is thrown away then.

[Note: What .grad tells]
The stand-in is the caller's to clear: on every rank alike, since it stands for a mean over all. A rank that gives no
gradient of its own has the stand-in all the same until ranks tell each other (FOREIGN): another rank may have given
one, and its caller, too, has to be able to clear the part that lies here. What was thrown away although a mean lay here
is told to the other ranks with the next step (`GradientReport.cleared`): if some ranks keep what others threw away, all
raise.
"""

from collections.abc import Callable, Iterable
from enum import Enum, auto

import torch
from torch import Tensor

from onefold.engine.flat import Flat, Trained
from onefold.engine.released import ReducedGradient, metadata_only
from onefold.memory.streams import Lanes, Ticket


class GradState(Enum):
    """What a rank knows of a parameter's gradient. See [Note: The states of a gradient]."""

    NONE = auto()
    LOCAL = auto()
    REDUCED = auto()
    FOREIGN = auto()
    AGREED = auto()


class Event(Enum):
    """What happens to a gradient."""

    ARRIVES = auto()
    """This rank's backward gave some, or the caller assigned a tensor."""
    IS_REDUCED = auto()
    """The mean over ranks was started; this rank gave to it."""
    IS_REDUCED_ELSEWHERE = auto()
    """The mean was started; this rank gave nothing to it, and another may have."""
    IS_AGREED = auto()
    """All ranks learned that one of them has a gradient."""
    IS_NOWHERE = auto()
    """All ranks learned that none of them has one."""
    IS_DROPPED = auto()
    """The caller threw it away."""


_NONE, _LOCAL, _REDUCED, _FOREIGN, _AGREED = GradState
_NEXT: dict[Event, dict[GradState, GradState]] = {
    Event.ARRIVES: {_NONE: _LOCAL, _LOCAL: _LOCAL, _REDUCED: _REDUCED, _FOREIGN: _REDUCED, _AGREED: _AGREED},
    Event.IS_REDUCED: {_LOCAL: _REDUCED, _REDUCED: _REDUCED, _AGREED: _AGREED},
    Event.IS_REDUCED_ELSEWHERE: {_NONE: _FOREIGN, _FOREIGN: _FOREIGN},
    Event.IS_AGREED: {state: _AGREED for state in GradState},
    Event.IS_NOWHERE: {_NONE: _NONE, _FOREIGN: _NONE},
    Event.IS_DROPPED: {state: _NONE for state in GradState},
}
_HAS_MEAN = frozenset({_REDUCED, _FOREIGN, _AGREED})
_HAS_OWN = frozenset({_LOCAL, _REDUCED, _AGREED})


class GradStates:
    """The gradients of one trained flat buffer, by slot.

    Args:
        scale: the loss scale that gradients carry.
    """

    def __init__(self, flat: Flat, trained: Trained, scale: Callable[[], float], rank: int) -> None:
        self.flat = flat
        self.gradients = trained.gradients
        self._scale = scale
        self._rank = rank
        self._params = flat.params
        self._states = [GradState.NONE] * len(flat.params)
        self._stand_ins: list[Tensor] = [self._stand_in(slot) for slot in range(len(flat.params))]
        """What `.grad` is in every state but NONE: of one element, or, inside `gathered`, the whole gradient."""
        self._arrived: dict[int, Tensor] = {}
        """What autograd gave in this pass, and is not in the accumulator yet."""
        self._entered: set[int] = set()
        """Slots whose `.grad` is autograd's at the moment."""
        self._cleared: set[int] = set()
        """Slots whose mean was thrown away here since ranks told each other last."""

    def _stand_in(self, slot: int) -> Tensor:
        return ReducedGradient.of(self._params[slot], f"{self.flat.names[slot]} (rank {self._rank})")

    def _go(self, slot: int, event: Event) -> None:
        state = self._states[slot]
        if state not in _NEXT[event]:
            raise RuntimeError(f"the gradient of {self.flat.names[slot]!r} is {state.name}: {event.name} cannot be")
        self._states[slot] = _NEXT[event][state]

    # --- a backward pass

    def num_expected(self) -> int:
        """Gradients that a backward pass over everything gives."""
        with metadata_only():
            return sum(param.requires_grad for param in self._params)

    @property
    def num_arrived(self) -> int:
        return len(self._arrived)

    def is_none(self, slot: int) -> bool:
        """Whether nothing is known of it."""
        return self._states[slot] is GradState.NONE

    def enter(self, slot: int) -> None:
        """Autograd is about to accumulate into `.grad`: let it add to what came in this pass, or to a tensor of the
        caller's."""
        param = self._params[slot]
        with metadata_only():
            if self._states[slot] is not GradState.NONE and self._is_changed(slot):
                self._throw_away(slot)
            if self._states[slot] is not GradState.NONE:
                param.grad = self._arrived.get(slot)
            elif param.grad is not None:
                param.grad = self.scaled(param.grad)
        self._entered.add(slot)

    def take(self, slot: int) -> bool:
        """Autograd accumulated: take the sum out of `.grad`. Whether it is the first of this slot since the accumulator
        took the ones before."""
        param = self._params[slot]
        is_first = slot not in self._arrived
        with metadata_only():
            if param.grad is not None:
                self._arrived[slot] = param.grad
                param.grad = self._stand_ins[slot]
        self._entered.discard(slot)
        self._go(slot, Event.ARRIVES)
        return is_first

    def collect(self) -> None:
        """Add what arrived to the accumulator."""
        if self._arrived:
            grads = [self._arrived.get(slot) for slot in range(len(self._params))]
            self._arrived = {}
            with torch.no_grad():
                self.gradients.local.add(grads)

    def reduce(self, lanes: Lanes) -> Ticket:
        """Start turning the accumulated sum into the mean over ranks."""
        for slot, state in enumerate(self._states):
            if state in _HAS_OWN:
                self._go(slot, Event.IS_REDUCED)
            elif self.gradients.others and self._may_stand(slot):
                self._go(slot, Event.IS_REDUCED_ELSEWHERE)
                self._show_stand_in(slot)
        return self.gradients.reduce(lanes)

    def abandon(self) -> None:
        """A pass failed: what autograd had is not lost, as in torch."""
        for slot in self._entered:
            with metadata_only():
                if self._states[slot] is not GradState.NONE:
                    self._params[slot].grad = self._stand_ins[slot]
        self._entered = set()
        self.collect()

    # --- what the caller does to `.grad`

    def _is_changed(self, slot: int) -> bool:
        return slot not in self._entered and self._params[slot].grad is not self._stand_ins[slot]

    def look(self) -> None:
        """Throw away what the caller cleared or replaced."""
        with metadata_only():
            for slot, state in enumerate(self._states):
                if state is not GradState.NONE and self._is_changed(slot):
                    self._throw_away(slot)

    def _throw_away(self, slot: int) -> None:
        if self._states[slot] in _HAS_MEAN:
            self._cleared.add(slot)
        self._arrived.pop(slot, None)
        self.gradients.clear(slot)
        self._go(slot, Event.IS_DROPPED)

    def take_assigned(self) -> None:
        """Take gradients that the caller assigned as this rank's own."""
        self.look()
        with metadata_only():
            for slot, param in enumerate(self._params):
                if self._states[slot] is GradState.NONE and param.grad is not None:
                    self._arrived[slot] = self.scaled(param.grad)
                    param.grad = self._stand_ins[slot]
                    self._go(slot, Event.ARRIVES)
        self.collect()

    def scaled(self, grad: Tensor) -> Tensor:
        """A gradient that did not come out of a backward pass, as one that did: times the loss scale."""
        return grad if self._scale() == 1 else grad * self._scale()

    def drop(self, slots: set[int]) -> None:
        """Throw away the gradients of some parameters, on every rank; memory is freed when they are all."""
        if self.gradients.reduced is not None:
            self._cleared |= slots
        if len(slots) == len(self._params):
            self.gradients.drop()
        with metadata_only():
            for slot in slots:
                self._arrived.pop(slot, None)
                self.gradients.clear(slot)  # though this rank gave none: others may have
                self._params[slot].grad = None
                self._go(slot, Event.IS_DROPPED)

    # --- between ranks

    def given(self) -> Iterable[bool]:
        """Of each slot: whether this rank has given to its gradient."""
        return (state in _HAS_OWN for state in self._states)

    def kept(self) -> Iterable[bool]:
        """Of each slot: whether a mean lies here that the caller could have thrown away."""
        return (state in _HAS_MEAN for state in self._states)

    def cleared(self) -> Iterable[bool]:
        """Of each slot: whether a mean was thrown away here."""
        return (slot in self._cleared for slot in range(len(self._params)))

    def clear(self, slot: int) -> None:
        """Ranks told each other that the mean was thrown away where the caller could see it."""
        if slot not in self._cleared:
            self.gradients.clear_kept(slot)
        self._cleared.discard(slot)

    def agree(self, slot: int, is_somewhere: bool) -> None:
        """Ranks told each other whether one of them has a gradient, and every part of it was reduced."""
        if is_somewhere:
            self._go(slot, Event.IS_AGREED)
            self._show_stand_in(slot)
            return
        if self._states[slot] is GradState.FOREIGN:
            with metadata_only():
                self._params[slot].grad = None
        self._go(slot, Event.IS_NOWHERE)

    def _may_stand(self, slot: int) -> bool:
        with metadata_only():
            return self._states[slot] is not GradState.NONE or self._params[slot].grad is None

    def _show_stand_in(self, slot: int) -> None:
        with metadata_only():
            self._params[slot].grad = self._stand_ins[slot]

    # --- inside `gathered`

    def show(self, slot: int, whole: Tensor) -> None:
        """Let the whole gradient stand in `.grad`."""
        self._stand_ins[slot] = whole
        self._show_stand_in(slot)

    def hide(self, slot: int) -> Tensor | None:
        """Let the stand-in of one element stand again. What stood there, if it still does."""
        with metadata_only():
            shown, self._stand_ins[slot] = self._stand_ins[slot], self._stand_in(slot)
            if self._states[slot] is GradState.NONE or self._params[slot].grad is not shown:
                return None
            self._params[slot].grad = self._stand_ins[slot]
            return shown
