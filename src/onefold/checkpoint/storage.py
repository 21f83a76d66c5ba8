"""Owns the files of a checkpoint, as torch.distributed.checkpoint reads and writes them.

    step-100/
        manifest.json       every file with its size and checksum; written last
        checkpoint.json.gz  tensors (shape, dtype, which box lies where) and everything else that all ranks share
        rank-00000.json.gz  what is of one rank alone: random numbers, its data loader
        rank-00000.data     the boxes that one rank wrote, one after another, raw
        rank-00000.sums     a checksum for each block of that, see [Note: Blocks]

No file is ever executed or unpickled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from onefold.checkpoint.codec import dtype_name, dtype_of, packed, unpacked
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
from onefold.checkpoint.plans import EntrySavePlanner, flat_index
from onefold.errors import CheckpointError

Progress = Callable[[int], None]
"""Told how many more bytes are done."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one box lies."""

    file: str
    start: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote: its boxes of tensors, where they lie, and its files."""

    metadata: Metadata
    results: Sequence[WriteResult]


class Writer(StorageWriter):
    """Writes one rank's part of a checkpoint into `directory`.

    Args:
        own: what is of this rank alone.

    Attributes:
        parts: what was written: one part, once all of it is on the disk.
    """

    def __init__(self, directory: Path, rank: int, own: Mapping[str, Any], files: Files, progress: Progress) -> None:
        self._directory = directory
        self._rank = rank
        self._own = own
        self._files = files
        self._progress = progress
        self.parts: list[Part] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        """One writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The directory is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not isinstance(planner, EntrySavePlanner):
            raise TypeError(f"{type(planner).__name__} gives whole tensors; write with an EntrySavePlanner")
        name, block = file_of(self._rank, "data"), block_bytes(sum(map(_nbytes, plan.items)), len(plan.items))
        writer, results = BlockWriter(self._files, self._directory / name, block), []
        try:
            for item in plan.items:
                start = writer.nbytes
                for piece in planner.pieces(item):
                    writer.append(piece)
                    self._progress(piece.nbytes)
                sizes = () if item.tensor_data is None else tuple(item.tensor_data.chunk.sizes)
                results.append(self._result(item.index, Place(name, start, sizes), writer.nbytes - start))
            table = writer.finish()
        finally:
            writer.close()
        records = [FileRecord(name, writer.nbytes, None, block), self._write(file_of(self._rank, "sums"), table)]
        records.append(self._write(file_of(self._rank, OWN), packed(self._own)))
        results += [self._result(MetadataIndex(f"#{record.name}"), record, record.nbytes) for record in records]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _result(self, index: MetadataIndex, where: Place | FileRecord, nbytes: int) -> WriteResult:
        return WriteResult(index=index, size_in_bytes=nbytes, storage_data=where)

    def _write(self, name: str, data: bytes) -> FileRecord:
        return _written(self._files, self._directory, name, data)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.parts.append(Part(metadata, [result for each in results for result in each]))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def hold_together(directory: Path, shared: Mapping[str, Any], parts: Sequence[Part], files: Files) -> None:
    """Write what makes a checkpoint of all ranks' parts, last of all the manifest; it is on the disk then.

    Args:
        shared: what all ranks share beside tensors.
    """
    every = [result for part in parts for result in part.results]
    records = [result.storage_data for result in every if isinstance(result.storage_data, FileRecord)]
    places = {result.index: result.storage_data for result in every if isinstance(result.storage_data, Place)}
    text = {"format": FORMAT, "version": VERSION, **shared, "tensors": _index(parts, places)}
    records.append(_written(files, directory, SHARED, packed(text)))
    manifest = Manifest(shared["saved_ns"], {record.name: record for record in records})
    _written(files, directory, MANIFEST, manifest_text(manifest))
    with named(directory, "written"):
        files.sync_directory(directory)


def _written(files: Files, directory: Path, name: str, data: bytes) -> FileRecord:
    write_file(files, directory / name, data)
    return FileRecord(name, len(data), crc32(data))


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _index(parts: Sequence[Part], places: Mapping[MetadataIndex, Place]) -> dict[str, Any]:
    """Tensors by name, each with the boxes that ranks wrote of it."""
    tensors: dict[str, Any] = {}
    for key, stored in (item for part in parts for item in part.metadata.state_dict_metadata.items()):
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{key!r} is no tensor")
        kind = {"dtype": dtype_name(stored.properties.dtype), "shape": list(stored.size)}
        tensor = tensors.setdefault(key, {**kind, "chunks": []})
        if any(tensor[what] != value for what, value in kind.items()):
            raise CheckpointError(f"{key!r} is {kind} on one rank, and {tensor['dtype']}{tensor['shape']} on another")
        for chunk in stored.chunks:
            place = places[MetadataIndex(key, chunk.offsets)]
            tensor["chunks"].append([list(chunk.offsets), list(chunk.sizes), place.file, place.start])
    return tensors


class Reader(StorageReader):
    """Reads from a checkpoint on disk. What it gives out was checked.

    Raises:
        CheckpointError: the directory is not a whole checkpoint.
    """

    def __init__(self, directory: Path, files: Files | None = None, progress: Progress = lambda _: None) -> None:
        self.directory = directory
        self._files = Files() if files is None else files
        self.progress = progress
        self._open: dict[str, BlockReader] = {}
        self._read_before = 0
        self._records = read_manifest(directory).files
        self.shared = self._json(SHARED)
        self._metadata: Metadata = understood(directory / SHARED, lambda: self._parse(self.shared["tensors"]))

    @property
    def read_bytes(self) -> int:
        """Bytes of data files read so far."""
        return self._read_before + sum(reader.read_bytes for reader in self._open.values())

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

    def _parse(self, tensors: Mapping[str, Any]) -> Metadata:
        found: dict[str, Any] = {}
        places: dict[MetadataIndex, Place] = {}
        for key, tensor in tensors.items():
            dtype, shape, chunks = dtype_of(tensor["dtype"]), torch.Size(tensor["shape"]), []
            for offsets, sizes, file, start in tensor["chunks"]:
                chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
                end = start + prod(sizes) * dtype.itemsize
                if type(start) is not int or not 0 <= start <= end <= self._records[file].nbytes:
                    raise ValueError(f"{key!r} lies outside of {file}")
                places[MetadataIndex(key, chunks[-1].offsets)] = Place(file, start, tuple(sizes))
            _check_covered(key, shape, chunks)
            found[key] = TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=shape, chunks=chunks)
        return Metadata(found, storage_data=places)

    def reset(self, checkpoint_id: Any = None) -> None:
        """One reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Everything is known from the start."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        places = self._metadata.storage_data
        return LoadPlan(sorted(plan.items, key=lambda item: _order(places[item.storage_index], item)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target, index = planner.resolve_tensor(item), item.storage_index
            # Parts that are written and parts that are wanted are runs of the flattened tensor; so is what they share.
            first = flat_index(item.storage_offsets, self._metadata.storage_data[index].sizes)
            self._read(index.fqn, index.offset or torch.Size(), first, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def tensor(self, key: str) -> torch.Tensor:
        """One whole tensor, on the host.

        Raises:
            CheckpointError: there is none of that name.
        """
        dtype, stored = self.dtype(key), self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            return torch.empty(self.shared["empty"][key][0], dtype=dtype)
        whole = torch.empty(stored.size, dtype=dtype)
        for chunk in stored.chunks:
            flat = whole.reshape(-1)
            start = flat_index(chunk.offsets, stored.size)
            self._read(key, chunk.offsets, 0, flat[start : start + prod(chunk.sizes)])
        return whole

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of one tensor, which may have no elements.

        Raises:
            CheckpointError: there is none of that name.
        """
        stored = self._metadata.state_dict_metadata.get(key)
        if isinstance(stored, TensorStorageMetadata):
            return stored.properties.dtype
        if key not in self.shared["empty"]:
            raise CheckpointError(f"{self.directory} holds no {key!r}")
        return dtype_of(self.shared["empty"][key][1])

    def keys(self) -> list[str]:
        """Names of all tensors that have elements."""
        return list(self._metadata.state_dict_metadata)

    def _read(self, key: str, offset: torch.Size, first: int, into: torch.Tensor) -> None:
        if into.numel():
            place = self._metadata.storage_data[MetadataIndex(key, offset)]
            self._data(place.file).read(place.start + first * into.element_size(), into, self.progress)

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
        self._read_before = self.read_bytes
        for reader in self._open.values():
            reader.close()
        self._open.clear()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _check_covered(key: str, shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> None:
    """Each chunk has to be a run of the flattened tensor (reading relies on it), and all together the tensor."""
    runs = []
    for chunk in chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if min((*chunk.offsets, 0)) < 0 or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"a part of {key!r} lies outside of its shape {tuple(shape)}")
        first, last = flat_index(chunk.offsets, shape), flat_index([end - 1 for end in ends], shape)
        if min((*chunk.sizes, 1)) < 1 or last - first + 1 != prod(chunk.sizes):
            raise ValueError(f"a part of {key!r} is no run of elements")
        runs.append((first, last + 1))
    runs.sort()
    edges = [0, *(stop for _, stop in runs)]
    if [start for start, _ in runs] != edges[:-1] or edges[-1] != prod(shape):
        raise ValueError(f"the parts of {key!r} do not make up its shape {tuple(shape)}")


def _order(place: Place, item: ReadItem) -> tuple[str, int, tuple[int, ...]]:
    return place.file, place.start, tuple(item.storage_offsets)
