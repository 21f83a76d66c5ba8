"""Owns the compilation of a model's blocks: gathers must happen outside of compiled code, so units are compiled instead
of the whole model, inside of the hooks that gather."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from onefold.engine.session import session_of
from onefold.setup.find_units import UnitSpec, discover, outside
from onefold.setup.gathered import gathered

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

_VARIANTS = 8
"""Of one function, that torch compiles unless told otherwise."""


def compile_units(model: nn.Module, compiler: Compiler) -> None:
    """Let `compiler` compile the forward of every block of a sharded model, as `shard(compile=True)` has it done. Only
    for models whose units were found, not given.

    Raises:
        OnefoldError: the model is not sharded.
    """
    session_of(model, "compiling")
    with gathered(model):
        specs = discover(model, None)
    compile_blocks(model, specs, compiler)


def uncompiled(model: nn.Module) -> tuple[nn.Module, Compiler | None]:
    """The module inside a `torch.compile`d model, and its compiler."""
    inner = model._modules.get("_orig_mod")
    compiler: Any = vars(model).get("dynamo_ctx")
    return (model, None) if inner is None or compiler is None else (inner, compiler)


def compile_blocks(model: nn.Module, specs: Sequence[UnitSpec], compiler: Compiler | None) -> None:
    """Compile the forward of every block by `compiler`; None is torch.compile, in one graph where no unit is inside."""
    hooked = {id(module) for spec in specs for _, module in spec.modules}
    if len(specs) > 1:
        hooked.update(id(module) for _, module in outside(model, specs))
    blocks = [module for spec in specs[len(specs) > 1 :] for _, module in spec.modules]  # the root only if it is all
    options = _room_for_variants(len(blocks), compiler is None)
    for module in blocks:
        if compiler is not None:
            module.forward = compiler(module.forward)
        else:
            is_leaf = sum(id(each) in hooked for each in module.modules()) == 1
            module.forward = torch.compile(module.forward, fullgraph=is_leaf, **options)


def _room_for_variants(num_blocks: int, is_torchs: bool) -> dict[str, Any]:
    """What torch.compile needs to be told so that each block may be compiled as often as torch lets one function be.
    Blocks of a class share one cache: where they differ in a number (a layer's index), its 8 places would be full at
    the ninth block, which could not be compiled then."""
    limit = max(torch._dynamo.config.recompile_limit, _VARIANTS * num_blocks)
    if is_torchs and "recompile_limit" in signature(torch.compile).parameters:  # not before torch 2.13
        return {"recompile_limit": limit}
    torch._dynamo.config.recompile_limit = limit
    return {}
