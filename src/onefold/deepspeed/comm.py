"""Owns DeepSpeed's module `comm`: torch.distributed under DeepSpeed's names, and setting it up."""

import os
from collections.abc import Sequence
from datetime import timedelta
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

from onefold.deepspeed.refused import refused
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
log_summary = refused("comm.log_summary", *_LOG)
allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor
inference_all_reduce = all_reduce

_MPI = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Set up torch.distributed, unless that was done: as a launcher says; as the one rank there is, without one.

    Args:
        dist_backend: None is NCCL with gloo for host memory on a machine with GPUs, else gloo.
        distributed_port: of rank 0, where the launcher names none.
        timeout: of collectives; None is torch's.
        init_method, rank, world_size: as for `torch.distributed.init_process_group`.
        dist_init_required: False: the caller did it.
        auto_mpi_discovery: take rank and size from Open MPI's or MPICH's variables where others are missing.
        verbose, config: taken, and of no effect.

    Raises:
        ConfigError: the caller did not do it, or MPI started several ranks and MASTER_ADDR is not set.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError("torch.distributed is not initialized, and dist_init_required=False says that it is")
    has_gpu = torch.cuda.is_available()
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    if has_gpu:
        torch.cuda.set_device(get_local_rank())
    limit = {} if timeout is None else {"timeout": timeout}
    if init_method is not None or rank >= 0:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, **limit)
        return
    found = _from_mpi() if auto_mpi_discovery and "RANK" not in os.environ else None
    if "RANK" in os.environ:
        dist.init_process_group(backend, **limit)
    elif found is not None:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1" if found[1] == 1 else "")
        if not host:
            raise ConfigError(f"MPI started {found[1]} ranks: set MASTER_ADDR to the host of rank 0")
        meeting = f"tcp://{host}:{os.environ.get('MASTER_PORT', distributed_port)}"
        dist.init_process_group(backend, init_method=meeting, rank=found[0], world_size=found[1], **limit)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **limit)


def _from_mpi() -> tuple[int, int] | None:
    """Rank and number of ranks, as an MPI launcher says."""
    for rank, size in _MPI:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return None


def get_local_rank() -> int:
    """This rank's number on its machine; 0 where no launcher says."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")))


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
    return dist.init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))
