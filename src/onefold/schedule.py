"""Owns the order in which units are gathered, and the proof that all ranks agree on it. Integers only.

[Note: The recorded order]
A phase is one outermost forward or one backward pass. Every rank issues exactly the same gathers in each phase:
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
from typing import NoReturn, Protocol
from zlib import crc32

from onefold.errors import OrderMismatchError


class Exchange(Protocol):
    """Every rank's message, by rank."""

    def __call__(self, message: Sequence[int]) -> list[list[int]]: ...


BACKWARD = "backward"
"""The phase of every backward pass; units come in falling order there."""

_END = -1
_WAY_OUT = (
    ". Under a plan that partitions parameters every rank must run the units in the same order (a rank may skip some); "
    "put modules whose order differs into one unit with shard(units=...), or use ZERO_2, which gathers nothing"
)


def _digest(units: Sequence[int]) -> int:
    return crc32(repr(list(units)).encode())


class Schedule:
    """Decides which gathers to issue. `issue(unit)` gathers a unit on this rank; all ranks issue the same sequence."""

    def __init__(self, names: Sequence[str], exchange: Exchange, issue: Callable[[int], None], rank: int) -> None:
        self._names = names
        self._exchange = exchange
        self._issue = issue
        self._rank = rank
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

    def begin(self, phase: str) -> None:
        """Start a phase; `phase` names its kind, such as "forward of model"."""
        self._raise_if_broken()
        self._phase = phase
        self._order = self._frozen.get(phase, ())
        self._issued = 0
        self._gathered, self._used = [], []
        self._skipped = set()

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
        """Forget a phase that an exception ended; the frozen orders stay."""
        self._phase = None

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
        phase = crc32((self._phase or "").encode())
        messages = self._exchange(
            [phase, unit, int(unit in self._skipped), _digest(self._used), _digest(sorted(self._used))]
        )
        self._check_phases(messages)
        wanted = [message[1] for message in messages]
        if all(want == _END for want in wanted):
            self._freeze(messages)
            return set()
        self._check_order(messages)
        asked = [want for want in wanted if want != _END]
        chosen = max(asked) if self._phase == BACKWARD else min(asked)
        if unit != chosen:
            self._skipped.add(chosen)
        self._gathered.append(chosen)
        self._issue(chosen)
        return {chosen}

    def _freeze(self, messages: Sequence[Sequence[int]]) -> None:
        same_order = all(message[3] == messages[0][3] for message in messages)
        same_units = all(message[4] == messages[0][4] for message in messages)
        if same_units and not same_order:
            self._fail(
                f"ranks use the model's units in different orders in the {self._phase}: rank {self._rank} used "
                f"{self._story()}{_WAY_OUT}"
            )
        self._frozen[self._phase or ""] = tuple(self._used if same_order else self._gathered)

    def _story(self) -> str:
        return " then ".join(repr(self._names[unit]) for unit in dict.fromkeys(self._used)) or "nothing"

    def _check_phases(self, messages: Sequence[Sequence[int]]) -> None:
        if all(message[0] == messages[0][0] for message in messages):
            return
        others = [rank for rank, message in enumerate(messages) if message[0] != messages[self._rank][0]]
        self._fail(
            f"rank {self._rank} is in the {self._phase}, ranks {others} are in another pass of the model; every rank "
            "must run the same forwards and backwards"
        )

    def _check_order(self, messages: Sequence[Sequence[int]]) -> None:
        wanted = [message[1] for message in messages]
        late = [rank for rank, message in enumerate(messages) if message[2]]
        if not late or all(want == wanted[0] for want in wanted):
            return
        story = "; ".join(
            f"rank {rank} "
            + (f"uses {self._names[want]!r}" if want != _END else "is at its end")
            + (" which the others used before" if rank in late else "")
            for rank, want in enumerate(wanted)
        )
        self._fail(
            f"ranks use the model's units in different orders in the {self._phase}: {story}; rank {self._rank} used "
            f"{self._story()}{_WAY_OUT}"
        )

    def _fail(self, message: str) -> NoReturn:
        self._broken = OrderMismatchError(message)
        raise self._broken

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise OrderMismatchError(str(self._broken))


class Unscheduled:
    """The schedule of a model whose parameters rest whole: nothing is gathered, so there is no order to keep."""

    upcoming = None

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

    def issue_next(self) -> int:
        raise RuntimeError("whole units are never gathered")
