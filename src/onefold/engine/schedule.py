"""Owns the order in which units are gathered, and the proof that all ranks agree on it. Integers only.

[Note: The recorded order]
A phase is one outermost forward or one backward pass. Every rank issues exactly the same gathers in each phase.
1. *A phase of a new kind is negotiated*: ranks exchange what each needs next. The lowest unit asked for is gathered by
   all of them, until every rank has reached the end of the phase. So a unit used on one rank only is served by the
   others, and one that a rank comes to later is gathered again. What was really gathered becomes the order of that
   kind; or, if every rank used the same units in the same order, that.
2. *A phase of a known kind is replayed*, without a word between ranks: gathers are issued in its order, each before its
   unit is needed (so they can be prefetched). A unit this rank skips is gathered all the same: others need its shard.
   What is needed beside the order is asked for, see [Note: Units out of order].
3. *Ranks compare what they used with the next step*, before anything is updated: those that used the same units in
   different orders all raise. Where a rank asked for units, or has begun to use others than the order holds, all forget
   what they know, and the next phase of each kind is negotiated.
"""

from collections.abc import Callable, Sequence
from struct import Struct
from typing import NoReturn
from zlib import crc32

from onefold.comm.control import Control
from onefold.errors import OrderMismatchError

BACKWARD = "backward pass"
"""The phase of a backward pass that reduces gradients; units come in falling order there."""
ACCUMULATING = "backward pass inside accumulate"
"""The phase of one that only adds them up."""

_END = -1
_WANTS = Struct("<qII")


def _digest(units: Sequence[int], before: int = 0) -> int:
    return crc32(repr(list(units)).encode(), before)


class Schedule:
    """Decides which gathers to issue. `issue(unit)` gathers a unit on this rank; all ranks issue the same sequence."""

    def __init__(self, names: Sequence[str], control: Control, issue: Callable[[int], None]) -> None:
        self._names = names
        self._control = control
        self._issue = issue
        self._orders: dict[str, tuple[int, ...]] = {}
        """What all ranks gather in a phase of each kind."""
        self._expected: dict[str, tuple[int, ...]] = {}
        """What this rank used in the phase that its order was made of."""
        self._latest: dict[str, tuple[int, ...]] = {}
        """What this rank used in the latest phase of each kind."""
        self._unchecked: list[tuple[str, tuple[int, ...]]] = []
        """What this rank used since ranks compared that."""
        self._phase: str | None = None
        self._order: tuple[int, ...] = ()
        self._is_known = False
        self._issued = 0
        self._gathered: list[int] = []
        self._used: list[int] = []
        self.is_stale = False
        """Whether this rank needs units beside the orders that it knows."""

    @property
    def phase(self) -> str | None:
        """The running phase."""
        return self._phase

    def begin(self, phase: str) -> None:
        """Start a phase; `phase` names its kind, such as "forward of model"."""
        self._control.enter(f"start of the {phase}")
        self._phase = phase
        self._is_known = phase in self._orders
        self._order = self._orders.get(phase, ())
        self._issued = 0
        self._gathered, self._used = [], []

    def request(self, unit: int) -> None:
        """Issue gathers until `unit` is among them. Collective, in step with the other ranks.

        Raises:
            OrderMismatchError: ranks use units in different orders.
        """
        self._used.append(unit)
        if self._replay_to(unit):
            return
        if self._is_known:
            self.is_stale = True
            self._control.ask(unit)
            return
        while unit not in self._negotiate(unit):
            pass

    @property
    def upcoming(self) -> int | None:
        """The unit that the order gathers next."""
        return self._order[self._issued] if self._issued < len(self._order) else None

    def issue_next(self) -> int:
        """Issue the gather of `upcoming` ahead of its use."""
        unit = self._order[self._issued]
        self._issued += 1
        self._issue(unit)
        return unit

    def use(self, unit: int) -> None:
        """Note that a prefetched unit was used."""
        self._used.append(unit)

    def end(self) -> None:
        """Finish the phase."""
        if self._phase is None:
            return
        while self._issued < len(self._order):
            self.issue_next()
        phase, used = self._phase, tuple(self._used)
        if not self._is_known:
            while self._negotiate(_END):
                pass
            used = self._expected[phase] = tuple(self._used)
        elif used != self._expected[phase] and used == self._latest.get(phase):
            self.is_stale = True  # it is not for once that other units are used
        self._unchecked.append((phase, used))
        self._latest[phase] = used
        self._phase = None

    def abort(self) -> None:
        """End a phase that an exception cut short: ranks that go on with it are still served what they gather."""
        if self._control.is_apart:
            self._phase = None
        else:
            self.end()

    # --- what ranks compare at a step

    @property
    def digests(self) -> tuple[int, int]:
        """Of the units used since ranks compared them: in the order of their use, and whatever the order."""
        ordered = unordered = 0
        for _, used in self._unchecked:
            ordered, unordered = _digest(used, ordered), _digest(sorted(used), unordered)
        return ordered, unordered

    def compare(self, told: Sequence[tuple[int, int]]) -> None:
        """Take note of the digests of all ranks.

        Raises:
            OrderMismatchError: ranks used the same units in different orders; on all of them.
        """
        if len(set(told)) > 1 and len({units for _, units in told}) == 1:
            self._fail_apart()
        self._unchecked = []

    def forget(self) -> None:
        """On every rank: negotiate the next phase of each kind."""
        self._orders, self._expected, self._latest = {}, {}, {}
        self.is_stale = False

    # --- one gather

    def _replay_to(self, unit: int) -> bool:
        try:
            position = self._order.index(unit, self._issued)
        except ValueError:
            return False
        while self._issued <= position:
            self.issue_next()
        return True

    def _negotiate(self, unit: int) -> set[int]:
        """One round: returns the unit gathered on every rank, or nothing when all are at the end of the phase."""
        phase = self._phase or ""
        mine = _WANTS.pack(unit, _digest(self._used), _digest(sorted(self._used)))
        told = [_WANTS.unpack_from(each) for each in self._control.meet(phase, mine)]
        asked = [want for want, _, _ in told if want != _END]
        if not asked:
            self._freeze(phase, [(ordered, units) for _, ordered, units in told])
            return set()
        chosen = max(asked) if phase in (BACKWARD, ACCUMULATING) else min(asked)
        self._gathered.append(chosen)
        self._issue(chosen)
        return {chosen}

    def _freeze(self, phase: str, told: Sequence[tuple[int, int]]) -> None:
        is_same = len(set(told)) == 1
        self._orders[phase] = tuple(self._used if is_same else self._gathered)

    def _fail_apart(self) -> NoReturn:
        passes = [(phase, [self._names[unit] for unit in dict.fromkeys(used)]) for phase, used in self._unchecked]
        told = self._control.tell(passes)
        first = next((place for place, each in enumerate(passes) if any(other[place] != each for other in told)), 0)
        stories = "; ".join(
            f"rank {rank}: {', '.join(map(repr, each[first][1])) or 'nothing'}" for rank, each in enumerate(told)
        )
        self._unchecked, self._phase = [], None
        raise OrderMismatchError(
            f"ranks use the model's units in different orders in the {passes[first][0]}: {stories} (this is rank "
            f"{self._control.rank}). Under a plan that partitions parameters every rank must run the units in the same "
            "order (a rank may skip some); put modules whose order differs into one unit with shard(units=...), or use "
            "ZERO_2, which gathers nothing"
        )


class Unscheduled:
    """The schedule of a model whose parameters rest whole: nothing is gathered, so there is no order to keep."""

    upcoming = None
    is_stale = False
    digests = (0, 0)

    def __init__(self) -> None:
        self.phase: str | None = None

    def begin(self, phase: str) -> None:
        self.phase = phase

    def end(self) -> None:
        self.phase = None

    abort = end

    def use(self, unit: int) -> None:
        """A whole unit has no gather that its use could be compared with."""

    request = use

    def compare(self, told: Sequence[tuple[int, int]]) -> None:
        """Nothing was gathered."""

    def forget(self) -> None:
        """Nothing is known."""

    def issue_next(self) -> int:
        raise RuntimeError("whole units are never gathered")
