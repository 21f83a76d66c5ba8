"""Owns memory that all ranks of one machine see, and the meetings that order who writes and reads there."""

import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from onefold.comm.comm import Comm
from onefold.memory.streams import Finish

_CHUNK_BYTES = 2**24
"""Shards of up to half of it share an allocation of this size: each takes a driver's page, or a file, and a meeting to
set up."""
_ALIGNMENT = 256

SHARDS, WHOLE, GRADIENTS = 0, 1, 2
"""Lines of meetings: those of whole weights, and of reductions, may be under way as shards are about to change."""

_PATIENCE_MS = 600_000
"""A rank that waits so long for another on a GPU gives up, as NCCL does."""


class Pool(Protocol):
    """Memory that all ranks see that hold one shard each. They call it in the same order."""

    held_bytes: int
    """What this rank has put into it, room that is left included."""

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
        """This rank's tensor [numel], uninitialized, and everyone's, by shard. Its storage is its own, so that who
        holds views of it can be counted; that among everyone's stays where all ranks see it, whatever happens to it."""
        ...

    def meet(self, line: int = 0) -> Finish | None:
        """Start waiting until every rank has come here, with all that it queued before on the current stream. Meetings
        on one line are in one order; those on several may be under way at once."""
        ...


class _ChunkPool(Pool):
    """Takes memory that all ranks see by chunks, and cuts what is asked for from them.

    Args:
        shard: which shard this rank holds.
    """

    def __init__(self, shard: int) -> None:
        self.held_bytes = 0
        self._shard = shard
        self._left: Sequence[Tensor] = ()
        """What is left of a chunk, on every rank, by shard."""

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
        nbytes = -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        parts = [part[: numel * dtype.itemsize] for part in self._cut(nbytes)]
        own = from_dlpack(parts[self._shard])  # the same memory; as bytes, which any dtype can be
        return own.view(dtype), [part.view(dtype) for part in parts]

    def _cut(self, nbytes: int) -> Sequence[Tensor]:
        """`nbytes` of what is left, or of a new allocation: the larger rest is kept, or small shards between large ones
        would take a chunk each."""
        left = self._left[0].numel() if self._left else 0
        if left >= nbytes:
            source, left = self._left, 0
        else:
            source = self._take(nbytes if nbytes > _CHUNK_BYTES // 2 else _CHUNK_BYTES)
        if source[0].numel() - nbytes >= left:
            self._left = [part[nbytes:] for part in source]
        return [part[:nbytes] for part in source]

    def _take(self, nbytes: int) -> Sequence[Tensor]:
        self.held_bytes += nbytes
        return self._open(nbytes)

    @abstractmethod
    def _open(self, nbytes: int) -> Sequence[Tensor]:
        """New memory of every rank [nbytes], bytes, by shard."""


class MappedPool(_ChunkPool):
    """Memory of processes on one machine, mapped by all of them; it is gone when the last one lets go of it."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm.shard)
        self._comm = comm

    def meet(self, line: int = 0) -> Finish | None:
        token, tokens = torch.zeros(1), torch.zeros(self._comm.num_shards)
        if line == GRADIENTS:  # in the order of reductions, which is not that of gathers
            return self._comm.reduce_scatter(token, tokens)
        return self._comm.all_gather(tokens, token)

    def _open(self, nbytes: int) -> Sequence[Tensor]:
        descriptor = os.memfd_create("onefold shard")
        try:
            os.ftruncate(descriptor, nbytes)
            paths = self._comm.exchange_objects(f"/proc/{os.getpid()}/fd/{descriptor}")
            everyone = [
                torch.from_file(paths[peer], shared=True, size=nbytes, dtype=torch.uint8) for peer in self._comm.peers
            ]
            self._comm.exchange([0])  # everybody has opened everybody's
        finally:
            os.close(descriptor)
        return everyone


class SymmetricPool(_ChunkPool):
    """Memory of the GPUs of one machine, each mapped by all of its ranks, as PyTorch's symmetric memory. It comes from
    the driver: torch.cuda's counters of allocated memory do not see it."""

    num_opened: ClassVar[int] = 0
    """Allocations of this process so far, of all its pools. PyTorch numbers them by process when ranks look for each
    other's, so that ranks which opened other numbers of them, with others, would wait for each other without end."""

    def __init__(self, group: Any, device: torch.device) -> None:
        # PyTorch's module for it is new and has no stable name yet.
        import torch.distributed._symmetric_memory as symmetric

        super().__init__(dist.get_rank(group))
        self._memory = symmetric
        self._group = group
        self._device = device
        self._num_ranks = dist.get_world_size(group)
        self._handles: list[Any] = []  # memory of other ranks is mapped as long as these live
        self._left = self._take(_ALIGNMENT)

    def meet(self, line: int = 0) -> Finish | None:
        self._handles[0].barrier(channel=line, timeout_ms=_PATIENCE_MS)
        return None

    def _open(self, nbytes: int) -> Sequence[Tensor]:
        SymmetricPool.num_opened += 1
        own = self._memory.empty(nbytes, dtype=torch.uint8, device=self._device)
        handle = self._memory.rendezvous(own, self._group)
        self._handles.append(handle)
        return [
            own if rank == self._shard else handle.get_buffer(rank, (nbytes,), torch.uint8)
            for rank in range(self._num_ranks)
        ]
