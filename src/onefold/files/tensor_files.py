"""Owns directories of safetensors files: writing them tensor by tensor, and reading parts of their tensors.

A directory holds `model.safetensors`, or several files of a bounded size and `model.safetensors.index.json`, which says
which tensor is where. Files are written as a stream, of which one small piece at a time is in memory; they are opened
and checked, and read, by the safetensors package.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onefold.errors import WeightsError
from onefold.plan.layout import Box

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}

_PIECE_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor to be written. `load` returns it whole, of this shape and dtype, on any device; it is called once, in
    the order of the entries, and nothing it returned is kept."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def written_dtype(own: torch.dtype, chosen: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter of dtype `own` is written: `chosen`, but for those that have to keep their own."""
    return own if chosen is None or not own.is_floating_point or own.itemsize == 1 else chosen


def prevailing_dtype(entries: Sequence[Entry]) -> str:
    """The name of the floating-point dtype that most bytes have, which a configuration names as the model's."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.nbytes if entry.dtype.is_floating_point else 0
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def write_files(directory: Path, entries: Sequence[Entry], max_file_bytes: int) -> None:
    """Write `entries` into files of at most `max_file_bytes` of tensors each (a larger tensor has one to itself), and
    the index if there are several. `directory` must be there.

    Raises:
        WeightsError: a file cannot be written, or safetensors knows no such dtype; naming it.
    """
    groups = _cut(entries, max_file_bytes)
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    if len(groups) <= 1:
        names = [SINGLE]
    name = SINGLE
    try:
        for name, group in zip(names, groups, strict=True):
            _write_file(directory / name, group)
        if len(groups) > 1:
            places = {entry.name: name for name, group in zip(names, groups, strict=True) for entry in group}
            total = sum(entry.nbytes for entry in entries)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            name = INDEX
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise WeightsError(f"{directory / name} could not be written: {error.strerror or error}") from error


def _cut(entries: Sequence[Entry], max_file_bytes: int) -> list[list[Entry]]:
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.nbytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    return groups


def _write_file(path: Path, entries: Sequence[Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for entry in sorted(
        entries, key=lambda entry: -entry.dtype.itemsize
    ):  # so that each starts at a multiple of its own
        if entry.dtype not in _DTYPES:
            raise WeightsError(
                f"{entry.name!r} is {entry.dtype}, which safetensors cannot hold; export it by other means"
            )
        starts[entry.name], end = end, end + entry.nbytes
        offsets = [starts[entry.name], end]
        header[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        staging = bytearray(min(_PIECE_BYTES, max((entry.nbytes for entry in entries), default=0)))
        for entry in entries:
            file.seek(8 + len(text) + starts[entry.name])
            _write_tensor(file.fileno(), entry, staging)


def _write_tensor(file: int, entry: Entry, staging: bytearray) -> None:
    tensor = entry.load()
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        raise WeightsError(
            f"{entry.name!r} was announced as {entry.dtype} {entry.shape} and is {tensor.dtype} {tuple(tensor.shape)}"
        )
    if not entry.nbytes:
        return
    window = torch.frombuffer(staging, dtype=torch.uint8)
    for piece in tensor.detach().reshape(-1).view(torch.uint8).split(len(staging)):
        window[: len(piece)].copy_(piece)
        _write_all(file, memoryview(staging)[: len(piece)])


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What is known of a stored tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredTensors:
    """The tensors in the safetensors files of a directory; opening it reads headers only.

    Attributes:
        tensors: shape and dtype of each, by name.
    Raises:
        WeightsError: there are no such files, or one of them is missing, cut off or not what the index says; naming it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, Stored] = {}
        self._slices: dict[str, Any] = {}
        files, promised = _find(directory)
        for path in files:
            self._open(path)
        lost = sorted(set(promised) - set(self.tensors))
        if lost:
            raise WeightsError(f"{directory / promised[lost[0]]} lacks {lost[0]!r}, which {INDEX} promises")

    def _open(self, path: Path) -> None:
        try:
            # Kept open by the slices, which read through a map of the file.
            file: Any = safe_open(path, framework="pt", device="cpu")
            for name in file.keys():  # noqa: SIM118  the object is no mapping
                found = file.get_slice(name)
                if found.get_dtype() not in _BY_NAME:
                    raise WeightsError(f"{path}: {name!r} is {found.get_dtype()}, for which torch has no dtype here")
                self._slices[name] = found if found.get_shape() else _Scalar(file, name)
                self.tensors[name] = Stored(shape=tuple(found.get_shape()), dtype=_BY_NAME[found.get_dtype()])
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} could not be read: {error}") from error

    def read(self, name: str, box: Box) -> Tensor:
        """The part `box` of a tensor, on CPU; of what is not in the box nothing is read.

        Raises:
            WeightsError: the file system fails.
        """
        ranges = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        try:
            part: Tensor = self._slices[name][ranges]
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{name!r} in {self.directory} could not be read: {error}") from error
        return part


class _Scalar:
    """A tensor of no dims, which cannot be sliced."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def __getitem__(self, ranges: tuple[slice, ...]) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self._name)
        return tensor


def _find(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a directory, and which tensors an index promises in which."""
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory on this rank; every rank reads its own part of the files")
    if (directory / INDEX).exists():
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            promised = {
                str(k): str(v) for k, v in json.loads((directory / INDEX).read_text("utf-8"))["weight_map"].items()
            }
            if all(Path(name).name == name for name in promised.values()):
                return [directory / name for name in sorted(set(promised.values()))], promised
        raise WeightsError(
            f"{directory / INDEX} is no index of safetensors files (a weight_map of names to files there)"
        )
    if (directory / SINGLE).exists():
        return [directory / SINGLE], {}
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    hint = f"; {pickled[0]} is a pickle, which is not read: save it as safetensors first" if pickled else ""
    raise WeightsError(f"{directory} holds neither {SINGLE} nor {INDEX}{hint}")
