"""Owns the points of a step where ranks meet on the control plane, and the proof that they met at the same one.

Every message has one length, so ranks that come for different things still understand each other, and all of them
raise.
"""

from collections.abc import Sequence
from typing import NoReturn
from zlib import crc32

from onefold.comm import Comm
from onefold.errors import OrderMismatchError

_WORD = 62
_SHORT = 4
"""Numbers that the shortest message holds."""


class Meeting:
    """Exchanges of small messages between the ranks of one model.

    Args:
        num_flags: the most flags that one message carries; equal on every rank.
    """

    def __init__(self, comm: Comm, num_flags: int) -> None:
        self.rank = comm.rank
        self.is_apart = False
        """Whether ranks came to the latest meeting for different things."""
        self._comm = comm
        self._num_words = -(-num_flags // _WORD)

    def exchange(
        self, kind: str, numbers: Sequence[int] = (), flags: Sequence[bool] = ()
    ) -> tuple[list[list[int]], list[bool]]:
        """Meet the other ranks for `kind`; returns their numbers by rank, and each flag or-ed over the ranks.

        Raises:
            OrderMismatchError: another rank came for something else.
        """
        words = [0] * self._num_words
        for place, flag in enumerate(flags):
            words[place // _WORD] |= flag << place % _WORD
        padded = [*numbers, *[0] * (_SHORT - len(numbers))]
        self.is_apart = True
        messages = self._comm.exchange([crc32(kind.encode()), *padded, *words])
        if any(message[0] != messages[0][0] for message in messages):
            self._fail_apart(kind)
        self.is_apart = False
        merged = [0] * self._num_words
        for message in messages:
            merged = [have | new for have, new in zip(merged, message[1 + _SHORT :], strict=True)]
        united = [bool(merged[place // _WORD] >> place % _WORD & 1) for place in range(len(flags))]
        return [message[1 : 1 + len(numbers)] for message in messages], united

    def tell(self, story: str) -> list[str]:
        """Every rank's story, by rank; for errors that all ranks found at the same meeting."""
        return [str(told) for told in self._comm.exchange_objects(story)]

    def exchange_order(self, order: Sequence[int]) -> list[int]:
        """Rank 0's `order` (same length everywhere, no longer than the most flags)."""
        self.exchange("end of the first backward pass")
        return self._comm.exchange(order)[0]

    def _fail_apart(self, kind: str) -> NoReturn:
        where = "; ".join(f"rank {rank} came to the {told}" for rank, told in enumerate(self.tell(kind)))
        raise OrderMismatchError(
            f"ranks are at different points of the step: {where} (this is rank {self.rank}). Every rank must run the "
            "same forwards, backwards and steps, and be inside accumulate(model) and gathered(model) at the same times"
        )
