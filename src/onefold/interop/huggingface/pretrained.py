"""Owns `load_pretrained`: from safetensors files straight into the shards of a sharded model.

Each rank reads the elements whose exact weights it keeps, and no others; what rests whole beside split exact weights
comes from the other ranks over the wire, as after an update. Nothing is changed before names, shapes and dtypes of the
whole model were found right.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onefold.comm.agreement import united
from onefold.engine.flat import Flat
from onefold.engine.session import session_met
from onefold.errors import WeightsError
from onefold.files.names import Matching, Named, named_tensors
from onefold.files.tensor_files import Stored, StoredTensors
from onefold.plan.layout import boxes

_SHOWN = 5


class Unmatched(NamedTuple):
    """Names that did not match: of the model, and of the files."""

    missing: list[str]
    unexpected: list[str]


def load_pretrained(model: nn.Module, directory: "str | Path", *, strict: bool = True) -> Unmatched:
    """Give a sharded model, built on the meta device or not, the weights in a directory of safetensors. A collective.

    The directory holds `model.safetensors`, or several files and `model.safetensors.index.json`, as `export` and
    Hugging Face's `save_pretrained` write them; every rank reads it. Weights, exact weights and persistent buffers are
    set, cast to the model's dtypes; optimizer state, pending gradients and step counts are not touched.

    Args:
        strict: whether every parameter and persistent buffer must be there, and nothing else; False leaves what is not
            there as it is. What a Hugging Face model says may be missing or left over is no matter in either case.
    Returns:
        The names that did not match (with `strict`, two empty lists).
    Raises:
        WeightsError: no such files, or files that are cut off; names, shapes or kinds of numbers that do not match.
            Raised on every rank, before anything is changed; only when reading itself fails half-way is the model
            partly loaded.
    """
    session = session_met(model, "onefold.load_pretrained")
    inner = model._modules.get("_orig_mod") or model
    session.come_to_rest("onefold.load_pretrained")
    session.wait_for_readers()  # a save under way may read what rests here
    path = Path(directory)
    with united(session.comm, "onefold.load_pretrained", (f"directory {path}", f"strict {strict}")) as meet:
        if hasattr(inner, "peft_config"):
            raise WeightsError(
                "the model has adapters around the modules that the files name; load the weights before adding adapters"
            )
        files = StoredTensors(path)
        tensors = named_tensors(inner)
        matching = Matching(inner, tensors, files.tensors)
        _check(path, matching, files.tensors, strict)
        names = {id(named.tensor): name for named, name in matching.pairs}
        with torch.no_grad():
            for unit in session.runtime.units:
                for flat in unit.flats:
                    _read_flat(flat, names, files)
                meet()
                unit.show_stored(unit.flats)
            for named, name in matching.pairs:
                if not named.is_param:
                    _read_buffer(named.tensor, name, files)
    return Unmatched(matching.missing, matching.unexpected)


def _check(path: Path, matching: Matching, stored: Mapping[str, Stored], strict: bool) -> None:
    problems = []
    if strict and matching.missing:
        problems.append(f"not in the files: {_some(matching.missing)}")
    if strict and matching.unexpected:
        problems.append(f"not in the model: {_some(matching.unexpected)}")
    problems += [text for named, name in matching.pairs if (text := _mismatch(named, name, stored[name]))][:_SHOWN]
    if problems:
        raise WeightsError(f"{path} does not match the model: {'; '.join(problems)}{matching.advice()}")


def _mismatch(named: Named, name: str, stored: Stored) -> str:
    """What is wrong with the shape or the kind of numbers of a stored tensor; "" if nothing is."""
    shape, dtype = tuple(named.tensor.shape), named.tensor.dtype
    if stored.shape != shape:
        return f"{name!r} is {stored.shape} in the files, {shape} in the model"
    is_packed = dtype != stored.dtype and 1 in (dtype.itemsize, stored.dtype.itemsize)
    if is_packed or dtype.is_floating_point != stored.dtype.is_floating_point:
        return f"{name!r} is {stored.dtype} in the files, which cannot be cast to the model's {dtype}"
    return ""


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _read_flat(flat: Flat, names: Mapping[int, str], files: StoredTensors) -> None:
    """Read this rank's part of one flat buffer, into its exact weights if it is trained."""
    flat.arrival.wait_on_host()
    if flat.trained is None:
        _fill(flat.weight, flat, names, files)
        return
    exact = flat.trained.master.load()
    _fill(exact, flat, names, files)
    flat.trained.master.store(exact)


def _fill(values: Tensor, flat: Flat, names: Mapping[int, str], files: StoredTensors) -> None:
    """Put what the files have into `values`, this rank's weights of a flat buffer in whatever form."""
    for piece in flat.pieces:
        name = names.get(id(flat.params[piece.slot]))
        if name is None:
            continue
        at = piece.start
        for box in boxes(flat.layout.slots[piece.slot].shape, piece.slot_start, piece.slot_start + piece.numel):
            part = files.read(name, box).reshape(-1)
            values[at : at + part.numel()].copy_(part)
            at += part.numel()


def _read_buffer(buffer: Tensor, name: str, files: StoredTensors) -> None:
    for box in boxes(buffer.shape, 0, buffer.numel()):
        values = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)  # an expanded one has fewer places
        values.copy_(files.read(name, box))
        buffer.data = values
