"""Owns the refusal of what `shard` cannot be asked for, before any rank speaks to another."""

from typing import Any, get_args

import torch
from torch import nn

from onefold.engine.session import is_sharded
from onefold.errors import PlanError, PrecisionError, ShardError
from onefold.plan.precision import Precision
from onefold.plan.table import NAMED_PLANS, Plan
from onefold.setup.gather_choice import GatherChoice
from onefold.setup.reshard_policy import KeepChoice


def check_model(model: nn.Module, plan: Plan, precision: Precision) -> None:
    """Raises PlanError, PrecisionError or ShardError: one of them is none, or the model cannot be sharded."""
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is one of {', '.join(name.upper() for name in NAMED_PLANS)} or a Plan, not {plan!r}")
    if not isinstance(precision, Precision):
        raise PrecisionError(f'precision is a Precision, such as onefold.Precision(params="bf16"), not {precision!r}')
    if not isinstance(model, nn.Module):
        raise ShardError(f"onefold.shard takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ShardError(
            f"the model is wrapped in {type(model).__name__}; give onefold.shard the module inside (model.module)"
        )
    if is_sharded(model):
        raise ShardError("the model (or a part of it) is already sharded; call onefold.shard once, on the whole model")
    if next(model.parameters(), None) is None:
        raise ShardError(f"{type(model).__name__} has no parameters to shard")
    if torch.is_inference_mode_enabled():
        raise ShardError("onefold.shard inside torch.inference_mode makes tensors that can never be trained; leave it")


def check_options(mesh: Any, prefetch_bytes: int | None, keep_bytes: KeepChoice, gather: str) -> None:
    """Raises ShardError: the mesh is none, a number of bytes is none, or `gather` is no choice."""
    if mesh is not None and not (hasattr(mesh, "ndim") and hasattr(mesh, "mesh")):
        raise ShardError(
            f"mesh={mesh!r}: give a torch.distributed DeviceMesh of one or two axes, or None for all ranks"
        )
    if prefetch_bytes is not None and (not isinstance(prefetch_bytes, int) or prefetch_bytes < 0):
        raise ShardError(f"prefetch_bytes={prefetch_bytes!r}: give a number of bytes, 0 for none, or None")
    is_number = isinstance(keep_bytes, int) and not isinstance(keep_bytes, bool)
    if not (keep_bytes is None or keep_bytes == "auto" or (is_number and int(keep_bytes) >= 0)):
        raise ShardError(
            f'keep_bytes={keep_bytes!r}: give a number of bytes, "auto" for what the device has left, or None'
        )
    if gather not in get_args(GatherChoice):
        raise ShardError(f"gather={gather!r}: give one of {', '.join(map(repr, get_args(GatherChoice)))}")
