"""Owns how bytes come to disk and back: every operation on files that can fail, and the checksums of what was written.

[Note: Blocks]
A data file has a checksum for each of its blocks, in a file beside it. So a rank that reads only its slice of a file
checks every byte that it uses, and reads less than two blocks more for each run of bytes that it wants. Runs are
about as long as the tensors in the file; so blocks are as long as a small part of these, within bounds: checksums of
shorter blocks than 1 KiB are more bytes than they spare, and longer blocks than 64 KiB save nothing.
"""

import os
import stat
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO
from zlib import crc32

import torch
from torch import Tensor

from onefold.errors import CheckpointError
from onefold.system.atomic_replace import System

LEAST_BLOCK, MOST_BLOCK = 2**10, 2**16
_BLOCKS_OF_A_TENSOR = 256
AT_ONCE = 2**22
"""Bytes copied, checked and written at once: a multiple of every block."""
_NUM_BUFFERS = 4


class Files(System):
    """The operating system, as far as checkpoints need it. Faults are injected by overriding a method."""

    def create(self, path: Path) -> BinaryIO:
        """A new file, unbuffered; an existing one is an error."""
        return path.open("xb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview, offset: int) -> int:
        """Write at an offset; how many of the bytes were written: at least one. Several threads may do it at once."""
        return os.pwrite(file.fileno(), data, offset)

    def sync(self, file: BinaryIO) -> None:
        """Come back when the bytes are on the disk."""
        os.fsync(file.fileno())

    def read_into(self, file: BinaryIO, data: memoryview) -> int:
        """How many bytes were read: 0 at the end of the file."""
        return file.readinto(data)  # type: ignore[attr-defined,no-any-return]


@contextmanager
def named(path: Path, did: str) -> Iterator[None]:
    """Let what the system says about a file name it: what it says of open ones does not.

    Raises:
        CheckpointError: for an OSError inside.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be {did}: {error.strerror or error}") from error


def write_all(files: Files, file: BinaryIO, data: memoryview, offset: int = 0) -> None:
    """Write all of `data` at an offset; a system may take less at once."""
    while data:
        written = files.write(file, data, offset)
        if not written:
            raise OSError(f"the system wrote nothing of {len(data)} bytes")
        data = data[written:]
        offset += written


def write_file(files: Files, path: Path, data: bytes) -> None:
    """A whole new file, on the disk when this returns.

    Raises:
        CheckpointError: it cannot be written.
    """
    with named(path, "written"), files.create(path) as file:
        write_all(files, file, memoryview(data))
        files.sync(file)


def opened(path: Path) -> BinaryIO:
    """A file to read from, unbuffered. A pipe or a device in its place is an error: one could wait for it for ever."""
    return open(path, "rb", buffering=0, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its other end
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError("it is no regular file")


def read_file(files: Files, path: Path) -> bytes:
    """All of a file.

    Raises:
        CheckpointError: it cannot be read.
    """
    with named(path, "read"), opened(path) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        view = memoryview(data)
        while view and (count := files.read_into(file, view)):
            view = view[count:]
        return bytes(data[: len(data) - len(view)])


def block_bytes(nbytes: int, num_tensors: int) -> int:
    """How long the blocks of a data file are that holds so many bytes of so many tensors: a power of two."""
    wanted = nbytes // max(num_tensors, 1) // _BLOCKS_OF_A_TENSOR
    return min(max(1 << max(wanted.bit_length() - 1, 0), LEAST_BLOCK), MOST_BLOCK)


_Job = tuple["Future[array[int]]", Callable[[], "array[int]"]]


class _Crew:
    """Threads that work off jobs. A ThreadPoolExecutor refuses jobs once the main thread has ended, and a save may go
    on then."""

    def __init__(self, number: int) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [Thread(target=self._serve, name="onefold-write") for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], "array[int]"]) -> "Future[array[int]]":
        future: Future[array[int]] = Future()
        self._jobs.put((future, job))
        return future

    def leave(self) -> None:
        """Come back when every job is done."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)


class BlockWriter:
    """Writes one data file and the checksums of its blocks.

    The caller fills buffers; threads take the checksums, write, and start to bring what was written to the disk: it is
    busy from the first buffer on.
    """

    def __init__(self, files: Files, path: Path, block: int) -> None:
        self._files = files
        self._path = path
        self._block = block
        with named(path, "written"):
            self._file = files.create(path)
        self._crew = _Crew(_NUM_BUFFERS)
        self._buffers: list[bytearray] = []
        self._jobs: list[Future[array[int]]] = []
        self._filled = 0
        self.nbytes = 0

    def append(self, values: Tensor) -> int:
        """Write a 1-D tensor from wherever it is; returns where it begins.

        Raises:
            CheckpointError: what came before cannot be written.
        """
        start = self.nbytes
        raw = values.detach().contiguous().view(torch.uint8) if values.numel() else torch.empty(0, dtype=torch.uint8)
        while raw.numel():
            buffer = torch.frombuffer(self._buffer(len(self._jobs)), dtype=torch.uint8)
            room = min(AT_ONCE - self._filled, raw.numel())
            buffer[self._filled : self._filled + room].copy_(raw[:room])
            self._filled += room
            self.nbytes += room
            raw = raw[room:]
            if self._filled == AT_ONCE:
                self._send()
        return start

    def _buffer(self, number: int) -> bytearray:
        """What the job of this number writes from."""
        if len(self._buffers) <= min(number, _NUM_BUFFERS - 1):
            self._buffers.append(bytearray(AT_ONCE))
        return self._buffers[number % _NUM_BUFFERS]

    def _send(self) -> None:
        """Let a thread have the buffer that is filled; come back when the next one is free."""
        number = len(self._jobs)
        window = memoryview(self._buffer(number))[: self._filled]
        self._jobs.append(self._crew.submit(partial(self._write, window, number * AT_ONCE)))
        self._filled = 0
        if len(self._jobs) >= _NUM_BUFFERS:
            self._jobs[len(self._jobs) - _NUM_BUFFERS].result()

    def _write(self, data: memoryview, offset: int) -> "array[int]":
        checksums = array("I", [crc32(data[at : at + self._block]) for at in range(0, len(data), self._block)])
        with named(self._path, "written"):
            write_all(self._files, self._file, data, offset)
        os.posix_fadvise(self._file.fileno(), offset, len(data), os.POSIX_FADV_DONTNEED)  # starts writing back
        return checksums

    def finish(self) -> bytes:
        """Bring it to the disk; returns the table of checksums, which `BlockReader` wants."""
        if self._filled:
            self._send()
        table = array("I", [checksum for job in self._jobs for checksum in job.result()])
        with named(self._path, "written"):
            self._files.sync(self._file)
        return _little_endian(table).tobytes()

    def close(self) -> None:
        """Let go of the file, finished or not."""
        self._crew.leave()
        self._file.close()


class BlockReader:
    """Reads parts of one data file, and checks them.

    Raises:
        CheckpointError: it cannot be read; (from `read`) a byte is not what was written, or missing.
    """

    def __init__(self, files: Files, path: Path, nbytes: int, block: int, table: bytes) -> None:
        self._files = files
        self._path = path
        self._nbytes = nbytes
        self._block = block
        if len(table) != 4 * -(-nbytes // block):
            raise CheckpointError(f"{path} has {nbytes} bytes and {len(table) // 4} checksums, which do not match")
        self._table = _little_endian(array("I", table))
        with named(path, "read"):
            self._file = opened(path)
        self._last = (-1, bytearray())
        """Where the last block that was read begins, and what is in it: what is wanted next often begins there too."""
        self.read_bytes = 0
        """Bytes read from the disk so far."""

    def read(self, start: int, into: Tensor, progress: Callable[[int], None]) -> None:
        """Fill `into` (1-D, contiguous, on the host) with the bytes of the file from `start` on."""
        target, done = into.view(torch.uint8), 0
        for first, data in self._blocks(start, start + target.numel()):
            low = max(start - first, 0)
            high = min(len(data), start + target.numel() - first)
            target[done : done + high - low].copy_(torch.frombuffer(data, dtype=torch.uint8)[low:high])
            done += high - low
            progress(high - low)

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, bytearray]]:
        """Checked runs of blocks that cover [start, stop), and where each begins."""
        size = self._block
        position = start - start % size
        if position == self._last[0] and position < stop:
            yield self._last
            position += size
        while position < stop:
            end = min(position + AT_ONCE, -(-stop // size) * size, self._nbytes)
            data = bytearray(max(end - position, 0))
            self._fill(position, data)
            view = memoryview(data)
            for block in range(0, len(data), size):
                number = (position + block) // size
                if crc32(view[block : block + size]) != self._table[number]:
                    first = position + block
                    raise CheckpointError(
                        f"{self._path} is damaged: bytes {first} to {first + size} are not what was written"
                    )
            view.release()
            rest = (len(data) - 1) // size * size
            self._last = (position + rest, data[rest:])
            yield position, data
            position = end

    def _fill(self, position: int, data: bytearray) -> None:
        self._file.seek(position)
        view = memoryview(data)
        while view:
            with named(self._path, "read"):
                count = self._files.read_into(self._file, view)
            if not count:
                raise CheckpointError(f"{self._path} is damaged: it ends {len(view)} bytes early")
            self.read_bytes += count
            view = view[count:]

    def verify(self) -> None:
        """Read all of it."""
        for _ in self._blocks(0, self._nbytes):
            pass

    def close(self) -> None:
        self._file.close()


def _little_endian(table: "array[int]") -> "array[int]":
    if array("I", [1]).tobytes()[0] == 0:
        table = array("I", table)
        table.byteswap()
    return table
