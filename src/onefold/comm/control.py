"""Owns the points of a step where the ranks of one model meet, and the proof that they met at the same one.

[Note: What ranks tell each other]
While all is well a step waits for one message, of the step itself: which gradients there are, whether a pass failed,
how many passes were made, and (over host memory) the sum of squares for the norm. All that was reduced before is used
only once that message is here, so nothing is updated from passes that ranks did not all make.

Passes are not agreed on beforehand, as long as each is the one that followed the last time (`PassHistory`). So ranks
may run collectives before they know that all make this pass, but never for two different ones: a rank whose pass is not
the expected one has to meet the others before its first collective. If they are elsewhere, all wait, and the watch
tells for what (watch.py).

Messages over one set of ranks have one length, so ranks that come for different things understand each other.

[Note: Units out of order]
Under a plan that partitions parameters all ranks gather units in an order that they know from the passes before. A rank
that needs a unit which is not in what is left of it asks for it: it puts the request in place of its next message. The
other ranks find it in place of the message that they came to exchange, or are told by the watch while they wait for
this rank elsewhere; all of them gather that unit over host memory, and go on with what they came for.
"""

from collections.abc import Callable, Sequence
from secrets import randbits
from struct import Struct
from typing import Any, NoReturn
from weakref import WeakValueDictionary
from zlib import crc32

from onefold.comm.comm import Comm
from onefold.comm.control_plane import ControlPlane, apart
from onefold.errors import OrderMismatchError

_HEAD, _UNIT = Struct("<IQI"), Struct("<QI")
_ASKS, _SERVES = b"asks", b"serv"
"""In place of the kind of a message."""
_asked_of: "WeakValueDictionary[int, Control]" = WeakValueDictionary()
"""The models of this process by their numbers, which ranks can be asked for units of."""


class Control:
    """The meetings of the ranks of one model. Every rank makes it, with as much room for what is told.

    Args:
        name: what errors call the model.
        body_bytes: the most that one message holds.
    """

    def __init__(self, comm: Comm, name: str, body_bytes: int) -> None:
        self.rank = comm.rank
        self._comm = comm
        self._plane: ControlPlane = comm.plane
        self._name = name
        self._model = comm.exchange_objects(randbits(62))[0]
        """A number of this model alone, the same on every rank: another one may have as many parameters."""
        wanted = _HEAD.size + max(body_bytes, _UNIT.size)
        self._plane.message_bytes = max(self._plane.message_bytes, -(-wanted // 8) * 8)
        self._plane.serve = self._serve
        self._gather: Callable[[int, bool], None] = lambda unit, is_wanted: None

    def serve_with(self, gather: Callable[[int, bool], None]) -> None:
        """Let `gather` bring a unit to the ranks that ask for it; it is told whether this one does."""
        self._gather = gather
        _asked_of[self._model] = self

    def meet(self, what: str, body: bytes = b"") -> list[bytes]:
        """Go on where every rank has come to `what`. Returns what each told, by rank.

        Raises:
            OrderMismatchError: another rank came to something else; on every rank.
        """
        return self.begin(what, body)()

    def begin(self, what: str, body: bytes = b"") -> Callable[[], list[bytes]]:
        """As `meet`, without waiting: what is returned waits, and raises what it raises."""
        self._plane.is_apart = True
        self._plane.doing = what
        head = self._head(what)
        come = self._comm.begin_exchange(self._filled(head + body))

        def finish() -> list[bytes]:
            messages = come()
            while self._have_asked(messages):
                self._serve_first(messages, None)
                messages = self._exchange(head + body)
            if any(message[: _HEAD.size] != head for message in messages):
                self._fail_apart(what)
            self._plane.is_apart = False
            return [message[_HEAD.size :] for message in messages]

        return finish

    def enter(self, what: str) -> None:
        """Begin a pass in which ranks communicate; they meet first, unless it is the one that all expect.

        Raises:
            OrderMismatchError: as `meet` does.
        """
        kind = crc32(what.encode(), self._model & 0xFFFFFFFF)
        if self._plane.passes.expected != kind:
            self.meet(what)
        self._plane.doing = what
        self._plane.passes.add(kind)

    def ask(self, unit: int) -> None:
        """Have a unit gathered that is not in the order which all ranks follow. See [Note: Units out of order]."""
        self._comm.ask()
        served = None
        while served != (self._model, unit):
            served = self._serve_first(self._exchange(_ASKS + _UNIT.pack(self._model, unit)), unit)

    def _serve(self) -> None:
        messages = self._exchange(_SERVES)
        if self._have_asked(messages):
            self._serve_first(messages, None)

    def _serve_first(self, messages: Sequence[bytes], mine: int | None) -> tuple[int, int]:
        """Gather the first unit that a rank asked for; `mine` is the one that this rank asked for."""
        asked = [_UNIT.unpack_from(message, len(_ASKS)) for message in messages if message.startswith(_ASKS)]
        model, unit = min(asked)
        self._plane.num_served += asked.count((model, unit))
        _asked_of[model]._gather(unit, mine == unit and model == self._model)
        return model, unit

    def _have_asked(self, messages: Sequence[bytes]) -> bool:
        return any(message.startswith(_ASKS) for message in messages)

    def _exchange(self, message: bytes) -> list[bytes]:
        return self._comm.begin_exchange(self._filled(message))()

    def _filled(self, message: bytes) -> bytes:
        return message.ljust(self._plane.message_bytes, b"\0")

    def _head(self, what: str) -> bytes:
        return _HEAD.pack(crc32(what.encode()), self._model, self._plane.passes.digest)

    @property
    def is_apart(self) -> bool:
        """Whether ranks came to the latest meeting for different things."""
        return self._plane.is_apart

    def tell(self, story: Any) -> list[Any]:
        """Every rank's story, by rank; for errors that all ranks found at the same meeting."""
        return self._comm.exchange_objects(story)

    def order_of_rank_0(self, order: Sequence[int]) -> list[int]:
        """Rank 0's `order`; once, after the first step."""
        return list(self._comm.exchange_objects(list(order))[0])

    def _fail_apart(self, what: str) -> NoReturn:
        passes = self._plane.passes
        made = (passes.num_made, passes.digest)
        told = self._comm.exchange_objects((what, self._model, self._name, *made))
        stories = "; ".join(
            f"rank {rank} came to the {each[0]}{_of(each, told)}{_after(each, told)}" for rank, each in enumerate(told)
        )
        raise OrderMismatchError(apart(stories, self.rank))


_Story = tuple[str, int, str, int, int]
"""What a rank came to, its model's number and name, how many passes it made, and their digest."""


def _of(mine: _Story, told: Sequence[_Story]) -> str:
    """Of which model a rank told, where they told of different ones."""
    numbers = list(dict.fromkeys(model for _, model, _, _, _ in told))
    return "" if len(numbers) == 1 else f" of model {numbers.index(mine[1]) + 1}, a {mine[2]}"


def _after(mine: _Story, told: Sequence[_Story]) -> str:
    """After how many passes a rank came, where all came to one thing after different passes."""
    is_same = len({(what, model) for what, model, _, _, _ in told}) == 1
    return f" after {mine[3]} passes{'' if len({each[3] for each in told}) > 1 else ' of its own'}" if is_same else ""
