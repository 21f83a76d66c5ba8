"""Owns the translation of what DeepSpeed saved into the contents of a Onefold checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.codec import dtype_name, encode
from onefold.checkpoint.contents import Aside, Contents, empty_buffers, stamp
from onefold.checkpoint.entries import Entry, Reading, buffer_entries, read_only
from onefold.errors import CheckpointError
from onefold.interop.imports.deepspeed import DeepSpeedCheckpoint, Row, reader

_OWN_KEYS = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
        *("ds_version", "num_experts", "ds_autoep_layers", "universal_checkpoint_info", "sparse_tensor_module_names"),
    )
)
"""What DeepSpeed puts into a model file; everything else came in through client_state."""

_NO_HYPER = frozenset(
    (
        *("params", "step", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"),
        *("bias_correction", "param_names"),
    )
)
"""What a parameter group of DeepSpeed's or torch's holds that says how an optimizer is run, not what it computes."""


def to_contents(source: DeepSpeedCheckpoint, name: str) -> tuple[Contents, dict[str, str]]:
    """The contents of a Onefold checkpoint, and what was left out, with reasons.

    Raises:
        CheckpointError: optimizer state is of a kind that cannot be imported.
    """
    model, aside = source.model, Aside()
    buffers = {key: model["module"][key] for key in model["buffer_names"]}
    steps = int(model["global_steps"]) - int(model["skipped_steps"])
    extra, scheduler, left_out = _rest(source, name)
    params = _params(source)
    shared = {
        **stamp(),
        "num_ranks": 1,
        "plan": f"DeepSpeed ZeRO on {source.num_ranks} ranks",
        "params": params,
        "tied": dict(model.get("shared_params") or {}),
        "buffers": {key: list(buffer.shape) for key, buffer in buffers.items()},
        "scaler": encode(_scaler(source.optimizer.get("loss_scaler")), "the loss scale"),
        "optimizer": _optimizer(source, steps),
        "has_ema": False,
        "module_states": None,  # what modules of DeepSpeed's keep is not known
        "files": {"names": {key: [key] for key in (*params, *buffers)}, "configs": {}},
        "schedulers": [] if scheduler is None else [encode(scheduler, "lr_scheduler")],
        "extra": encode(extra, "extra", aside.keep),
        "empty": aside.empty() | empty_buffers(buffers),
    }
    entries = [*_entries(source), *buffer_entries(buffers), *aside.entries()]
    return Contents(shared=shared, own={"random": None, "loader": None}, entries=entries), left_out


def _rest(source: DeepSpeedCheckpoint, name: str) -> tuple[dict[str, Any], Any, dict[str, str]]:
    """What becomes `extra`, the state of the scheduler, and what cannot be kept, with reasons."""
    model, left_out = source.model, dict[str, str]()

    def keepable(what: str, value: Any) -> bool:
        try:
            encode(value, what, lambda _: "")
        except CheckpointError as error:
            left_out[what] = str(error)
            return False
        return True

    client = {key: value for key, value in model.items() if key not in _OWN_KEYS}
    kept = {key: value for key, value in client.items() if keepable(f"client_state[{key!r}]", value)}
    scheduler, config = (
        value if keepable(what, value := model.get(what)) else None for what in ("lr_scheduler", "ds_config")
    )
    for key in ("data_sampler", "random_ltd"):
        if model.get(key) is not None:
            left_out[key] = "Onefold has nothing that could take it"
    if any("lr" not in group for group in source.groups):
        left_out["param_groups"] = "an elastic checkpoint does not hold them: set hyper-parameters anew"
    facts = {
        "tag": name,
        "version": model.get("ds_version"),
        "global_steps": int(model["global_steps"]),
        "skipped_steps": int(model["skipped_steps"]),
        "global_samples": int(model["global_samples"]),
        "num_ranks": source.num_ranks,
        "config": config,
    }
    return {"client_state": kept, "deepspeed": facts}, scheduler, left_out


def _params(source: DeepSpeedCheckpoint) -> dict[str, Any]:
    """Shape, dtype and use of every parameter."""
    module: Mapping[str, Any] = source.model["module"]
    found = {}
    for row in source.rows:
        for name, shape in row.shapes.items():
            like = module.get(name, row.masters[0])
            found[name] = _param(shape, like.dtype, is_trained=True)
    for name, param in source.frozen.items():
        found[name] = _param(param.shape, param.tensors[0].dtype, is_trained=False)
    return found


def _param(shape: tuple[int, ...], dtype: torch.dtype, *, is_trained: bool) -> dict[str, Any]:
    # Never split: DeepSpeed's 16-bit weights are its master weights, rounded to even.
    return {"shape": list(shape), "dtype": dtype_name(dtype), "trained": is_trained, "is_split": False}


def _scaler(scaler: Any) -> dict[str, float | int]:
    """The loss scale as `onefold.scaler` keeps it."""
    if not getattr(scaler, "dynamic", False):
        return {"scale": float(getattr(scaler, "cur_scale", 1.0))}
    return {
        "scale": float(scaler.cur_scale),
        "cur_iter": int(scaler.cur_iter),
        "last_overflow_iter": int(scaler.last_overflow_iter),
        "cur_hysteresis": int(scaler.cur_hysteresis),
    }


def _optimizer(source: DeepSpeedCheckpoint, steps: int) -> dict[str, Any]:
    groups: list[dict[str, Any]] = [
        {"params": [], "hyper": _hyper(group, index)} for index, group in enumerate(source.groups)
    ]
    scalars: dict[str, Any] = {}
    states: dict[str, list[str]] = {}
    for row in source.rows:
        names, laid_out = [name for name, shape in row.shapes.items() if prod(shape)], _laid_out(row)
        groups[row.group]["params"] += names
        values = {key: value for key, value in row.states[0].items() if key not in laid_out}
        values["step"] = torch.tensor(float(values.get("step", source.groups[row.group].get("step", steps))))
        for name in names:
            scalars[name] = encode(values, f"the state of {name!r}")
            states[name] = sorted(laid_out)
    return {
        "rule": _rule(source),
        "groups": groups,
        "scalars": scalars,
        "states": states,
        "num_updates": steps,
    }


def _rule(source: DeepSpeedCheckpoint) -> str:
    """What the configuration calls the optimizer; the files do not say what the user's own was."""
    config = source.model.get("ds_config")
    named = config.get("optimizer") if isinstance(config, Mapping) else None
    return str(named.get("type", "unknown")).lower() if isinstance(named, Mapping) else "unknown"


def _hyper(group: Mapping[str, Any], index: int) -> Any:
    if group.get("bias_correction", True) is False:
        raise CheckpointError(
            f"parameter group {index} was trained with bias_correction=False, and no optimizer of Onefold's leaves the "
            "correction out: training would go on differently"
        )
    kept = {key: value for key, value in group.items() if key not in _NO_HYPER and not str(key).startswith("_")}
    if isinstance(kept.get("betas"), list):
        kept["betas"] = tuple(kept["betas"])
    return encode(kept, f"param group {index}")


def _laid_out(row: Row) -> list[str]:
    """The state that is laid out like the weights.

    Raises:
        CheckpointError: some other tensor is among the state, or a rank has none.
    """
    names = [name for name, value in row.states[0].items() if isinstance(value, Tensor) and value.dim()]
    for name in names:
        for rank, (state, master) in enumerate(zip(row.states, row.masters, strict=True)):
            value = state.get(name)
            if not isinstance(value, Tensor) or value.dim() != 1 or value.numel() < master.numel():
                raise CheckpointError(
                    f"optimizer state {name!r} of rank {rank}, of {', '.join(list(row.shapes)[:2])}, ..., is "
                    f"{list(value.shape) if isinstance(value, Tensor) else 'missing'}, not one value for each of "
                    f"{master.numel()} weights: state of such optimizers cannot be imported"
                )
    return names


def _entries(source: DeepSpeedCheckpoint) -> Iterator[Entry]:
    for row in source.rows:
        laid_out = _laid_out(row)
        for name, shape in row.shapes.items():
            extents = row.extents[name]
            if not extents:
                continue
            yield _entry(f"model.{name}", shape, row.masters[0].dtype, reader(row.masters, extents))
            for state in laid_out:
                parts = [each[state] for each in row.states]
                yield _entry(f"optimizer.{state}.{name}", shape, parts[0].dtype, reader(parts, extents))
    for name, param in source.frozen.items():
        if param.extents:
            yield _entry(f"model.{name}", param.shape, param.tensors[0].dtype, reader(param.tensors, param.extents))


def _entry(key: str, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[int, int], Tensor]) -> Entry:
    return Entry(
        key=key,
        shape=shape,
        dtype=dtype,
        start=0,
        stop=prod(shape),
        read=read,
        write=read_only,
        reading=Reading.IN_PLACE,
    )
