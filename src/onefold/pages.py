"""Owns page-locked host memory in exact sizes (torch's own allocator rounds up to powers of two), and the room that
saves copy into. Memory is first found, by several threads, and then locked.
"""

import atexit
import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol
from weakref import finalize

import torch
from torch import Tensor

from onefold.errors import HostMemoryError
from onefold.streams import Ticket

PIECE_BYTES = 2**24
"""What a thread asks the system for at once, and what is copied at once."""


class Pages:
    """Host memory, none of which is locked at first; given back when the last tensor in it is gone. Processes that are
    forked do not have it.

    Attributes:
        whole: all of it, [nbytes] of uint8, zeros.
    """

    def __init__(self, nbytes: int) -> None:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to find, to lock and to look up in every update
        pages.madvise(mmap.MADV_DONTFORK)  # a fork (of a loader's workers) would copy all that is locked
        window = memoryview(pages)
        self.whole = torch.frombuffer(window, dtype=torch.uint8)
        self._unlocks: list[Callable[[], object]] = []
        # The window dies with the tensor's storage; the pages, held here, outlive their registrations. Copies may still
        # be under way at exit.
        finalize(window, _let_go, self._unlocks, pages, os.getpid()).atexit = False

    def find(self, num_threads: int) -> "Sequence[Future[Tensor]]":
        """Have threads find all of it; returns one future for every `PIECE_BYTES` bytes, in order."""
        # The system finds pages, full of zeros, as they are first written to.
        parts = [part[:: mmap.PAGESIZE] for part in self.whole.split(PIECE_BYTES)]
        pool = ThreadPoolExecutor(num_threads, "onefold-pages")
        found = [pool.submit(part.zero_) for part in parts]
        pool.shutdown(wait=False)  # its threads go when all is found
        return found

    def lock(self, start: int, stop: int) -> None:
        """Lock bytes [start, stop). No copy may then go beyond one of these ranges.

        Raises:
            HostMemoryError: the system refuses.
        """
        runtime, address = torch.cuda.cudart(), self.whole.data_ptr() + start
        failed = int(runtime.cudaHostRegister(address, stop - start, 0))
        if failed:
            with suppress(RuntimeError):  # CUDA tells its next kernel of it, too: not the script's
                torch.zeros(1, device="cuda").add_(1)
            raise HostMemoryError(
                f"the system refused to lock {stop - start:,} bytes of host memory (CUDA error {failed}); raise its "
                "limit (ulimit -l unlimited), or use a plan that keeps less on the host"
            )
        self._unlocks.append(partial(runtime.cudaHostUnregister, address))


def _let_go(unlocks: Sequence[Callable[[], object]], pages: mmap.mmap, owner: int) -> None:
    if os.getpid() != owner:
        atexit.register(len, pages)  # forked: others have its addresses here by now, so it is never unmapped
        return
    for unlock in unlocks:
        unlock()


def pinned(numel: int, dtype: torch.dtype, num_threads: int) -> Tensor:
    """Zeros in locked memory of exactly this size, [numel].

    Raises:
        HostMemoryError: the system refuses to lock so much.
    """
    pages = Pages(numel * dtype.itemsize)
    for found in pages.find(num_threads):
        found.result()
    pages.lock(0, len(pages.whole))
    return pages.whole.view(dtype)


class Way(Protocol):
    """Takes one copy at a time into the memory of a `Room`."""

    def bring(self, launch: Callable[[Tensor], Ticket], target: Tensor) -> None:
        """Have `launch` copy into memory of the target's size (1-D, uint8), and come back when it is in the target."""
        ...


class Room:
    """Host memory for copies, kept for the next save: getting it takes longer than copying.

    Attributes:
        whole: [nbytes] of uint8.
        ways: how copies come into it; several threads may use one each. None takes more than `PIECE_BYTES` at once.
    """

    def __init__(self, nbytes: int, ways: "Sequence[Way]") -> None:
        self.whole = Pages(nbytes).whole if nbytes else torch.empty(0, dtype=torch.uint8)
        self.ways = ways


class StraightWay:
    """For copies by the processor: into the target itself."""

    def bring(self, launch: Callable[[Tensor], Ticket], target: Tensor) -> None:
        launch(target).wait_on_host()


class LockedWay:
    """For copies by a GPU: into locked memory, and on from there by the calling thread, which finds the target's
    memory by writing there. Were all of a room locked, kernels could not be launched while the driver locks it, which
    takes as long as the copies do (docs/log.md).

    Args:
        locked: [PIECE_BYTES] of uint8.
    """

    def __init__(self, locked: Tensor) -> None:
        self._locked = locked

    def bring(self, launch: Callable[[Tensor], Ticket], target: Tensor) -> None:
        part = self._locked[: len(target)]
        launch(part).wait_on_host()
        ctypes.memmove(target.data_ptr(), part.data_ptr(), len(target))  # on this thread alone, without Python's lock
