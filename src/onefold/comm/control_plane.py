"""Owns what models over the same ranks share on the control plane: the passes that all made, and the watch over waits.

[Note: Ranks that wait]
A wait that takes long is made in short pieces. Meanwhile the rank leaves word, in the store that all ranks found each
other through, of what it has come to, and reads theirs. A rank without a word there is not waiting: it is late, loading
or evaluating, and named in a warning. Once all ranks have waited for so long that nothing can be under way any more,
and have come to different things, their programs differ: the first to see that leaves the verdict, and every rank
raises it.
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakValueDictionary
from zlib import crc32

from onefold.errors import OrderMismatchError

_PATIENCE = timedelta(seconds=2)
"""Before a rank leaves word; nothing is looked at in a wait that is shorter."""
_PIECE = timedelta(seconds=0.5)
_LOOKS_EACH_S = 2.0
_STILL_S = 15.0
"""So long all ranks must have waited, each at one point, before their programs are said to differ."""
_WARN_EACH_S = 30.0
_VERDICT, _ASKED = "verdict", "asked"
_CONTEXTS = (128, 32, 8, 2, 1)
"""So many passes before are looked at for the next one, as far as they have been seen: long ones tell the parts of an
accumulating loop apart."""
_MOST_CONTEXTS = 1 << 14


class PassHistory:
    """The passes in which ranks communicate, as all ranks made them, and which one is expected next."""

    def __init__(self) -> None:
        self._made: list[int] = []
        self.num_made = 0
        self.digest = 0
        """Of all of them, in their order."""
        self._next: dict[tuple[int, ...], int] = {}

    @property
    def expected(self) -> int | None:
        """What followed the last time that the passes before were as they are now."""
        for context in self._contexts():
            if context in self._next:
                return self._next[context]
        return None

    def add(self, kind: int) -> None:
        """Note that the pass after those before was of this kind."""
        if len(self._next) > _MOST_CONTEXTS:  # on all ranks at the same pass
            self._next.clear()
        for context in self._contexts():
            self._next[context] = kind
        self._made = [*self._made, kind][-_CONTEXTS[0] :]
        self.num_made += 1
        self.digest = crc32(kind.to_bytes(4, "little"), self.digest)

    def _contexts(self) -> list[tuple[int, ...]]:
        return [tuple(self._made[-length:]) for length in _CONTEXTS if length <= len(self._made)]


class ControlPlane:
    """What models over the same ranks share: the length of messages, and the passes made."""

    def __init__(self) -> None:
        self.message_bytes = 0
        self.passes = PassHistory()
        self.doing = "first pass"
        """What this rank has come to, for those that wait for it."""
        self.is_apart = False
        """Whether ranks came to the latest meeting for different things."""
        self.num_served = 0
        """Requests that were served, see [Note: Units out of order]."""
        self.servers: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """The `Control` of each model, by the model's number."""


class WaitWatch:
    """The waits of one set of ranks.

    Args:
        store: where all of them can leave words.
    """

    def __init__(self, plane: ControlPlane, store: Any, rank: int, num_ranks: int) -> None:
        self.plane = plane
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_waits = 0

    def wait(self, work: Any, *, is_message: bool = False) -> None:
        """Come back when `work`, a torch.distributed one, is done. Ranks that ask for something find a message of this
        rank; while it waits for anything else, it makes one for them.

        Raises:
            OrderMismatchError: all ranks wait, for different things.
            RuntimeError: `work` failed.
        """
        if not _is_done_after_waiting(work, _PATIENCE):
            self._wait_long(work, self.plane.doing, is_message)

    def _wait_long(self, work: Any, doing: str, is_message: bool) -> None:
        started = looked = warned = time.monotonic()
        with self._word(doing):
            while not _is_done_after_waiting(work, _PIECE):
                now = time.monotonic()
                if not is_message and self._num_asked() > self.plane.num_served:
                    next(self.plane.servers.values()).serve()
                    continue
                if now - looked < _LOOKS_EACH_S:
                    continue
                looked, words = now, self._look()
                self._judge(words)
                if now - warned >= _WARN_EACH_S:
                    warned = now
                    self._warn(words, doing, now - started)

    def ask(self) -> None:
        """Let the ranks that wait know that this one asks for something."""
        self._store.add(_ASKED, 1)

    def _num_asked(self) -> int:
        return int(self._store.add(_ASKED, 0))

    @contextmanager
    def _word(self, doing: str) -> Iterator[None]:
        self._num_waits += 1
        self._store.set(str(self._rank), json.dumps([doing, self._num_waits, time.time()]))
        try:
            yield
        finally:
            if not self.plane.is_apart:  # others still have to see what this one came to
                self._store.set(str(self._rank), "null")

    def _look(self) -> list[tuple[str, int, float] | None]:
        """The word of each rank; None of one that does not wait."""
        words: list[tuple[str, int, float] | None] = []
        for rank in range(self._num_ranks):
            word = json.loads(self._store.get(str(rank))) if self._store.check([str(rank)]) else None
            words.append(None if word is None else (word[0], word[1], word[2]))
        return words

    def _judge(self, words: list[tuple[str, int, float] | None]) -> None:
        if self._store.check([_VERDICT]):
            self._raise(self._store.get(_VERDICT).decode())
        waiting = [word for word in words if word is not None]
        if len(waiting) < len(words) or len({doing for doing, _, _ in waiting}) == 1:
            return
        if time.time() - max(since for _, _, since in waiting) < _STILL_S:
            return
        stories = "; ".join(f"rank {rank} came to the {doing}" for rank, (doing, _, _) in enumerate(waiting))
        self._store.set(_VERDICT, stories)
        self._raise(stories)

    def _raise(self, stories: str) -> NoReturn:
        self.plane.is_apart = True
        raise OrderMismatchError(apart(stories, self._rank))

    def _warn(self, words: list[tuple[str, int, float] | None], doing: str, waited_s: float) -> None:
        late = [str(rank) for rank, word in enumerate(words) if word is None]
        if late:
            logging.getLogger("onefold").warning(
                "rank %d has waited %.0f s in the %s for rank %s, which does something else (evaluating, loading, "
                "saving?); it is an error at the timeout of init_process_group",
                *(self._rank, waited_s, doing, ", ".join(late)),
            )


def apart(stories: str, rank: int) -> str:
    """What is wrong where ranks came to different things."""
    return (
        f"ranks are at different points of the step: {stories} (this is rank {rank}). Every rank must run the "
        "same forwards, backwards and steps, and be inside accumulate(model) and gathered(model) at the same times"
    )


def _is_done_after_waiting(work: Any, piece: timedelta) -> bool:
    try:
        work.wait(piece)
    except RuntimeError:
        if work.is_completed():  # not the piece is over: it failed
            raise
        return False
    return True
