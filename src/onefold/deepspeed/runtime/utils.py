"""DeepSpeed's module `runtime.utils`, as far as scripts use it."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from onefold.deepspeed import comm
from onefold.deepspeed.accelerator import get_accelerator
from onefold.deepspeed.unsupported_names import unsupported
from onefold.deepspeed.utils.logging import logger

__all__ = [
    "clip_grad_norm_",
    "empty_cache",
    "get_only_unique_item",
    "move_to_device",
    "noop_decorator",
    "see_memory_usage",
]

clip_grad_norm_ = unsupported(
    "runtime.utils.clip_grad_norm_", "gradients rest in shards when it could be called", "gradient_clipping"
)


def see_memory_usage(message: str, force: bool = False) -> None:
    """With `force`, log what this process has of its device's memory, on rank 0."""
    if not force or (comm.is_initialized() and comm.get_rank() != 0):
        return
    device: Any = get_accelerator()
    now, most = (nbytes / 2**30 for nbytes in (device.memory_allocated(), device.max_memory_allocated()))
    logger.warning("%s: %.2f GiB allocated, %.2f at most", message, now, most)


def empty_cache() -> None:
    """Give back what is cached."""
    gc.collect()
    device: Any = get_accelerator()
    device.empty_cache()


def move_to_device(item: Any, device: "torch.device | str", criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item` with every tensor in it (lists, tuples and dicts) on `device`; those that `criterion_func` picks are moved
    themselves, so that every reference to them sees the move."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if criterion_func is None or not criterion_func(leaf):
            return leaf.to(device)
        leaf.data = leaf.data.to(device)
        return leaf

    return tree_map(move, item)


def noop_decorator(func: Any) -> Any:
    """`func` itself."""
    return func


def get_only_unique_item(items: Any) -> Any:
    """The one value that all of `items` have.

    Raises:
        ValueError: there is none, or there are several.
    """
    (found,) = set(items)
    return found
