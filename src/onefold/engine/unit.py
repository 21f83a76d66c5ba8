"""Owns what all units have in common: the parameters of one module that are gathered, reduced and released together,
the state they are in, and the updates that change them.

[Note: The states of a unit]
A unit is in one of five states on a rank. Between them it goes as `_NEXT` says; what is not there is no step, and
raises.

| state    | its parameters                                                                  | can be read |
|----------|---------------------------------------------------------------------------------|-------------|
| ABSENT   | rest in shards                                                                  | no          |
| ARRIVING | are being gathered, ahead of their use or because other ranks need this one's part | no       |
| READABLE | are whole                                                                       | yes         |
| KEPT     | are whole, and stay so from a forward to its backward                           | no          |
| UPDATING | are whole, and newer values may be on their way                                 | no          |

A `ShardedUnit` is never UPDATING, since what is gathered after an update is new; a `ReplicatedUnit` is only READABLE or
UPDATING. What cannot be read is hidden: touching it waits, gathers, or raises (released.py).

[Note: Logical and physical release]
The state is logical: it changes at points of the program that are the same on every rank, and decides whether a use
needs a collective. The storage behind it may outlive a release as long as a view of it is held (buffer.py).

[Note: Version counters]
Parameters are bound by `param.data = view`, so each keeps a version counter of its own: refilling the flat buffer is
not a modification that autograd could see. What autograd should see - an update between forward and backward - is
counted in `Flat.version` and checked where saved weights are unpacked.
"""

from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from functools import partial
from threading import RLock
from weakref import ref

from torch import nn

from onefold.comm.comm import Comm
from onefold.engine.flat import Flat, Trained
from onefold.engine.released import Owner, ReleasedParameter
from onefold.memory.streams import Lanes, Ticket
from onefold.memory.trace_labels import label


class UnitState(Enum):
    """Where the parameters of a unit are. See [Note: The states of a unit]."""

    ABSENT = auto()
    ARRIVING = auto()
    READABLE = auto()
    KEPT = auto()
    UPDATING = auto()


class UnitEvent(Enum):
    """What happens to a unit."""

    IS_GATHERED = auto()
    """A gather was started."""
    IS_SHOWN = auto()
    """The computation needs it, and waits for what is on its way."""
    IS_KEPT = auto()
    """A forward is over whose backward may follow."""
    IS_RELEASED = auto()
    """Nothing needs it any more."""
    IS_UPDATED = auto()
    """An update was started."""


_ABSENT, _ARRIVING, _READABLE, _KEPT, _UPDATING = UnitState
_NEXT: dict[UnitEvent, dict[UnitState, UnitState]] = {
    UnitEvent.IS_GATHERED: {_ABSENT: _ARRIVING, _READABLE: _ARRIVING},
    UnitEvent.IS_SHOWN: {_ARRIVING: _READABLE, _READABLE: _READABLE, _KEPT: _READABLE, _UPDATING: _READABLE},
    UnitEvent.IS_KEPT: {_ARRIVING: _KEPT, _READABLE: _KEPT, _KEPT: _KEPT},
    UnitEvent.IS_RELEASED: {_ABSENT: _ABSENT, _ARRIVING: _ABSENT, _READABLE: _ABSENT, _KEPT: _ABSENT},
    UnitEvent.IS_UPDATED: {_READABLE: _UPDATING, _UPDATING: _UPDATING},
}


class Use:
    """Counts the saved tensors of one forward pass that still point into a unit."""

    __slots__ = ("views",)

    def __init__(self) -> None:
        self.views: set[ref[object]] = set()
        """Those tensors' addresses, as long as autograd keeps them."""

    @property
    def is_over(self) -> bool:
        """Whether none of them is left."""
        return not self.views


class Unit:
    """What both kinds of unit have; one is born READABLE, with its parameters bound to their buffers.

    Args:
        is_joined: whether it has the parameters of several modules that follow one another.
    """

    def __init__(
        self, name: str, index: int, flats: Sequence[Flat], comm: Comm, lanes: Lanes, *, is_joined: bool = False
    ) -> None:
        self.name = name
        self.index = index
        self.is_joined = is_joined
        self.flats = tuple(flats)
        self.state = UnitState.READABLE
        self.depth = 0
        """Forwards of its modules that are running."""
        self.pins = 0
        """`gathered` contexts that hold it."""
        self.use = Use()
        self.open_uses: set[Use] = set()
        self._comm = comm
        self._lanes = lanes
        self._tickets: list[Ticket] = []
        """Of gathers that were started, and not waited for."""
        self._params = [param for flat in self.flats for param in flat.params]
        self._classes = [type(param) for param in self._params]
        self._lock = RLock()
        """Of what waits for values to be there: other threads than the one that trains may read weights, too."""

    def _go(self, event: UnitEvent) -> None:
        if self.state not in _NEXT[event]:
            raise RuntimeError(f"unit {self.name!r} is {self.state.name}: {event.name} cannot be")
        self.state = _NEXT[event][self.state]

    @property
    def is_gathered(self) -> bool:
        """Whether its parameters are whole, or being made so."""
        return self.state is not UnitState.ABSENT

    @property
    def is_ahead(self) -> bool:
        """Whether it was gathered, and no computation of this phase has asked for it."""
        return self.state is UnitState.ARRIVING

    @property
    def is_readable(self) -> bool:
        return self.state is UnitState.READABLE

    @property
    def is_kept(self) -> bool:
        """Whether it stayed gathered after a forward, and its backward has not asked for it yet."""
        return self.state is UnitState.KEPT

    @property
    def trained_flats(self) -> list[tuple[Flat, Trained]]:
        return [(flat, flat.trained) for flat in self.flats if flat.trained is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered unit."""
        return sum(flat.buffer.nbytes for flat in self.flats)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the largest shard of gradients that a reduction gives."""
        shards = [flat.layout.shard_numel * trained.gradients.dtype.itemsize for flat, trained in self.trained_flats]
        return max(shards, default=0)

    def adopt(self, owner: Owner) -> None:
        """Tie every parameter to the runtime that answers for it."""
        for param in self._params:
            param._onefold_owner = ref(owner)  # type: ignore[attr-defined]

    # --- making parameters whole; a kind that rests whole has nothing to do

    def gather(self) -> None:
        """Start making all parameters whole."""

    def gather_on_host(self, is_wanted: bool) -> None:
        """Gather over host memory, apart from all other traffic; for ranks that do not want it only there."""

    def show(self) -> None:
        """Let the current stream read the gathered parameters."""
        raise NotImplementedError

    def keep(self) -> bool:
        """After a forward that a backward may follow: stay gathered until then. Whether it does."""
        return False

    def release(self) -> None:
        """Let go of the whole parameters."""

    def try_free(self) -> bool:
        """Give memory of released parameters back; False if a view of it is still held."""
        return True

    def written(self) -> list[nn.Parameter]:
        """Parameters that were changed in place since they were gathered, and would lose that."""
        return []

    def keep_written(self) -> None:
        """What was changed in place until now has been taken over."""

    def is_done(self) -> bool:
        """Whether nothing that autograd saved, and no running forward, needs the parameters any more."""
        return self.depth == 0 and self.pins == 0 and all(use.is_over for use in self.open_uses)

    # --- updates

    def update(self, flat: Flat, compute: Callable[[], None]) -> None:
        """Start the update of one flat buffer, after which every rank's part comes to wherever it is read."""
        if flat.trained is not None:
            self._note_readers(flat)
            flat.update = flat.trained.rest.run(self._labelled(compute), partial(self._deliver, flat))
            flat.trained.gradients.keep.lend(flat.update.copy())
            self._spread_later(flat)

    def update_late(self, flat: Flat, compute: Callable[[], None]) -> None:
        """Start the update of one flat buffer, whose result is only seen after `finish_late_updates`."""
        if flat.trained is not None:
            flat.late = flat.trained.rest.run(self._labelled(compute), lambda _: None)
            flat.trained.gradients.keep.lend(flat.late.copy())

    def _labelled(self, compute: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with label("update", self.name):
                compute()

        return run

    def _deliver(self, flat: Flat, after: Ticket) -> None:
        """Once `after` is done: bring the updated values of one flat buffer to where this rank's weights are."""
        flat.current = flat.publish(self._lanes, after)
        flat.shown = flat.current.copy()

    def finish_updates(self) -> None:
        """Wait for updates that are under way; their exceptions are raised here."""
        for flat in self.flats:
            flat.finish_update()

    def finish_late_updates(self) -> None:
        """Wait for late updates, and let their results come to wherever they are read."""
        late = [flat for flat in self.flats if flat.late is not None]
        for flat in late:
            _finish_late(flat)
            self._note_readers(flat)
            self._spread_now(flat)
        if late:  # else nothing is gathered again: rank 0 may be here alone, to save what all ranks have gathered
            self.hide_updated(late)

    @property
    def is_late_elsewhere(self) -> bool:
        """Whether finishing late updates takes other ranks, too: they have made parts of what is late."""
        return any(flat.late is not None and flat.weight.numel() < flat.layout.numel for flat in self.flats)

    @property
    def is_updating(self) -> bool:
        """Whether the worker has not finished an update of it."""
        return any(flat.is_updating for flat in self.flats)

    def hide_updated(self, flats: Collection[Flat]) -> None:
        """The values of `flats` are being changed: nothing reads the old ones from now on."""
        raise NotImplementedError

    def show_stored(self, flats: Collection[Flat]) -> None:
        """Bring what was stored into `flats` between steps to wherever it is read; returns when it is there."""
        for flat in flats:
            self._spread_now(flat)
        self.hide_updated(flats)
        self.finish_updates()
        self.wait_gathers()

    def show_updated(self) -> None:
        """Let the current stream read what an update brought, unless that is still to come and hidden until then."""

    def _note_readers(self, flat: Flat) -> None:
        """Before new values come: see what could read them without asking."""

    def _spread_now(self, flat: Flat) -> None:
        """Bring values that are where updates run to all ranks. They call it at the same point."""
        self._deliver(flat, self._lanes.mark())

    def _spread_later(self, flat: Flat) -> None:
        """Bring what an update that was started will give to all ranks, unless they gather it when they need it."""

    def _hide(self) -> None:
        for param in self._params:
            param.__class__ = ReleasedParameter  # type: ignore[assignment]

    def _unhide(self) -> None:
        for param, cls in zip(self._params, self._classes, strict=True):
            param.__class__ = cls

    def wait_gathers(self) -> None:
        """Order the current stream after every gather that was started."""
        with self._lock:
            while self._tickets:
                self._tickets[0].wait()
                self._tickets.pop(0)


def _finish_late(flat: Flat) -> None:
    """Wait for its late update, which stays late if the wait is interrupted."""
    try:
        if flat.late is not None:
            flat.late.wait()
    except Exception:
        flat.late = None
        raise
    flat.late = None
