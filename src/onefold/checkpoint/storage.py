"""Owns the files of a checkpoint: what each rank writes, what holds all of it together, and how it is read.

    step-100/
        manifest.json       every file with its size and checksum; written last
        checkpoint.json.gz  tensors (shape, dtype, which box lies where) and everything else that all ranks share
        rank-00000.json.gz  what is of one rank alone: random numbers, its data loader
        rank-00000.data     the elements that one rank wrote, range after range, raw
        rank-00000.sums     a checksum for each block of that, see [Note: Blocks]

Ranks write and read ranges of flattened tensors. In the files a range is written down as the rectangular boxes that it
is made of, which lie one after another. No file is ever executed or unpickled.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from onefold.checkpoint.bar import Progress
from onefold.checkpoint.codec import dtype_name, dtype_of, packed, unpacked
from onefold.checkpoint.contents import Contents
from onefold.checkpoint.entries import Entry
from onefold.checkpoint.files import BlockReader, BlockWriter, Files, block_bytes, named, read_file, write_file
from onefold.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    OWN,
    SHARED,
    VERSION,
    FileRecord,
    Manifest,
    file_of,
    manifest_text,
    read_manifest,
    understood,
)
from onefold.errors import CheckpointError
from onefold.plan.layout import boxes

_PIECE_NUMEL = 2**19
_BY_SLICE = ("scalars", "states")
"""What of an optimizer a rank knows for its slices only."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote."""

    files: Sequence[FileRecord]
    tensors: Mapping[str, Any]
    """As they stand in the checkpoint: dtype and shape by name, and where the boxes that this rank wrote lie."""
    optimizer: Mapping[str, Any]
    """What this rank knows of its slices' state beside tensors; empty without an optimizer."""


def write_part(directory: Path, rank: int, contents: Contents, files: Files, progress: Progress) -> Part:
    """Write one rank's part into the directory.

    Raises:
        CheckpointError: it cannot be written.
    """
    name, tensors = file_of(rank, "data"), dict[str, Any]()
    total, count = 0, 0
    for entry in contents.entries:
        kind = {"dtype": dtype_name(entry.dtype), "shape": list(entry.shape)}
        chunks = tensors.setdefault(entry.key, {**kind, "chunks": []})["chunks"]
        for box in boxes(entry.shape, entry.start, entry.stop):
            chunks.append([list(box.offsets), list(box.sizes), name, total])
            total, count = total + prod(box.sizes) * entry.dtype.itemsize, count + 1
    block = block_bytes(total, count)
    with closing(BlockWriter(files, directory / name, block)) as writer:
        for piece in _pieces(contents.entries):
            writer.append(piece)
            progress(piece.nbytes)
        table = writer.finish()
        if writer.nbytes != total:
            raise CheckpointError(f"{directory / name} took {writer.nbytes} bytes, and {total} were announced")
    records = [
        FileRecord(name, total, None, block),
        _written(files, directory, file_of(rank, "sums"), table),
        _written(files, directory, file_of(rank, OWN), packed(contents.own)),
    ]
    optimizer = contents.shared["optimizer"]
    return Part(records, tensors, {} if optimizer is None else {what: optimizer[what] for what in _BY_SLICE})


def _pieces(entries: Iterable[Entry]) -> Iterator[Tensor]:
    """The values of entries, one small 1-D piece after another, where they rest: joining exact weights takes several
    times a piece."""
    for entry in entries:
        for first in range(entry.start, entry.stop, _PIECE_NUMEL):
            yield entry.read(first, min(first + _PIECE_NUMEL, entry.stop))


def _written(files: Files, directory: Path, name: str, data: bytes) -> FileRecord:
    write_file(files, directory / name, data)
    return FileRecord(name, len(data), crc32(data))


def hold_together(directory: Path, shared: Mapping[str, Any], parts: Sequence[Part], files: Files) -> None:
    """Write what makes a checkpoint of all ranks' parts, last of all the manifest; it is on the disk then.

    Args:
        shared: what all ranks share beside tensors.
    """
    text = {"format": FORMAT, "version": VERSION, **shared, "tensors": _together(parts)}
    if shared["optimizer"] is not None:
        merged = {what: {k: v for part in parts for k, v in part.optimizer[what].items()} for what in _BY_SLICE}
        text["optimizer"] = {**shared["optimizer"], **merged}
    records = [record for part in parts for record in part.files]
    records.append(_written(files, directory, SHARED, packed(text)))
    manifest = Manifest(shared["saved_ns"], {record.name: record for record in records})
    _written(files, directory, MANIFEST, manifest_text(manifest))
    with named(directory, "written"):
        files.sync_directory(directory)


def _together(parts: Sequence[Part]) -> dict[str, Any]:
    """Tensors by name, each with the boxes that ranks wrote of it."""
    tensors: dict[str, Any] = {}
    for key, theirs in (item for part in parts for item in part.tensors.items()):
        tensor = tensors.setdefault(key, {**theirs, "chunks": []})
        if any(tensor[what] != theirs[what] for what in ("dtype", "shape")):
            one, other = (f"{each['dtype']}{each['shape']}" for each in (tensor, theirs))
            raise CheckpointError(f"{key!r} is {one} on one rank, and {other} on another")
        tensor["chunks"] += theirs["chunks"]
    return tensors


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, stop) of a flattened tensor, which lie in a file from byte `place` on."""

    start: int
    stop: int
    file: str
    place: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor of a checkpoint, and the runs that make it up, in order."""

    dtype: torch.dtype
    shape: torch.Size
    runs: Sequence[Run]


class Reader:
    """Reads from a checkpoint on disk. What it gives out was checked.

    Attributes:
        shared: what all ranks share beside tensors.
        tensors: those that have elements, by name.
    Raises:
        CheckpointError: the directory is not a whole checkpoint.
    """

    def __init__(self, directory: Path, files: Files | None = None) -> None:
        self.directory = directory
        self._files = Files() if files is None else files
        self._open: dict[str, BlockReader] = {}
        self._records = read_manifest(directory).files
        self.shared = self._json(SHARED)
        self.tensors: Mapping[str, Saved] = understood(directory / SHARED, self._parse)

    @property
    def num_ranks(self) -> int:
        return understood(self.directory / SHARED, lambda: int(self.shared["num_ranks"]))

    def own(self, rank: int) -> dict[str, Any]:
        """What a rank kept for itself."""
        return self._json(file_of(rank, OWN))

    def check_sizes(self) -> None:
        """Compare every file's size with the manifest."""
        for name, record in self._records.items():
            path = self.directory / name
            with named(path, "read"):
                found = path.stat().st_size if path.exists() else None
            if found != record.nbytes:
                raise CheckpointError(
                    f"{path} is damaged: it {'is missing' if found is None else f'has {found} bytes'}, and was written "
                    f"with {record.nbytes}"
                )

    def verify(self) -> None:
        """Read every byte."""
        self.check_sizes()
        for name, record in self._records.items():
            if record.checksum is not None:
                self._bytes(name)
            else:
                self._data(name).verify()

    def _json(self, name: str) -> dict[str, Any]:
        value = understood(self.directory / name, lambda: unpacked(self._bytes(name)))
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.directory / name} holds no JSON object")
        return value

    def _record(self, name: str) -> FileRecord:
        if name not in self._records:
            raise CheckpointError(f"{self.directory / MANIFEST} lists no {name}")
        return self._records[name]

    def _bytes(self, name: str) -> bytes:
        path, record = self.directory / name, self._record(name)
        data = read_file(self._files, path)
        if len(data) != record.nbytes or crc32(data) != record.checksum:
            raise CheckpointError(f"{path} is damaged: it is not what was written")
        return data

    def _parse(self) -> dict[str, Saved]:
        found = {}
        for key, tensor in self.shared["tensors"].items():
            dtype, shape = dtype_of(tensor["dtype"]), torch.Size(tensor["shape"])
            runs = sorted((_run(key, shape, *chunk) for chunk in tensor["chunks"]), key=lambda run: run.start)
            for run in runs:
                last = run.place + (run.stop - run.start) * dtype.itemsize
                if type(run.place) is not int or not 0 <= run.place <= last <= self._records[run.file].nbytes:
                    raise ValueError(f"{key!r} lies outside of {run.file}")
            edges = [0, *(run.stop for run in runs)]
            if [run.start for run in runs] != edges[:-1] or edges[-1] != prod(shape):
                raise ValueError(f"the parts of {key!r} do not make up its shape {tuple(shape)}")
            found[key] = Saved(dtype, shape, list(_joined(runs, dtype.itemsize)))
        return found

    def fill(self, entries: Iterable[Entry], progress: Progress) -> None:
        """Let each entry have its elements; files are read from front to back.

        Raises:
            CheckpointError: a tensor is not in the checkpoint, or has another shape; or what is read is damaged.
        """
        wanted: list[tuple[Entry, Run]] = []
        for entry in entries:
            saved = self.tensors.get(entry.key)
            if saved is None:
                raise CheckpointError(f"{self.directory} holds no {entry.key!r}")
            if saved.shape != entry.shape:
                raise CheckpointError(
                    f"{entry.key!r} has shape {tuple(saved.shape)} in the checkpoint and {entry.shape} in the model"
                )
            wanted += ((entry, part) for part in _cut(saved, entry.start, entry.stop))
        for entry, part in sorted(wanted, key=lambda each: (each[1].file, each[1].place)):
            values = torch.empty(part.stop - part.start, dtype=self.tensors[entry.key].dtype)
            self._data(part.file).read(part.place, values, progress)
            entry.write(part.start, values.to(entry.dtype))

    def tensor(self, key: str) -> Tensor:
        """One whole tensor, on the host.

        Raises:
            CheckpointError: there is none of that name.
        """
        dtype = self.dtype(key)
        if key not in self.tensors:
            return torch.empty(self.shared["empty"][key][0], dtype=dtype)
        whole = torch.empty(self.tensors[key].shape, dtype=dtype)
        for run in self.tensors[key].runs:
            self._data(run.file).read(run.place, whole.view(-1)[run.start : run.stop], lambda _: None)
        return whole

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of one tensor, which may have no elements.

        Raises:
            CheckpointError: there is none of that name.
        """
        if key in self.tensors:
            return self.tensors[key].dtype
        if key not in self.shared["empty"]:
            raise CheckpointError(f"{self.directory} holds no {key!r}")
        return dtype_of(self.shared["empty"][key][1])

    def _data(self, name: str) -> BlockReader:
        if name not in self._open:
            path, record = self.directory / name, self._record(name)
            if record.block is None:
                raise CheckpointError(f"{path} is no file of tensors, says {self.directory / MANIFEST}")
            table = self._bytes(str(Path(name).with_suffix(".sums")))
            self._open[name] = BlockReader(self._files, path, record.nbytes, record.block, table)
        return self._open[name]

    def close(self) -> None:
        """Let go of files; what is read afterwards opens them again."""
        for reader in self._open.values():
            reader.close()
        self._open.clear()


def _run(key: str, shape: Sequence[int], offsets: Any, sizes: Any, file: str, place: int) -> Run:
    """A box as the run of elements that it has to be."""
    corner, sides = torch.Size(offsets), torch.Size(sizes)
    ends = [first + size for first, size in zip(corner, sides, strict=True)]
    if min((*corner, 0)) < 0 or any(end > size for end, size in zip(ends, shape, strict=True)):
        raise ValueError(f"a part of {key!r} lies outside of its shape {tuple(shape)}")
    first, last = _flat_index(corner, shape), _flat_index([end - 1 for end in ends], shape)
    if min((*sides, 1)) < 1 or last - first + 1 != prod(sides):
        raise ValueError(f"a part of {key!r} is no run of elements")
    return Run(first, last + 1, file, place)


def _flat_index(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """The place of an element in row-major order."""
    index = 0
    for offset, size in zip(offsets, shape, strict=True):
        index = index * size + offset
    return index


def _joined(runs: Sequence[Run], itemsize: int) -> Iterator[Run]:
    """The same elements in fewer runs: one for boxes that lie one after another."""
    current = runs[0]
    for run in runs[1:]:
        if (run.file, run.place) == (current.file, current.place + (run.start - current.start) * itemsize):
            current = Run(current.start, run.stop, run.file, current.place)
        else:
            yield current
            current = run
    yield current


def _cut(saved: Saved, start: int, stop: int) -> Iterator[Run]:
    """Elements [start, stop) of a tensor, where they lie."""
    for run in saved.runs:
        first, last = max(start, run.start), min(stop, run.stop)
        if first < last:
            yield Run(first, last, run.file, run.place + (first - run.start) * saved.dtype.itemsize)
