"""Owns what torch.distributed.checkpoint is told: which boxes of which tensors a rank writes and reads.

Its planners put all ranks' boxes together and find, for a box that is read, the boxes that were written; nothing here
looks at world sizes. Data never lies in its plans: entries are read when they are written down, one box at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from onefold.checkpoint.entries import Entry
from onefold.errors import CheckpointError
from onefold.plan.layout import Box, boxes

_Place = tuple[str, torch.Size]
_PIECE_NUMEL = 2**19


class EntrySavePlanner(SavePlanner):
    """Plans the writing of entries."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = {(entry.key, torch.Size(box.offsets)): (entry, box) for entry, box in _boxes_of(entries)}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Everything is known from the start."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(entry, box) for entry, box in self._entries.values()])

    def _item(self, entry: Entry, box: Box) -> WriteItem:
        chunk = ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties(dtype=entry.dtype), size=torch.Size(entry.shape)
        )
        return WriteItem(
            index=MetadataIndex(entry.key, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=data,
            bytes_io_data=None,
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """The values of one box: 1-D."""
        return torch.cat([piece.cpu() for piece in self.pieces(write_item)])

    def pieces(self, write_item: WriteItem) -> Iterator[Tensor]:
        """The values of one box, one small 1-D piece after another, where they rest: joining exact weights takes
        several times a piece."""
        entry, box = self._entries[write_item.index.fqn, torch.Size(write_item.index.offset or ())]
        start = flat_index(box.offsets, entry.shape)
        stop = start + prod(box.sizes)
        for first in range(start, stop, _PIECE_NUMEL):
            yield entry.read(first, min(first + _PIECE_NUMEL, stop))


class EntryLoadPlanner(LoadPlanner):
    """Plans the reading of entries.

    Raises:
        CheckpointError: (from `create_local_plan`) a tensor is not in the checkpoint, or has another shape.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = list(entries)
        self._targets: dict[_Place, Entry] = {}
        self._metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata or Metadata({})

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        wanted: dict[str, list[ChunkStorageMetadata]] = {}
        for entry, box in _boxes_of(self._entries):
            chunk = ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            wanted.setdefault(entry.key, []).append(chunk)
            self._targets[entry.key, chunk.offsets] = entry
            stored = self._stored(entry.key)
            if tuple(stored.size) != entry.shape:
                raise CheckpointError(
                    f"{entry.key!r} has shape {tuple(stored.size)} in the checkpoint and {entry.shape} in the model"
                )
        for key, chunks in wanted.items():
            found = create_read_items_for_chunk_list(key, self._stored(key), chunks)
            missing = sum(prod(chunk.sizes) for chunk in chunks) - sum(prod(item.lengths) for item in found)
            if missing:
                raise CheckpointError(f"{missing} elements of {key!r} are not in the checkpoint")
            items += found
        return LoadPlan(items)

    def _stored(self, key: str) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{key!r} is not in the checkpoint")
        return stored

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Room for the values of one box, 1-D, as they were stored."""
        return torch.empty(prod(read_item.lengths), dtype=self._stored(read_item.storage_index.fqn).properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        place = (read_item.dest_index.fqn, torch.Size(read_item.dest_index.offset or ()))
        entry = self._targets[place]
        corner = [base + more for base, more in zip(place[1], read_item.dest_offsets, strict=True)]
        entry.write(flat_index(corner, entry.shape), tensor.to(entry.dtype))


def flat_index(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """The place of an element in row-major order."""
    index = 0
    for offset, size in zip(offsets, shape, strict=True):
        index = index * size + offset
    return index


def _boxes_of(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Box]]:
    for entry in entries:
        for box in boxes(entry.shape, entry.start, entry.stop):
            yield entry, box
