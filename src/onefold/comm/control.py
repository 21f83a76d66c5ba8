"""Owns the points of a step where ranks meet on the control plane, and the proof that they met at the same one.

Every first message has one length, whatever the model, so ranks that come for different things still understand each
other, and all of them raise.
"""

from collections.abc import Callable, Sequence
from secrets import randbits
from typing import NoReturn
from zlib import crc32

from onefold.comm.comm import Comm
from onefold.errors import OrderMismatchError

_WORD = 62
_SHORT = 4
"""Numbers that the shortest message holds."""
_FIRST_WORDS = 32
"""Words of flags in the first message: those of some 650 parameters. More of them come in a second one."""


class Meeting:
    """Exchanges of small messages between the ranks of one model.

    Args:
        name: what errors call the model.
    """

    def __init__(self, comm: Comm, name: str) -> None:
        self.rank = comm.rank
        self.is_apart = False
        """Whether ranks came to the latest meeting for different things."""
        self._comm = comm
        self._name = name
        self._model = comm.exchange_objects(randbits(_WORD))[0]
        """A number of this model alone, the same on every rank: another one may have as many parameters."""

    def exchange(
        self, kind: str, numbers: Sequence[int] = (), flags: Sequence[bool] = ()
    ) -> tuple[list[list[int]], list[bool]]:
        """Meet the other ranks for `kind`; returns their numbers by rank, and each flag or-ed over the ranks. For one
        kind, all ranks of a model bring as many flags.

        Raises:
            OrderMismatchError: another rank came for something else.
        """
        words = [0] * -(-len(flags) // _WORD)
        for place, flag in enumerate(flags):
            words[place // _WORD] |= flag << place % _WORD
        messages = self._begin(kind, numbers, words[:_FIRST_WORDS])()
        told = [message[2 + _SHORT :][: len(words)] for message in messages]
        if len(words) > _FIRST_WORDS:
            told = [[*have, *more] for have, more in zip(told, self._comm.exchange(words[_FIRST_WORDS:]), strict=True)]
        merged = [0] * len(words)
        for each in told:
            merged = [have | new for have, new in zip(merged, each, strict=True)]
        united = [bool(merged[place // _WORD] >> place % _WORD & 1) for place in range(len(flags))]
        return [message[2 : 2 + len(numbers)] for message in messages], united

    def begin(self, kind: str, number: int) -> Callable[[], list[int]]:
        """As `exchange` of a number for `kind`, without waiting: what is returned waits, and raises what it raises."""
        finish = self._begin(kind, (number,), ())
        return lambda: [message[2] for message in finish()]

    def _begin(self, kind: str, numbers: Sequence[int], words: Sequence[int]) -> Callable[[], list[list[int]]]:
        self.is_apart = True
        head = [crc32(kind.encode()), self._model]
        come = self._comm.begin_exchange([*head, *_padded(numbers, _SHORT), *_padded(words, _FIRST_WORDS)])

        def finish() -> list[list[int]]:
            messages = come()
            if any(message[:2] != head for message in messages):
                self._fail_apart(kind)
            self.is_apart = False
            return messages

        return finish

    def tell(self, story: str) -> list[str]:
        """Every rank's story, by rank; for errors that all ranks found at the same meeting."""
        return [str(told) for told in self._comm.exchange_objects(story)]

    def exchange_order(self, order: Sequence[int]) -> list[int]:
        """Rank 0's `order` (same length everywhere)."""
        self.exchange("end of the first backward pass")
        return self._comm.exchange(order)[0]

    def _fail_apart(self, kind: str) -> NoReturn:
        told = self._comm.exchange_objects((kind, self._model, self._name))
        where = "; ".join(f"rank {rank} came to the {each[0]}{_of(each, told)}" for rank, each in enumerate(told))
        raise OrderMismatchError(
            f"ranks are at different points of the step: {where} (this is rank {self.rank}). Every rank must run the "
            "same forwards, backwards and steps, and be inside accumulate(model) and gathered(model) at the same times"
        )


def _padded(numbers: Sequence[int], length: int) -> list[int]:
    return [*numbers, *[0] * (length - len(numbers))]


def _of(mine: tuple[str, int, str], told: Sequence[tuple[str, int, str]]) -> str:
    """Of which model a rank told, where they told of different ones."""
    _, model, name = mine
    numbers = list(dict.fromkeys(number for _, number, _ in told))
    return "" if len(numbers) == 1 else f" of model {numbers.index(model) + 1}, a {name}"
