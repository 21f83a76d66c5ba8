"""Owns page-locked host memory in exact sizes (torch's own allocator rounds up to powers of two), and the room that
saves copy into. Memory is first found, by several threads, and then locked: as a whole, or in pieces beside other work.
"""

import atexit
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

PIECE_BYTES = 2**26
"""What a thread asks the system for at once, and what is copied at once."""
_LOCKED_AT_ONCE = 4 * PIECE_BYTES
"""The driver locks no more in one call: a thread that launches kernels waits meanwhile."""


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


class Room(Protocol):
    """Host memory for copies, kept for the next save: getting it takes longer than copying."""

    whole: Tensor
    """[nbytes] of uint8."""

    def reach(self, stop: int) -> None:
        """Come back when bytes before `stop` can be copied into at full speed. A copy stays within one of the pieces of
        `PIECE_BYTES`.

        Raises:
            HostMemoryError: the system refuses to lock them.
        """
        ...


class PlainRoom:
    """Where the computation is on the host itself."""

    def __init__(self, nbytes: int) -> None:
        self.whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def reach(self, stop: int) -> None:
        pass


class LockedRoom:
    """Locked piece by piece as it is first reached, while threads find memory for the pieces after."""

    def __init__(self, nbytes: int, num_threads: int) -> None:
        self._pages = Pages(nbytes)
        self.whole = self._pages.whole
        self._found = self._pages.find(num_threads)  # now: no thread pool takes work once the main thread has ended
        self._locked = 0

    def reach(self, stop: int) -> None:
        while self._locked < stop:
            end = min(self._locked + _LOCKED_AT_ONCE, len(self.whole))
            for found in self._found[self._locked // PIECE_BYTES : -(-end // PIECE_BYTES)]:
                found.result()
            self._pages.lock(self._locked, end)
            self._locked = end
