"""Owns the export of a checkpoint on disk: one process, no model, one tensor in memory at a time.

What `DIRECTORY/latest` means is what it means to `load`: where the newest checkpoint turns out to be damaged, the one
before is exported, and the log says so.
"""

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.codec import dtype_of
from onefold.checkpoint.directory import Damaged, Found, choose_checkpoint, damage, tell_passed
from onefold.checkpoint.manifest import SHARED, understood
from onefold.checkpoint.storage import Reader
from onefold.errors import CheckpointError
from onefold.files.tensor_files import Entry, prevailing_dtype, write_files, written_dtype
from onefold.plan.precision import Precision, split

Replace = Callable[[Callable[[Path], None]], None]
"""Lets what it is given write a directory, which takes its place once all of it is on disk, and else never was."""


def export_checkpoint(path: Path, dtype: "torch.dtype | str | None", max_file_bytes: int, replace: Replace) -> None:
    """Export what `path` means: a checkpoint, or `DIRECTORY/latest`.

    Args:
        dtype: of floating-point parameters; None keeps what the model computed in.
        max_file_bytes: bytes of tensors in one file.

    Raises:
        CheckpointError: it is damaged, or its model cannot be exported without being there.
        PrecisionError: `dtype` is none that `export` takes.
        WeightsError: the directory cannot be written.
    """
    chosen = Precision(params=dtype).params
    damaged: dict[Found, Damaged] = {}
    while True:
        # Looked at again for each attempt: a run may have saved, and removed old checkpoints, meanwhile.
        choice = choose_checkpoint(path.absolute(), damaged)
        try:
            with damage():
                reader = Reader(choice.found.path)
                reader.check_sizes()
            with closing(reader):
                export = _Export(reader, chosen if isinstance(chosen, torch.dtype) else None)
                replace(partial(export.write, max_file_bytes=max_file_bytes))
        except Damaged as error:
            damaged[choice.found] = error
        else:
            return tell_passed("exported", choice)


class _Export:
    """What is written of one checkpoint.

    Raises:
        Damaged: a part of it is not what was written; (from `write`) also one that is read only then.
        CheckpointError: its model cannot be exported without being there.
    """

    def __init__(self, reader: Reader, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._reader = reader
        where = reader.directory / SHARED
        with damage():
            files = understood(where, lambda: reader.shared["files"])
        if files is None:
            raise CheckpointError(
                f"{reader.directory} holds adapters, no frozen weights, or state that files of weights cannot hold: "
                "load it into its model and export that"
            )
        with damage():
            self._entries: list[Entry] = understood(where, self._found)
            self._configs = understood(where, self._configurations)

    def write(self, directory: Path, max_file_bytes: int) -> None:
        """Write weights and configuration into `directory`, which is there."""
        with damage():
            write_files(directory, self._entries, max_file_bytes)
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
