"""Owns the initialization of models built on the meta device: one unit at a time, by the model's own initializers.

Every rank draws every unit whole, from a seed made of torch's seed and the unit's name, so values depend neither on the
world size nor on what was drawn before. Floating-point tensors start as NaN: one that no initializer fills is found and
named.

[Note: Whose initializer]
Initializers run as if the whole model were initialized, innermost modules first: those of the modules that own a tensor
of the unit, then those of the modules around them, which may overwrite it (`nn.Transformer`, GPT-2's residual
projections). Whatever is not being materialized meanwhile - tensors of other units, tensors that already have values,
later owners' views of a tied parameter - shows as a meta tensor, so writing to it changes nothing and draws nothing.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from onefold.errors import ShardError
from onefold.setup.find_units import UnitSpec

_METHODS = ("reset_parameters", "init_weights", "_reset_parameters")


def has_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of the model is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialize(model: nn.Module, spec: UnitSpec, specs: Sequence[UnitSpec], device: torch.device, seed: int) -> None:
    """Give the meta parameters of one unit, and the meta buffers beside them, memory and their initial values.

    Args:
        specs: all units; buffers belong to the innermost unit around their module.
        seed: equal on every rank.
    Raises:
        ShardError: a module that owns them has no `reset_parameters`, `_init_weights` or `init_weights`, or left one
            unset.
    """
    wanted = {id(param) for _, param in spec.params if param.is_meta}
    buffers = _buffers(spec, specs)
    owners: dict[str, nn.Module] = {}
    fresh: set[int] = set()
    for name, module in model.named_modules():
        made = _allocate(module, wanted - fresh, id(module) in buffers, device)
        fresh |= made
        if made:
            owners[name] = module
            _check_adapter(model, name)
    if not owners:
        return
    around = {prefix for name in owners for prefix in _prefixes(name)}
    silent = set()
    with only(model, owners, fresh), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed + crc32(spec.name.encode()))
        for name, module in _innermost_first("", model):
            if name in around:
                initialize = _initializer(model, name, module)
                if initialize is not None:
                    initialize()
                else:
                    silent.add(name)
    for name, module in owners.items():
        _check_filled(name, module, fresh, name in silent)


def _buffers(spec: UnitSpec, specs: Sequence[UnitSpec]) -> set[int]:
    """Ids of the modules whose buffers are initialized with the unit."""
    borders = {module for other in specs if other is not spec for _, module in other.modules}
    return {id(inner) for _, module in spec.modules for _, inner in module.named_modules(borders - {module})}


def _check_adapter(model: nn.Module, name: str) -> None:
    """Refuse adapters (PEFT's layers): what makes them change nothing at first was said when they were made, and is
    gone."""
    for prefix in list(_prefixes(name))[1:]:
        around = model.get_submodule(prefix)
        parts = getattr(around, "adapter_layer_names", ())
        if any(name.startswith(f"{prefix}.{part}.") for part in parts):
            raise ShardError(
                f"{name!r} belongs to an adapter that was made on the meta device, where its first values are lost; "
                "make the model on a real device before adding adapters"
            )


def _allocate(module: nn.Module, wanted: set[int], has_buffers: bool, device: torch.device) -> set[int]:
    """Give `module`'s own parameters in `wanted`, and its meta buffers, memory; returns their ids."""
    made = set()
    if isinstance(module, nn.RNNBase):
        module._flat_weight_refs = []  # weak references, which the swap below cannot follow
    for param in module._parameters.values():
        if param is not None and param.is_meta and id(param) in wanted:
            real = nn.Parameter(_unset(param, device), requires_grad=param.requires_grad)
            torch.utils.swap_tensors(param, real)
            made.add(id(param))
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    for key, buffer in module._buffers.items() if has_buffers else ():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = _unset(buffer, device)
            made.add(id(module._buffers[key]))
    return made


def _unset(like: Tensor, device: torch.device) -> Tensor:
    tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    return tensor.fill_(float("nan")) if like.is_floating_point() else tensor.zero_()


@contextmanager
def only(model: nn.Module, owners: dict[str, nn.Module], fresh: set[int]) -> Iterator[None]:
    """Inside, every tensor but the `fresh` ones shows as meta. See [Note: Whose initializer]."""
    mine = {id(module) for module in owners.values()}
    hidden: list[tuple[Any, str, Tensor]] = [
        (tensors, key, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items()
        if tensor is not None and not (id(module) in mine and id(tensor) in fresh)
    ]
    try:
        for tensors, key, tensor in hidden:
            blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            tensors[key] = nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
        yield
    finally:
        for tensors, key, tensor in hidden:
            tensors[key] = tensor


def _innermost_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        yield from _innermost_first(f"{name}.{key}".lstrip("."), child)
    yield name, module


def _initializer(model: nn.Module, name: str, module: nn.Module) -> Callable[[], object] | None:
    for prefix in _prefixes(name):
        of_all = getattr(model.get_submodule(prefix), "_init_weights", None)
        if callable(of_all):
            return partial(of_all, module)
    for method in _METHODS:
        own: Callable[[], object] | None = getattr(module, method, None)
        if callable(own) and _needs_nothing(own):
            return own
    return None


def _needs_nothing(method: Callable[..., object]) -> bool:
    """Whether a method can be called without arguments; others are called by a module around theirs."""
    needs = (p for p in inspect.signature(method).parameters.values() if p.default is p.empty)
    return all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needs)


def _check_filled(name: str, module: nn.Module, fresh: set[int], is_silent: bool) -> None:
    for key, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is None or id(tensor) not in fresh:
            continue
        is_unset = tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().any())
        if is_silent and (is_unset or not tensor.is_floating_point()):
            raise ShardError(
                f"module {name!r} ({type(module).__name__}) was built on the meta device and has no reset_parameters, "
                "init_weights or _init_weights to give its tensors values; add one, or build the model on a real device"
            )
        if is_unset:
            raise ShardError(
                f"{name}.{key} was built on the meta device and the initializer of {type(module).__name__} left "
                "(part of) it unset; fill every parameter and buffer there, or build the model on a real device"
            )


def _prefixes(name: str) -> Iterator[str]:
    """`name` and every module around it, innermost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
