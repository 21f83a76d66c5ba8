"""Owns what launchers other than torchrun say in the environment of the processes that they start: how many ranks there
are, and which of them this process is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from onefold.errors import ShardError


@dataclass(frozen=True, kw_only=True)
class _Names:
    """The variables of one launcher."""

    by: str
    rank: str
    num_ranks: str
    local_rank: str


_LAUNCHERS = (
    # Kubernetes' PyTorchJob, and whatever else follows torch's env://.
    _Names(by="the environment", rank="RANK", num_ranks="WORLD_SIZE", local_rank="LOCAL_RANK"),
    _Names(
        by="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        num_ranks="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    _Names(by="MPI", rank="PMI_RANK", num_ranks="PMI_SIZE", local_rank="MPI_LOCALRANKID"),
    # Of a step that srun started: SLURM_NTASKS is there in a batch script, too, which is one process.
    _Names(by="srun", rank="SLURM_PROCID", num_ranks="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID"),
)
MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""Where ranks meet, in torch's words."""


@dataclass(frozen=True, kw_only=True)
class Announced:
    """This process, as its launcher has it."""

    rank: int
    num_ranks: int
    local_rank: int


def announced_rank(here: Mapping[str, str]) -> Announced | None:
    """Which rank the process with this environment is; None where nobody says that there are others.

    Raises:
        ShardError: there are others, and it is not said which one this is, or where they meet.
    """
    names = next((names for names in _LAUNCHERS if names.num_ranks in here), None)
    if names is None or not range(1, _number(here, names.num_ranks)):
        return None
    way = (
        f"To train with them, set RANK and WORLD_SIZE, and {' and '.join(MEETING)} to where rank 0 listens, the same "
        "on all of them (or start the script with `onefold run` or torchrun, or call "
        f"torch.distributed.init_process_group before onefold.shard); to train alone, unset {names.num_ranks}"
    )
    missing = [name for name in (names.rank, *MEETING) if not here.get(name)]
    if missing:
        raise ShardError(
            f"{names.by} says that this process is one of {here[names.num_ranks]} ranks ({names.num_ranks}), but not "
            f"{' and '.join(missing)}: it would train alone. {way}"
        )
    rank, num_ranks = _number(here, names.rank), _number(here, names.num_ranks)
    if rank not in range(num_ranks):
        raise ShardError(f"{names.by} says {names.rank}={rank} of {names.num_ranks}={num_ranks} ranks. {way}")
    local = _number(here, names.local_rank) if names.local_rank in here else 0
    return Announced(rank=rank, num_ranks=num_ranks, local_rank=local)


def _number(here: Mapping[str, str], name: str) -> int:
    try:
        return int(here[name])
    except ValueError:
        raise ShardError(f"{name}={here[name]!r} in the environment is to be a whole number") from None
