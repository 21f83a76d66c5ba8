"""Owns the export of a checkpoint on disk: one process, no model, one tensor in memory at a time."""

import json
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.codec import dtype_of
from onefold.checkpoint.directory import candidates
from onefold.checkpoint.manifest import SHARED, understood
from onefold.checkpoint.storage import Reader
from onefold.dtypes import Precision, split
from onefold.errors import CheckpointError
from onefold.tensorfiles import Entry, prevailing_dtype, write_files, written_dtype


class CheckpointExport:
    """What `onefold.export` writes of a checkpoint.

    Args:
        path: a checkpoint, or `DIRECTORY/latest`.
        dtype: of floating-point parameters; None keeps what the model computed in.

    Raises:
        CheckpointError: it is damaged, or its model cannot be exported without being there.
        PrecisionError: `dtype` is none that `export` takes.
    """

    def __init__(self, path: Path, dtype: "torch.dtype | str | None") -> None:
        chosen = Precision(params=dtype).params
        self._dtype = chosen if isinstance(chosen, torch.dtype) else None
        self._reader = Reader(candidates(path.absolute())[0][0])
        where = self._reader.directory / SHARED
        if understood(where, lambda: self._reader.shared["files"]) is None:
            raise CheckpointError(
                f"{path} holds adapters, no frozen weights, or state that files of weights cannot hold: load it into "
                "its model and export that"
            )
        self._entries: list[Entry] = understood(where, self._found)
        self._configs = understood(where, self._configurations)

    def write(self, directory: Path, max_file_bytes: int) -> None:
        """Write weights and configuration into `directory`, which is there."""
        try:
            write_files(directory, self._entries, max_file_bytes)
        finally:
            self._reader.close()
        for name, values in self._configs.items():
            text = json.dumps(values, indent=2, sort_keys=True) + "\n"
            (directory / name).write_text(text, encoding="utf-8")

    def _configurations(self) -> dict[str, dict[str, Any]]:
        """What is to be written by name of the file: not by whatever name stands in the checkpoint."""
        configs = self._reader.shared["files"]["configs"]
        found = {name: dict(configs[name]) for name in ("config.json", "generation_config.json") if name in configs}
        if "config.json" in found:
            found["config.json"]["dtype"] = prevailing_dtype(self._entries)
        return found

    def _found(self) -> list[Entry]:
        shared = self._reader.shared
        entries = []
        for name, saved in shared["params"].items():
            dtype = written_dtype(dtype_of(saved["dtype"]), self._dtype)
            for written in shared["files"]["names"].get(name, ()):
                load = partial(self._param, name, saved, dtype)
                entries.append(Entry(name=written, shape=tuple(saved["shape"]), dtype=dtype, load=load))
        for name, shape in shared["buffers"].items():
            dtype = self._reader.dtype(f"buffer.{name}")
            load = partial(self._reader.tensor, f"buffer.{name}")
            for written in shared["files"]["names"].get(name, ()):
                entries.append(Entry(name=written, shape=tuple(shape), dtype=dtype, load=load))
        return entries

    def _param(self, name: str, saved: dict[str, Any], dtype: torch.dtype) -> Tensor:
        if not prod(saved["shape"]):
            return torch.empty(saved["shape"], dtype=dtype)
        values = self._reader.tensor(f"model.{name}")
        if saved["is_split"] and dtype == torch.bfloat16 and values.dtype == torch.float32:
            return split(values)[0]  # as the model had it: a tie is rounded up
        return values.to(dtype)
