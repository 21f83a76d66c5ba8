"""Owns what a checkpoint holds beside tensors: what all ranks share, and what is of one rank."""

import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from onefold.checkpoint.codec import Keep, dtype_name, encode
from onefold.checkpoint.entries import (
    Entry,
    buffer_entries,
    flats_of,
    own_entries,
    param_names,
    persistent_buffers,
    whole_entry,
)
from onefold.engine.session import Session
from onefold.errors import CheckpointError, WeightsError
from onefold.files.names import all_tensors, modules_with_more, named_tensors, written_names
from onefold.memory.buffer import SplitMaster
from onefold.optim.ema import EMA
from onefold.optim.optimizer import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What one rank contributes to a checkpoint."""

    shared: dict[str, Any]
    own: dict[str, Any]
    entries: Sequence[Entry]


def collect(
    session: Session,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    scheduler: Any,
    loader: Any,
    ema: EMA | None,
    extra: Any,
    frozen: bool = True,
) -> Contents:
    """All that a run needs to go on, as this rank has it; without `frozen`, beside the weights that are not trained.

    Raises:
        CheckpointError: something of it cannot be saved.
    """
    check_given(session, optimizer, ema)
    left_out = frozenset() if frozen else _frozen(session)
    keys, aside = {f"model.{name}" for name in left_out}, Aside()
    entries = [entry for entry in own_entries(session, optimizer, ema) if entry.key not in keys]
    is_first = session.comm.rank == 0
    schedulers, buffers = several(scheduler), persistent_buffers(model)
    shared = {
        **stamp(),
        "num_ranks": session.comm.num_ranks,
        "plan": str(session.plan),
        "params": {name: saved for name, saved in _params(session).items() if name not in left_out},
        "tied": {name: first for name, first in _tied(model).items() if first not in left_out},
        "buffers": {name: list(buffer.shape) for name, buffer in buffers.items()},
        "scaler": encode(session.scaler.state_dict(), "the loss scale"),
        "optimizer": None if optimizer is None else _optimizer(session, optimizer),
        "has_ema": ema is not None,
        "schedulers": [encode(each.state_dict(), f"scheduler {index}") for index, each in enumerate(schedulers)],
        "extra": encode(extra, "extra", aside.keep) if is_first else None,
    }
    own = {
        "random": encode(_random_states(session.device), "random states"),
        "loader": None if loader is None else encode(loader.state_dict(), "the state of loader"),
    }
    if is_first:
        shared["module_states"] = _module_states(model, aside.keep)
        entries += [*buffer_entries(buffers), *aside.entries()]
        shared["files"] = None if left_out else _files(model)
        shared["empty"] = aside.empty() | empty_buffers(buffers)
    return Contents(shared=shared, own=own, entries=entries)


class Aside:
    """Tensors within `extra`, which are written like all others."""

    def __init__(self) -> None:
        self._kept: list[Entry] = []

    def keep(self, tensor: Tensor) -> str:
        """Put one aside; returns its name in the checkpoint."""
        self._kept.append(whole_entry(f"extra.{len(self._kept)}", tensor.detach()))
        return self._kept[-1].key

    def entries(self) -> list[Entry]:
        """Those that have elements."""
        return [entry for entry in self._kept if entry.stop]

    def empty(self) -> dict[str, Any]:
        """Shape and dtype of those that have none."""
        return {entry.key: [list(entry.shape), dtype_name(entry.dtype)] for entry in self._kept if not entry.stop}


def empty_buffers(buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    """Shape and dtype of those that have no elements."""
    return {f"buffer.{name}": [list(b.shape), dtype_name(b.dtype)] for name, b in buffers.items() if not b.numel()}


def stamp() -> dict[str, Any]:
    """By what a checkpoint is written, and when."""
    return {
        "onefold": 1,
        "torch": torch.__version__,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "saved_ns": time.time_ns(),
    }


def several(scheduler: Any) -> list[Any]:
    return [] if scheduler is None else list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler]


def _frozen(session: Session) -> frozenset[str]:
    """Names of parameters that are not trained."""
    return frozenset(name for flat in flats_of(session) if flat.trained is None for name in flat.names)


def _params(session: Session) -> dict[str, Any]:
    return {
        name: {
            "shape": list(slot.shape),
            "dtype": dtype_name(flat.weight.dtype),
            "trained": flat.trained is not None,
            "is_split": flat.trained is not None and isinstance(flat.trained.master, SplitMaster),
        }
        for flat in flats_of(session)
        for name, slot in zip(flat.names, flat.layout.slots, strict=True)
    }


def _files(model: Any) -> dict[str, Any] | None:
    """What an export of the checkpoint has to know of the model: names in files of weights, configurations. None if the
    model cannot be exported without being there."""
    inner = model._modules.get("_orig_mod", model)
    if hasattr(inner, "peft_config"):
        return None
    try:
        names = {named.names[0]: list(written_names(inner, named)) for named in named_tensors(inner)}
    except WeightsError:
        return None
    configs = {}
    if hasattr(getattr(inner, "config", None), "to_json_string"):
        configs["config.json"] = json.loads(inner.config.to_json_string()) | {"architectures": [type(inner).__name__]}
    if hasattr(getattr(inner, "generation_config", None), "to_json_string") and inner.can_generate():
        configs["generation_config.json"] = json.loads(inner.generation_config.to_json_string())
    return {"names": names, "configs": configs}


def _tied(model: nn.Module) -> dict[str, str]:
    """The second and further names of parameters, and the first."""
    return {name: named.names[0] for named in all_tensors(model) if named.is_param for name in named.names[1:]}


def _module_states(model: nn.Module, keep: Keep) -> dict[str, Any]:
    """What modules keep beside tensors, by their names."""
    return {
        name: encode(module.get_extra_state(), f"the extra state (get_extra_state) of module {name!r}", keep)
        for name, module in modules_with_more(model).items()
    }


def _optimizer(session: Session, optimizer: Optimizer) -> dict[str, Any]:
    names = param_names(session)
    groups = [
        {
            "params": [names[id(param)] for param in group["params"]],
            "hyper": encode({key: value for key, value in group.items() if key != "params"}, f"param group {index}"),
        }
        for index, group in enumerate(optimizer.param_groups)
    ]
    scalars: dict[str, Any] = {}
    states: dict[str, list[str]] = {}
    for update in optimizer.updates:
        for slot, values in update.scalars().items():
            name = update.flat.names[slot]
            scalars[name] = encode(values, f"the state of {name!r}")
        for part in update.parts():
            states.setdefault(update.flat.names[part.slot], []).append(part.name)
    return {
        "rule": optimizer.rule_name,
        "groups": groups,
        "scalars": scalars,
        "states": {name: sorted(set(found)) for name, found in states.items()},
        "num_updates": optimizer.num_updates,
    }


def kinds_given(optimizer: Optimizer | None, ema: EMA | None, *, frozen: bool = True) -> dict[str, bool]:
    """What ranks have to be given alike: each reads and writes its part of all of it."""
    return {"optimizer": optimizer is not None, "ema": ema is not None, "frozen": not frozen}


def check_given(session: Session, optimizer: Optimizer | None, ema: EMA | None) -> None:
    """Whether optimizer and average are this model's, and belong to its weights as they are now.

    Raises:
        CheckpointError: they do not.
    """
    if session.exchanged and (optimizer is not None or ema is not None):
        raise CheckpointError(
            "the model's weights are averages now, inside `with ema.applied():`, from which training does not go on: "
            "leave it first, or save the model alone"
        )
    for what, given in (("optimizer", optimizer), ("ema", ema)):
        if given is not None and not given.is_of(session):
            raise CheckpointError(f"{what}= is of another model than the one given")


def _random_states(device: torch.device) -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": numpy.random.get_state() if numpy is not None else None,
    }
