"""DeepSpeed's module `utils.groups`: all ranks are data-parallel ranks."""

from typing import Any

from onefold.deepspeed import comm
from onefold.deepspeed.unsupported_names import unsupported


def _get_data_parallel_group() -> Any:
    """The group of all ranks."""
    return comm.get_world_group()


def _get_data_parallel_world_size() -> int:
    """The number of ranks."""
    return comm.get_world_size()


def _get_data_parallel_rank() -> int:
    """This rank."""
    return comm.get_rank()


def _get_model_parallel_world_size() -> int:
    """1: there is no model parallelism."""
    return 1


def _get_sequence_parallel_world_size() -> int:
    """1: there is no sequence parallelism."""
    return 1


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = _get_model_parallel_world_size

_SEQUENCE = ("there is no sequence parallelism", "sequence_parallel_size 1, with activation checkpointing")
_get_sequence_parallel_group = unsupported("utils.groups._get_sequence_parallel_group", *_SEQUENCE)
_get_sequence_parallel_rank = unsupported("utils.groups._get_sequence_parallel_rank", *_SEQUENCE)
_get_expert_parallel_group = unsupported(
    "utils.groups._get_expert_parallel_group", "there is no expert parallelism", "stage 3, which splits experts too"
)
