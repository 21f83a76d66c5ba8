"""Owns DeepSpeed's module `comm`: torch.distributed under DeepSpeed's names."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (
    ProcessGroup,
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_global_rank,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)
from torch.distributed.device_mesh import init_device_mesh

from onefold.deepspeed.unsupported_names import unsupported
from onefold.deepspeed.world import init_distributed, local_rank
from onefold.errors import ConfigError

__all__ = [
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "world_group",
]

_LOG = ("collectives are not logged", "torch.profiler, whose traces have a label for each collective")
log_summary = unsupported("comm.log_summary", *_LOG)
allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor
inference_all_reduce = all_reduce

get_local_rank = local_rank


def world_group() -> Any:
    """The group of all ranks; None before torch.distributed is set up."""
    return dist.group.WORLD if dist.is_initialized() else None


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks in `group`, of all if None."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def has_all_gather_into_tensor() -> bool:
    """True."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """True."""
    return True


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduce each of `tensors`.

    Raises:
        ConfigError: with async_op, for which there would be several handles.
    """
    if async_op:
        raise ConfigError("all_reduce_coalesced(async_op=True): call all_reduce(tensor, async_op=True) for each tensor")
    for tensor in tensors:
        all_reduce(tensor, op, group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """A DeviceMesh, as `torch.distributed.init_device_mesh` makes it."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))
