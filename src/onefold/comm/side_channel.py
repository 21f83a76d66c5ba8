"""Owns what rank 0 and the others tell each other beside the loop, apart from all other traffic.

The connections are made behind torch's back: whatever is in its books ends with `destroy_process_group`, and a save may
be under way then.
"""

import pickle
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onefold.errors import CheckpointError

_MEETING = timedelta(minutes=5)
"""How much later than another one rank may come to be connected; that one is gone shows in nothing else."""
_PATIENCE = timedelta(hours=2)
"""How much longer one rank may write than another; one that is gone is noticed at once."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One exchange of objects between rank 0 and the others. Several may be held at once, from any threads."""

    rank: int
    num_ranks: int
    _group: Any
    _tag: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on rank 0; nothing on the others.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self.rank:
            self._send(value, 0)
            return []
        values, gone = [value], dict[int, RuntimeError]()
        for rank in range(1, self.num_ranks):
            try:
                values.append(self._receive(rank))
            except RuntimeError as error:  # the others are heard all the same: until then they listen to nobody
                gone[rank] = error
        for rank, lost in gone.items():
            raise RuntimeError(f"rank {rank} is gone ({lost})") from lost
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value.

        Raises:
            RuntimeError: rank 0 is gone.
        """
        if self.rank:
            return self._receive(0)
        for rank in range(1, self.num_ranks):
            with suppress(RuntimeError):  # a rank that is gone need not be told; the others have to be
                self._send(value, rank)
        return value

    def _send(self, value: Any, rank: int) -> None:
        data = bytearray(pickle.dumps(value))
        for sent in (torch.tensor([len(data)], device="cpu"), torch.frombuffer(data, dtype=torch.uint8)):
            self._group.send([sent], rank, self._tag).wait(_PATIENCE)

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._group.recv([size], rank, self._tag).wait(_PATIENCE)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._group.recv([data], rank, self._tag).wait(_PATIENCE)
        return pickle.loads(data.numpy().tobytes())


class Line:
    """Connections between all ranks, for any number of conversations. Every rank makes it.

    Args:
        name: by which they find each other: equal on all ranks, and never used before.
        meeting: how long to wait for the others.
    Raises:
        CheckpointError: a rank did not come.
    """

    def __init__(self, rank: int, num_ranks: int, name: str, meeting: timedelta = _MEETING) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        store = dist.distributed_c10d.PrefixStore(f"onefold-{name}", dist.distributed_c10d._get_default_store())
        try:
            self._group = dist.ProcessGroupGloo(store, rank, num_ranks, meeting)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {rank} could not be connected with all {num_ranks} ranks within {meeting}, to save: {error}"
            ) from error

    def open(self, tag: int) -> Conversation:
        """The conversation with a tag, equal on all ranks."""
        return Conversation(self._rank, self._num_ranks, self._group, tag)
