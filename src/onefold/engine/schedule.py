"""Owns the order in which units are gathered, and the proof that all ranks agree on it. Integers only.

[Note: The recorded order]
A phase is one outermost forward or one backward pass. Every rank issues exactly the same gathers in each phase:
0. *Meeting.* All ranks start the same phase, or all of them raise.
1. *Replay.* If a phase of this kind has a frozen order, its gathers are issued in that order, each before its unit is
   needed (so they can be prefetched). A unit this rank skips is gathered all the same: others need its shard.
2. *Negotiation.* A unit that is not in what is left of the frozen order is asked for by exchanging messages: after the
   rest of the order is issued, ranks exchange what each needs next. The lowest unit asked for is gathered by everyone,
   until every rank has reached the end of the phase. So a unit used on one rank only is served by the others.
3. *Freezing.* At the end of each phase ranks compare what they used. What was really gathered becomes the frozen order,
   or, if every rank used the same units in the same order, that.
A rank that asks for a unit it let pass earlier in the phase, while others do not, uses units in another order than
they: every rank sees the same messages and raises the same error, and no rank waits.
"""

from collections.abc import Callable, Sequence
from typing import NoReturn
from zlib import crc32

from onefold.comm.control import Meeting
from onefold.errors import OrderMismatchError

BACKWARD = "backward pass"
"""The phase of a backward pass that reduces gradients; units come in falling order there."""
ACCUMULATING = "backward pass inside accumulate"
"""The phase of one that only adds them up."""

_END = -1


def _digest(units: Sequence[int]) -> int:
    return crc32(repr(list(units)).encode())


class Schedule:
    """Decides which gathers to issue. `issue(unit)` gathers a unit on this rank; all ranks issue the same sequence."""

    def __init__(self, names: Sequence[str], meeting: Meeting, issue: Callable[[int], None]) -> None:
        self._names = names
        self._meeting = meeting
        self._issue = issue
        self._frozen: dict[str, tuple[int, ...]] = {}
        self._phase: str | None = None
        self._order: tuple[int, ...] = ()
        self._issued = 0
        self._gathered: list[int] = []
        self._used: list[int] = []
        self._skipped: set[int] = set()
        self._broken: OrderMismatchError | None = None

    @property
    def phase(self) -> str | None:
        """The running phase."""
        return self._phase

    def begin(self, phase: str, number: int = 0) -> Sequence[int] | None:
        """Start a phase; `phase` names its kind, such as "forward of model". Returns the `number` of each rank, if
        they met."""
        self._raise_if_broken()
        told, _ = self._meeting.exchange(f"start of the {phase}", [number])
        self._phase = phase
        self._order = self._frozen.get(phase, ())
        self._issued = 0
        self._gathered, self._used = [], []
        self._skipped = set()
        return [each for (each,) in told]

    def request(self, unit: int) -> None:
        """Issue gathers until `unit` is among them. Collective, in step with the other ranks.

        Raises:
            OrderMismatchError: ranks use units in different orders.
        """
        self._raise_if_broken()
        self._used.append(unit)
        if self._replay_to(unit):
            return
        for _ in range(self._issued, len(self._order)):
            self._skipped.add(self.issue_next())
        while unit not in self._negotiate(unit):
            pass
        self._skipped.discard(unit)

    @property
    def upcoming(self) -> int | None:
        """The unit that the frozen order gathers next."""
        return self._order[self._issued] if self._issued < len(self._order) else None

    def issue_next(self) -> int:
        """Issue the gather of `upcoming` ahead of its use."""
        unit = self._order[self._issued]
        self._issued += 1
        self._gathered.append(unit)
        self._issue(unit)
        return unit

    def use(self, unit: int) -> None:
        """Note that a prefetched unit was used."""
        self._used.append(unit)
        self._skipped.discard(unit)

    def end(self) -> None:
        """Finish the phase on every rank and freeze its order."""
        if self._phase is None or self._broken is not None:
            self._phase = None
            return
        while self._issued < len(self._order):
            self.issue_next()
        while self._negotiate(_END):
            pass
        self._phase = None

    def abort(self) -> None:
        """End a phase that an exception cut short: ranks that go on with it are still served what they gather."""
        if self._meeting.is_apart:
            self._phase = None
        else:
            self.end()

    def _replay_to(self, unit: int) -> bool:
        try:
            position = self._order.index(unit, self._issued)
        except ValueError:
            return False
        while self._issued < position:
            self._skipped.add(self.issue_next())
        self.issue_next()
        return True

    def _negotiate(self, unit: int) -> set[int]:
        """One round: returns the unit gathered on every rank, or nothing when all are at the end of the phase."""
        phase = self._phase or ""
        mine = [unit, int(unit in self._skipped), _digest(self._used), _digest(sorted(self._used))]
        messages, _ = self._meeting.exchange(phase, mine)
        wanted = [message[0] for message in messages]
        if all(want == _END for want in wanted):
            self._freeze(phase, messages)
            return set()
        if any(message[1] for message in messages) and any(want != wanted[0] for want in wanted):
            self._fail()
        asked = [want for want in wanted if want != _END]
        chosen = max(asked) if phase in (BACKWARD, ACCUMULATING) else min(asked)
        if unit != chosen:
            self._skipped.add(chosen)
        self._gathered.append(chosen)
        self._issue(chosen)
        return {chosen}

    def _freeze(self, phase: str, messages: Sequence[Sequence[int]]) -> None:
        same_order = all(message[2] == messages[0][2] for message in messages)
        same_units = all(message[3] == messages[0][3] for message in messages)
        if same_units and not same_order:
            self._fail()
        self._frozen[phase] = tuple(self._used if same_order else self._gathered)

    def _fail(self) -> NoReturn:
        mine = ", ".join(repr(self._names[unit]) for unit in dict.fromkeys(self._used)) or "nothing"
        stories = "; ".join(f"rank {rank}: {told}" for rank, told in enumerate(self._meeting.tell(mine)))
        self._broken = OrderMismatchError(
            f"ranks use the model's units in different orders in the {self._phase}: {stories} (this is rank "
            f"{self._meeting.rank}). Under a plan that partitions parameters every rank must run the units in the same "
            "order (a rank may skip some); put modules whose order differs into one unit with shard(units=...), or use "
            "ZERO_2, which gathers nothing"
        )
        raise self._broken

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise OrderMismatchError(str(self._broken))


class Unscheduled:
    """The schedule of a model whose parameters rest whole: nothing is gathered, so there is no order to keep."""

    upcoming = None

    def __init__(self) -> None:
        self.phase: str | None = None

    def begin(self, phase: str, number: int = 0) -> Sequence[int] | None:
        self.phase = phase
        return None

    def end(self) -> None:
        self.phase = None

    abort = end

    def use(self, unit: int) -> None:
        """A whole unit has no gather that its use could be compared with."""

    request = use

    def issue_next(self) -> int:
        raise RuntimeError("whole units are never gathered")
