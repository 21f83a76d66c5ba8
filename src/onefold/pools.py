"""Owns memory that all ranks of one machine see, and the meetings that order who writes and reads there."""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.comm import Comm
from onefold.streams import Finish

_CHUNK_BYTES = 2**24
"""Small shards share an allocation of this size: each takes a driver's page, and a meeting to set up."""

SHARDS, WHOLE, GRADIENTS = 0, 1, 2
"""Lines of meetings: those of whole weights, and of reductions, may be under way as shards are about to change."""

_PATIENCE_MS = 600_000
"""A rank that waits so long for another on a GPU gives up, as NCCL does."""


class Pool(Protocol):
    """Memory that all ranks see that hold one shard each. They call it in the same order."""

    held_bytes: int
    """What this rank has put into it, room that is left included."""

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
        """This rank's tensor [numel], uninitialized, and everyone's, by shard."""
        ...

    def meet(self, line: int = 0) -> Finish | None:
        """Start waiting until every rank has come here, with all that it queued before on the current stream. Meetings
        on one line are in one order; those on several may be under way at once."""
        ...


class MappedPool:
    """Memory of processes on one machine, mapped by all of them; it is gone when the last one lets go of it."""

    def __init__(self, comm: Comm) -> None:
        self.held_bytes = 0
        self._comm = comm

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
        self.held_bytes += numel * dtype.itemsize
        descriptor = os.memfd_create("onefold shard")
        try:
            os.ftruncate(descriptor, numel * dtype.itemsize)
            paths = self._comm.exchange_objects(f"/proc/{os.getpid()}/fd/{descriptor}")
            everyone = [torch.from_file(paths[peer], shared=True, size=numel, dtype=dtype) for peer in self._comm.peers]
            self._comm.exchange([0])  # everybody has opened everybody's
        finally:
            os.close(descriptor)
        return everyone[self._comm.shard], everyone

    def meet(self, line: int = 0) -> Finish | None:
        token, tokens = torch.zeros(1), torch.zeros(self._comm.num_shards)
        if line == GRADIENTS:  # in the order of reductions, which is not that of gathers
            return self._comm.reduce_scatter(token, tokens)
        return self._comm.all_gather(tokens, token)


class SymmetricPool:
    """Memory of the GPUs of one machine, each mapped by all of its ranks, as PyTorch's symmetric memory. It comes from
    the driver: torch.cuda's counters of allocated memory do not see it."""

    def __init__(self, group: Any, device: torch.device) -> None:
        # PyTorch's module for it is new and has no stable name yet.
        import torch.distributed._symmetric_memory as symmetric

        self.held_bytes = 0
        self._memory = symmetric
        self._group = group
        self._device = device
        self._num_ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._handles: list[Any] = []  # memory of other ranks is mapped as long as these live
        self._left: Sequence[Tensor] = self._open(256)
        """What is left of the newest allocation, on every rank."""

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
        nbytes = -(-numel * dtype.itemsize // 256) * 256
        if self._left[0].numel() < nbytes:
            self._left = self._open(max(nbytes, _CHUNK_BYTES))
        everyone = [part[: numel * dtype.itemsize].view(dtype) for part in self._left]
        self._left = [part[nbytes:] for part in self._left]
        return everyone[self._rank], everyone

    def meet(self, line: int = 0) -> Finish | None:
        self._handles[0].barrier(channel=line, timeout_ms=_PATIENCE_MS)
        return None

    def _open(self, nbytes: int) -> Sequence[Tensor]:
        """New memory of every rank, by rank."""
        self.held_bytes += nbytes
        own = self._memory.empty(nbytes, dtype=torch.uint8, device=self._device)
        handle = self._memory.rendezvous(own, self._group)
        self._handles.append(handle)
        return [
            own if rank == self._rank else handle.get_buffer(rank, (nbytes,), torch.uint8)
            for rank in range(self._num_ranks)
        ]
