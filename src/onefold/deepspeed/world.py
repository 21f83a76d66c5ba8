"""Owns how a process of a script becomes a rank: torch.distributed, set up where a launcher says how."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from onefold.comm.comm import join
from onefold.errors import ConfigError
from onefold.system.environment import environ

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Open MPI's: rank, ranks, ranks on this machine."""


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
    """Set up torch.distributed, unless it is: by `init_method`; as `onefold run`, torchrun, DeepSpeed's launcher or
    mpirun say; or, without any of them, with this process as the only rank.

    Args:
        dist_backend: torch's name of it; None chooses by the accelerator.
        auto_mpi_discovery: False does not look for Open MPI's variables.
        distributed_port: where ranks meet that mpirun started, unless MASTER_PORT says otherwise.
        timeout: of a collective; None is torch's own.
        init_method, rank, world_size: as for torch.distributed.init_process_group.
        dist_init_required: False leaves it to the script.
        verbose, config: have no effect here.
    Raises:
        ConfigError: mpirun started ranks on several machines, and MASTER_ADDR does not say where they meet.
    """
    if dist_init_required is False:
        return
    here = environ()
    if init_method is None and not _is_told(here) and auto_mpi_discovery and _is_of_mpi(here):
        init_method, rank, world_size = _by_mpi(here, distributed_port)
    is_alone = init_method is None and not _is_told(here)
    join(
        dist_backend or ("gloo" if accelerator_name() == "cpu" else None),
        timeout=timeout,
        init_method=init_method,
        rank=rank,
        num_ranks=world_size,
        local_rank=local_rank(),
        is_alone=is_alone,
    )


def accelerator_name() -> str:
    """What models train on: "cuda" if torch sees GPUs, else "cpu". DS_ACCELERATOR=cpu leaves GPUs alone.

    Raises:
        ConfigError: DS_ACCELERATOR names a kind that is not there.
    """
    kinds = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    name = environ().get("DS_ACCELERATOR", kinds[0])
    if name not in kinds:
        raise ConfigError(
            f"DS_ACCELERATOR={name}: this process has {' and '.join(kinds)}; unset it, or name one of these"
        )
    return name


def is_launched() -> bool:
    """Whether a launcher told this process which rank it is."""
    return _is_told(environ()) or _is_of_mpi(environ())


def local_rank() -> int:
    """This process's number on its machine; 0 without a launcher."""
    here = environ()
    return int(here.get("LOCAL_RANK", here.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")))


def _is_told(here: Mapping[str, str]) -> bool:
    return all(name in here for name in _LAUNCHED)


def _is_of_mpi(here: Mapping[str, str]) -> bool:
    return all(name in here for name in _MPI)


def _by_mpi(here: Mapping[str, str], port: int) -> tuple[str, int, int]:
    """Where ranks meet that mpirun started, which this is, and how many there are."""
    rank, size, size_here = (int(here[name]) for name in _MPI)
    address = here.get("MASTER_ADDR", "127.0.0.1" if size == size_here else "")
    if not address:
        raise ConfigError(
            f"mpirun started {size} ranks, {size_here} of them on this machine, and nothing says where they meet: "
            "pass MASTER_ADDR, the first machine's name, on to all of them (mpirun -x MASTER_ADDR=...)"
        )
    return f"tcp://{address}:{here.get('MASTER_PORT', port)}", rank, size
