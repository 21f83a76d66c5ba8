"""Owns the birth of models built on the meta device: one unit at a time, from the model's own initializers.

Every unit is drawn from a seed made of torch's seed and the unit's name, whole, on every rank, so values depend neither
on the world size nor on what was drawn before. Floating-point tensors start as NaN: one that no initializer fills is
found and named.
"""

from collections.abc import Iterable, Iterator
from zlib import crc32

import torch
from torch import Tensor, nn

from onefold.discover import UnitSpec
from onefold.errors import ShardError


def has_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of the model is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialize(model: nn.Module, spec: UnitSpec, device: torch.device, seed: int) -> None:
    """Give the meta parameters of one unit, and the meta buffers beside them, memory and their initial values.

    Args:
        seed: equal on every rank.
    Raises:
        ShardError: a module that owns them has no `reset_parameters`, `_init_weights` or `init_weights`, or left one
            unset.
    """
    wanted = {id(param) for _, param in spec.params if param.is_meta}
    owners = [
        (name, module)
        for name, module in model.named_modules()
        if any(id(param) in wanted for param in module._parameters.values()) or _owns_meta_buffers(module, spec, name)
    ]
    for _, module in owners:
        _allocate(module, wanted, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed + crc32(spec.name.encode()))
        for name, module in owners:
            _initialize(model, name, module)
    for name, module in owners:
        for key, tensor in _own(module):
            if tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().any()):
                raise ShardError(
                    f"{name}.{key} was built on the meta device and the initializer of {type(module).__name__} left "
                    "(part of) it unset; fill every parameter and buffer there, or build the model on a real device"
                )


def _owns_meta_buffers(module: nn.Module, spec: UnitSpec, name: str) -> bool:
    inside = any(module is part for _, root in spec.modules for part in root.modules())
    return inside and any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        for key, tensor in tensors.items():
            if tensor is not None:
                yield key, tensor


def _allocate(module: nn.Module, wanted: Iterable[int], device: torch.device) -> None:
    for key, param in module._parameters.items():
        if param is not None and param.is_meta and id(param) in wanted:
            real = nn.Parameter(_unset(param, device), requires_grad=param.requires_grad)
            torch.utils.swap_tensors(param, real)
            module._parameters[key] = param
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = _unset(buffer, device)


def _unset(like: Tensor, device: torch.device) -> Tensor:
    tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    return tensor.fill_(float("nan")) if like.is_floating_point() else tensor.zero_()


def _initialize(model: nn.Module, name: str, module: nn.Module) -> None:
    for prefix in _prefixes(name):
        initializer = getattr(model.get_submodule(prefix), "_init_weights", None)
        if callable(initializer):
            initializer(module)
            return
    for method in ("reset_parameters", "init_weights", "_reset_parameters"):
        if callable(getattr(module, method, None)):
            getattr(module, method)()
            return
    raise ShardError(
        f"module {name!r} ({type(module).__name__}) was built on the meta device and has no reset_parameters, "
        "init_weights or _init_weights to give its tensors values; add one, or build the model on a real device"
    )


def _prefixes(name: str) -> Iterator[str]:
    """`name` and every module around it, innermost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
