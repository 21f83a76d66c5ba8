"""Owns how a process of a script becomes a rank: torch.distributed, set up where a launcher says how."""

from datetime import timedelta
from typing import Any

from onefold.comm import join
from onefold.errors import ConfigError
from onefold.launch import environ

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    """Set up torch.distributed, unless it is: as `onefold run`, torchrun or DeepSpeed's launcher say, by `init_method`,
    or, without any of them, with this process as the only rank.

    Args:
        dist_backend: torch's name of it; None chooses by whether there are GPUs.
        timeout: of a collective; None is torch's own.
        init_method, rank, world_size: as for torch.distributed.init_process_group.
        dist_init_required: False leaves it to the script.
        auto_mpi_discovery, distributed_port, verbose, config: have no effect here.
    Raises:
        ConfigError: MPI started this process, which says nothing that torch understands.
    """
    if dist_init_required is False:
        return  # the script does it, or `shard` where a launcher says how
    is_told = init_method is not None or is_launched()
    if not is_told and int(environ().get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "MPI started these processes, and they do not find each other: start the script with `onefold run` or "
            "torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each"
        )
    join(dist_backend, timeout=timeout, init_method=init_method, rank=rank, num_ranks=world_size, is_alone=not is_told)


def is_launched() -> bool:
    """Whether a launcher told this process who it is."""
    return all(name in environ() for name in _LAUNCHED)


def local_rank() -> int:
    """This process's number on its machine; 0 without a launcher."""
    return int(environ().get("LOCAL_RANK", "0"))
