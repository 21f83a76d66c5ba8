"""Owns the files of a checkpoint, as torch.distributed.checkpoint reads and writes them.

    step-100/
        manifest.json       every file with its size and checksum; written last
        checkpoint.json     tensors (shape, dtype, which box lies where) and everything else that all ranks share
        rank-00000.json     what is of one rank alone: random numbers, its data loader
        rank-00000.data     the boxes that one rank wrote, one after another, raw
        rank-00000.sums     a checksum for each block of that, see [Note: Blocks]

No file is ever executed or unpickled.
"""

import json
from collections.abc import Callable, Mapping
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from onefold.checkpoint.codec import dtype_name, dtype_of
from onefold.checkpoint.files import BlockReader, BlockWriter, Files, write_file
from onefold.checkpoint.plans import flat_index
from onefold.errors import CheckpointError

FORMAT, VERSION = "onefold checkpoint", 1
MANIFEST, SHARED = "manifest.json", "checkpoint.json"

Progress = Callable[[int], None]
"""Told how many more bytes are done."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the checkpoint, in the manifest."""

    name: str
    nbytes: int
    checksum: int | None
    """CRC-32 of all of it; None where blocks have checksums of their own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one box lies."""

    file: str
    start: int
    sizes: tuple[int, ...]


def file_of(rank: int, kind: str) -> str:
    return f"rank-{rank:05d}.{kind}"


class Writer(StorageWriter):
    """Writes one rank's part of a checkpoint into `directory`, and, on rank 0, what holds it together.

    Args:
        shared: what all ranks share beside tensors, for rank 0 to write.
        own: what is of this rank alone.
        seal: called on rank 0 once every file is on the disk.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        seal: Callable[[], None],
        files: Files,
        progress: Progress,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._shared = shared
        self._own = own
        self._seal = seal
        self._files = files
        self._progress = progress

    def reset(self, checkpoint_id: Any = None) -> None:
        """One writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The directory is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = file_of(self._rank, "data")
        writer, results = BlockWriter(self._files, self._directory / name), []
        try:
            for item in plan.items:
                values: Any = planner.resolve_data(item)
                start = writer.append(values)
                sizes = () if item.tensor_data is None else tuple(item.tensor_data.chunk.sizes)
                results.append(self._result(item.index, Place(name, start, sizes), values.nbytes))
                self._progress(values.nbytes)
            table = writer.finish()
        finally:
            writer.close()
        records = [FileRecord(name, writer.nbytes, None), self._write(file_of(self._rank, "sums"), table)]
        records.append(self._write(file_of(self._rank, "json"), json.dumps(self._own).encode()))
        results += [self._result(MetadataIndex(f"#{record.name}"), record, record.nbytes) for record in records]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _result(self, index: MetadataIndex, where: Place | FileRecord, nbytes: int) -> WriteResult:
        return WriteResult(index=index, size_in_bytes=nbytes, storage_data=where)

    def _write(self, name: str, data: bytes) -> FileRecord:
        write_file(self._files, self._directory / name, data)
        return FileRecord(name, len(data), crc32(data))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        every = [result for of_rank in results for result in of_rank]
        records = [result.storage_data for result in every if isinstance(result.storage_data, FileRecord)]
        places = {result.index: result.storage_data for result in every if isinstance(result.storage_data, Place)}
        shared = {"format": FORMAT, "version": VERSION, **self._shared, "tensors": _index(metadata, places)}
        records.append(self._write(SHARED, json.dumps(shared).encode()))
        files = {record.name: {"bytes": record.nbytes, "crc32": record.checksum} for record in records}
        body = {"format": FORMAT, "version": VERSION, "saved_ns": self._shared["saved_ns"], "files": files}
        self._write(MANIFEST, json.dumps({**body, "crc32": _checksum(body)}, indent=1).encode())
        self._files.sync_directory(self._directory)
        self._seal()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _index(metadata: Metadata, places: Mapping[MetadataIndex, Place]) -> dict[str, Any]:
    tensors = {}
    for key, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{key!r} is no tensor")
        chunks = []
        for chunk in stored.chunks:
            place = places[MetadataIndex(key, chunk.offsets)]
            chunks.append([list(chunk.offsets), list(chunk.sizes), place.file, place.start])
        tensors[key] = {"dtype": dtype_name(stored.properties.dtype), "shape": list(stored.size), "chunks": chunks}
    return tensors


def _checksum(body: Mapping[str, Any]) -> int:
    return crc32(json.dumps(body, sort_keys=True).encode())


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
        manifest = read_manifest(directory)
        self._sizes: dict[str, int] = {name: record["bytes"] for name, record in manifest["files"].items()}
        self._sums: dict[str, int | None] = {name: record["crc32"] for name, record in manifest["files"].items()}
        self.shared = self._json(SHARED)
        self._metadata: Metadata = _understood(directory, lambda: self._parse(self.shared["tensors"]))

    @property
    def read_bytes(self) -> int:
        """Bytes of data files read so far."""
        return self._read_before + sum(reader.read_bytes for reader in self._open.values())

    @property
    def num_ranks(self) -> int:
        return int(self.shared["num_ranks"])

    def own(self, rank: int) -> dict[str, Any]:
        """What a rank kept for itself."""
        return self._json(file_of(rank, "json"))

    def check_sizes(self) -> None:
        """Compare every file's size with the manifest."""
        for name, size in self._sizes.items():
            path = self.directory / name
            found = path.stat().st_size if path.exists() else None
            if found != size:
                raise CheckpointError(
                    f"{path} is {'missing' if found is None else f'{found} bytes long'}, and was written with {size}"
                )

    def verify(self) -> None:
        """Read every byte."""
        self.check_sizes()
        for name, checksum in self._sums.items():
            if checksum is not None:
                self._bytes(name)
            else:
                self._data(name).verify()

    def _json(self, name: str) -> dict[str, Any]:
        value = _understood(self.directory / name, lambda: json.loads(self._bytes(name)))
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.directory / name} holds no JSON object")
        return value

    def _bytes(self, name: str) -> bytes:
        path = self.directory / name
        if name not in self._sums:
            raise CheckpointError(f"{self.directory / MANIFEST} lists no {name}")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if len(data) != self._sizes[name] or crc32(data) != self._sums[name]:
            raise CheckpointError(f"{path} is damaged: it is not what was written")
        return data

    def _parse(self, tensors: Mapping[str, Any]) -> Metadata:
        found: dict[str, Any] = {}
        places: dict[MetadataIndex, Place] = {}
        for key, tensor in tensors.items():
            dtype, shape, chunks = dtype_of(tensor["dtype"]), torch.Size(tensor["shape"]), []
            for offsets, sizes, file, start in tensor["chunks"]:
                chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
                nbytes = prod(sizes) * dtype.itemsize
                if not 0 <= start <= start + nbytes <= self._sizes[file]:
                    raise ValueError(f"{key!r} lies outside of {file}")
                places[MetadataIndex(key, chunks[-1].offsets)] = Place(file, start, tuple(sizes))
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
            target = planner.resolve_tensor(item)
            target.copy_(self._box(item).reshape(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def tensor(self, key: str) -> torch.Tensor:
        """One whole tensor, on the host.

        Raises:
            CheckpointError: there is none of that name.
        """
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self.directory} holds no {key!r}")
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            flat = whole.reshape(-1)
            start = flat_index(chunk.offsets, stored.size)
            self._read(key, chunk.offsets, 0, flat[start : start + prod(chunk.sizes)])
        return whole

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self._metadata.state_dict_metadata)

    def _box(self, item: ReadItem) -> torch.Tensor:
        """The values of a box within a stored one, 1-D if it is contiguous there."""
        index = item.storage_index
        sizes = self._metadata.storage_data[index].sizes
        stored: Any = self._metadata.state_dict_metadata[index.fqn]
        first = flat_index(item.storage_offsets, sizes)
        last = flat_index([o + n - 1 for o, n in zip(item.storage_offsets, item.lengths, strict=True)], sizes)
        span = torch.empty(last - first + 1, dtype=stored.properties.dtype)
        self._read(index.fqn, index.offset or torch.Size(), first, span)
        if span.numel() == prod(item.lengths):
            return span
        strides = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        return span.as_strided(tuple(item.lengths), strides)

    def _read(self, key: str, offset: torch.Size, first: int, into: torch.Tensor) -> None:
        if into.numel():
            place = self._metadata.storage_data[MetadataIndex(key, offset)]
            self._data(place.file).read(place.start + first * into.element_size(), into, self.progress)

    def _data(self, name: str) -> BlockReader:
        if name not in self._open:
            try:
                table = self._bytes(str(Path(name).with_suffix(".sums")))
                self._open[name] = BlockReader(self._files, self.directory / name, self._sizes[name], table)
            except OSError as error:
                raise CheckpointError(f"{self.directory / name} cannot be read: {error}") from error
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


def _order(place: Place, item: ReadItem) -> tuple[str, int, tuple[int, ...]]:
    return place.file, place.start, tuple(item.storage_offsets)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked by itself.

    Raises:
        CheckpointError: there is none, or it is damaged, or of a version that this one cannot read.
    """
    path = directory / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{directory} is not a whole checkpoint: {MANIFEST} cannot be read ({error})") from error

    def parse() -> dict[str, Any]:
        body = json.loads(text)
        checksum = body.pop("crc32")
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']!r}")
        if body["version"] > VERSION:
            raise CheckpointError(
                f"{directory} is of version {body['version']} of the format, and this Onefold reads up to {VERSION}"
            )
        names = list(body["files"])
        if checksum != _checksum(body) or any(Path(name).name != name for name in names) or SHARED not in names:
            raise ValueError("its checksum is wrong")
        return dict(body)

    manifest: dict[str, Any] = _understood(path, parse)
    return manifest


def _understood(path: Path, parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged, or no file of an Onefold checkpoint: {error!r}") from error
