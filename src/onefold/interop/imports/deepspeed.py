"""Owns DeepSpeed's files: which belong together, and where in them each element of a parameter lies.

[Note: How DeepSpeed lays out]
A parameter group, or under ZeRO-3 a sub-group of one, is a row of parameters. Under ZeRO-1 and 2 the row is flattened,
padded, and cut into equal partitions, one a rank, regardless of where parameters begin. Under ZeRO-3 each parameter is
cut by itself into as many equal pieces as there are ranks, the last ones padded, and a rank's partition is the row of
its pieces. Master weights and every element-wise tensor of optimizer state are laid out alike.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.files import Files, read_file
from onefold.errors import CheckpointError
from onefold.interop.imports.unpickle import load_mapped

_OPTIMIZER_FILE = re.compile(r"(?P<kind>bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OTHER_FILE = re.compile(r"(layer_|expert_|expp_rank_).*\.pt")


@dataclass(frozen=True, slots=True)
class Extent:
    """Some elements of a parameter: `numel` from `start` on, which lie in a rank's partition from `first` on."""

    rank: int
    first: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Parameters that share a flat partition on each rank. See [Note: How DeepSpeed lays out]."""

    group: int
    shapes: Mapping[str, tuple[int, ...]]
    extents: Mapping[str, Sequence[Extent]]
    masters: Sequence[Tensor]
    """Exact weights, 1-D, by rank."""
    states: Sequence[Mapping[str, Any]]
    """Optimizer state by name, by rank: 1-D tensors as long as the master or longer, and single values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A parameter that no optimizer has."""

    shape: tuple[int, ...]
    extents: Sequence[Extent]
    tensors: Sequence[Tensor]
    """What it lies in, 1-D, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedCheckpoint:
    """What DeepSpeed saved."""

    rows: Sequence[Row]
    groups: Sequence[Mapping[str, Any]]
    frozen: Mapping[str, Frozen]
    model: Mapping[str, Any]
    """The first rank's model file."""
    optimizer: Mapping[str, Any]
    """The first rank's optimizer file, its inner part."""
    num_ranks: int


def find_checkpoint(directory: Path, tag: str | None) -> Path:
    """The directory of one checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    if tag is None and directory.is_dir() and any(_OPTIMIZER_FILE.fullmatch(path.name) for path in directory.iterdir()):
        return directory
    if tag is None:
        try:
            tag = read_file(Files(), directory / "latest").decode().strip()
        except (CheckpointError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{directory / 'latest'} cannot be read ({error}): give the directory that DeepSpeed's save_checkpoint "
                "was given, or name one of the checkpoints in it with tag="
            ) from error
    if not tag or tag == ".." or Path(tag).name != tag or not (directory / tag).is_dir():
        tags = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
        raise CheckpointError(f"{directory} holds no checkpoint {tag!r}; it holds: {', '.join(tags) or 'none'}")
    return directory / tag


def read_checkpoint(where: Path) -> DeepSpeedCheckpoint:
    """Open all files of one checkpoint; tensors stay on the disk until they are used.

    Raises:
        CheckpointError: files are missing, damaged, or of a kind that cannot be imported.
    """
    optimizer_files, model_files = _files(where)
    return _parse([load_mapped(path) for path in optimizer_files], [load_mapped(path) for path in model_files])


@contextmanager
def importing(where: Path) -> Iterator[None]:
    """Say of whatever goes wrong inside which checkpoint it was."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where} cannot be imported: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{where} is not laid out as DeepSpeed 0.19 writes it under ZeRO 1 to 3, or is damaged: {error!r}"
        ) from error


def _files(where: Path) -> tuple[list[Path], list[Path]]:
    """The optimizer files by rank, and the model files by rank (or the one there is)."""
    paths = sorted(where.iterdir())
    optimizers = {path: match for path in paths if (match := _OPTIMIZER_FILE.fullmatch(path.name))}
    models = {path: match for path in paths if (match := _MODEL_FILE.fullmatch(path.name))}
    split = [path.name for path, match in [*optimizers.items(), *models.items()] if int(match["part"])]
    split += [path.name for path in paths if _OTHER_FILE.fullmatch(path.name)]
    if split:
        raise CheckpointError(f"it was written under tensor, pipeline or expert parallelism ({split[0]})")
    if not optimizers or not models:
        raise CheckpointError(
            f"it has no files of {'optimizer states' if not optimizers else 'model states'}: only what DeepSpeed "
            "saved under ZeRO 1, 2 or 3 can be imported"
        )
    if len({match["kind"] for match in optimizers.values()}) > 1:
        raise CheckpointError(
            f"{where} holds files of two runs (with and without bf16_): remove those of the older one"
        )
    by_rank = {int(match["rank"]): path for path, match in optimizers.items()}
    whole = [path for path, match in models.items() if match["rank"] is None]
    parts = {int(match["rank"]): path for path, match in models.items() if match["rank"] is not None}
    if whole and parts:
        raise CheckpointError(f"it has model states of two runs: remove {whole[0].name}, or the others")
    for what, found in (("optimizer", by_rank), ("model", parts)):
        missing = sorted(set(range(len(by_rank))) - set(found))
        if missing and (found or not whole):
            raise CheckpointError(f"it is not whole: the {what} states of rank {missing[0]} are missing")
    return [by_rank[rank] for rank in sorted(by_rank)], whole or [parts[rank] for rank in sorted(parts)]


def _parse(optimizers: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]) -> DeepSpeedCheckpoint:
    inner = [optimizer["optimizer_state_dict"] for optimizer in optimizers]
    model = models[0]
    _check_kind(inner, model)
    is_cut_singly = "fp32_flat_groups" in inner[0]
    base = [_base_state(each, is_cut_singly) for each in inner]
    masters = [each["fp32_flat_groups" if is_cut_singly else "single_partition_of_fp32_groups"] for each in inner]
    groups = base[0]["param_groups"]
    members = [(group, key) for group, entry in enumerate(groups) for key in entry["params"]]
    shapes = [{name: _shape(size) for name, size in row.items()} for row in model["param_shapes"]]
    if any(len(each) != len(shapes) for each in (members, *masters)):
        raise ValueError(f"{len(shapes)} rows of parameters, {len(members)} of optimizer state")
    paddings = [[0] * len(row) for row in shapes] if is_cut_singly else _paddings(inner[0], shapes)
    rows = []
    for index, (group, key) in enumerate(members):
        flats = [_flat(each[index]) for each in masters]
        states = [each["state"].get(key, {}) for each in base]
        if is_cut_singly:
            extents = _cut_singly(shapes[index], [flat.numel() for flat in flats])
        else:
            extents = _cut_together(shapes[index], paddings[index], [flat.numel() for flat in flats])
        rows.append(Row(group=group, shapes=shapes[index], extents=extents, masters=flats, states=states))
    return DeepSpeedCheckpoint(
        rows=rows,
        groups=groups,
        frozen=_frozen(models, {name for row in shapes for name in row}, is_cut_singly),
        model=model,
        optimizer=inner[0],
        num_ranks=len(inner),
    )


def _check_kind(inner: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> None:
    """Refuse what would be imported wrongly.

    Raises:
        CheckpointError: saying what.
    """
    if int(model.get("mp_world_size") or 1) != 1 or model.get("num_experts") or model.get("ds_autoep_layers"):
        raise CheckpointError("it was written under tensor or expert parallelism")
    if model.get("param_shapes") is None:
        raise CheckpointError("it was not written under ZeRO 1, 2 or 3, and says of no parameter where it is")
    counts = {count for each in inner for count in _several(each["partition_count"])}
    if counts != {len(inner)}:
        raise CheckpointError(
            f"optimizer states are cut into {sorted(counts)} partitions, and there are files of {len(inner)} ranks: "
            "some are missing, left over from another run, or written with partitions of several sizes (MiCS, experts)"
        )


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _base_state(inner: Mapping[str, Any], is_cut_singly: bool) -> Mapping[str, Any]:
    """What the optimizer within DeepSpeed's has, as torch.optim says it."""
    found = inner["optimizer_state_dict" if is_cut_singly else "base_optimizer_state"]
    if isinstance(found, Mapping):
        return found
    step = inner.get("base_optimizer_state_step")  # saved "elastic": states alone
    more = {} if step is None else {"step": step}
    return {
        "state": dict(enumerate(found)),
        "param_groups": [{"params": [index], **more} for index in range(len(found))],
    }


def _paddings(inner: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]) -> Sequence[Sequence[int]]:
    """How many elements follow each parameter that belong to none, where parameters are aligned."""
    found = inner.get("param_alignment_paddings") or [[0] * len(row) for row in shapes]
    if [len(row) for row in found] != [len(row) for row in shapes]:
        raise ValueError("paddings are not of these parameters")
    return [[int(padding) for padding in row] for row in found]


def _flat(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"a {type(value).__name__} where master weights are expected")
    return value.detach().reshape(-1)


def _cut_together(
    shapes: Mapping[str, tuple[int, ...]], paddings: Sequence[int], sizes: Sequence[int]
) -> dict[str, list[Extent]]:
    """Extents of the parameters of a row that was flattened, then cut."""
    starts = [0, *accumulate(prod(shape) + more for shape, more in zip(shapes.values(), paddings, strict=True))]
    bounds = [(rank * sizes[0], rank * sizes[0] + size) for rank, size in enumerate(sizes)]
    extents = {}
    for (name, shape), first in zip(shapes.items(), starts, strict=False):
        last = first + prod(shape)
        extents[name] = [
            Extent(rank, max(first, low) - low, max(first, low) - first, min(last, high) - max(first, low))
            for rank, (low, high) in enumerate(bounds)
            if max(first, low) < min(last, high)
        ]
        _check_whole(name, shape, extents[name])
    return extents


def _cut_singly(shapes: Mapping[str, tuple[int, ...]], sizes: Sequence[int]) -> dict[str, list[Extent]]:
    """Extents of the parameters of a row that were cut, then laid in a row."""
    num_ranks, first, extents = len(sizes), 0, {}
    for name, shape in shapes.items():
        extents[name] = _pieces(prod(shape), num_ranks, first)
        first += -(-prod(shape) // num_ranks)
    if any(size != first for size in sizes):
        raise ValueError(f"partitions of {sizes} elements, where {first} are expected")
    return extents


def _pieces(numel: int, num_ranks: int, first: int) -> list[Extent]:
    each = -(-numel // num_ranks)
    starts = [(rank, rank * each) for rank in range(num_ranks) if rank * each < numel]
    return [Extent(rank, first, start, min(each, numel - start)) for rank, start in starts]


def _check_whole(name: str, shape: tuple[int, ...], extents: Sequence[Extent]) -> None:
    missing = prod(shape) - sum(extent.numel for extent in extents)
    if missing:
        raise ValueError(f"{missing} elements of {name!r} are missing")


def _frozen(models: Sequence[Mapping[str, Any]], trained: set[str], is_cut_singly: bool) -> dict[str, Frozen]:
    """The frozen parameters: in pieces where trained ones are cut singly, else whole in the model's state dict."""
    model, found = models[0], {}
    if not is_cut_singly:
        known = {*trained, *model["buffer_names"], *(model.get("shared_params") or {})}
        for name, tensor in model["module"].items():
            if isinstance(tensor, Tensor) and name not in known:
                extents = _pieces(tensor.numel(), 1, 0)
                found[name] = Frozen(shape=tuple(tensor.shape), extents=extents, tensors=[tensor.reshape(-1)])
        return found
    for name, size in (model.get("frozen_param_shapes") or {}).items():
        shape = _shape(size)
        tensors = [each["frozen_param_fragments"][name].reshape(-1) for each in models]
        is_whole = tensors[0].numel() == prod(shape)
        extents = _pieces(prod(shape), 1 if is_whole else len(models), 0)
        if any(tensors[extent.rank].numel() < extent.numel for extent in extents):
            raise ValueError(f"elements of {name!r} are missing")
        found[name] = Frozen(shape=shape, extents=extents, tensors=tensors)
    return found


def _shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    if any(size < 0 for size in sizes):
        raise ValueError(f"a shape of {list(sizes)}")
    return tuple(map(int, sizes))


def reader(tensors: Sequence[Tensor], extents: Sequence[Extent]) -> Callable[[int, int], Tensor]:
    """What gives elements [a, b) of a parameter, 1-D, from the partitions it lies in."""

    def gather(start: int, stop: int) -> Tensor:
        pieces = []
        for extent in extents:
            low, high = max(start, extent.start), min(stop, extent.start + extent.numel)
            if low < high:
                first = extent.first + low - extent.start
                pieces.append(tensors[extent.rank][first : first + high - low])
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    return gather
