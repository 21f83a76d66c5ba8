"""Owns DeepSpeed's module `checkpointing`: activations made again in backward, by torch's own means."""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from onefold.deepspeed.unsupported_names import unsupported
from onefold.errors import ConfigError

_NO_GROUP = "there is no model-parallel group for it to split over"


class _Settings:
    """Whether `configure` was called."""

    def __init__(self) -> None:
        self.is_configured = False


_settings = _Settings()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Ask for activation checkpointing. It needs no settings; those that print, or split activations over a group of
    one rank, change nothing.

    Raises:
        ConfigError: activations on the host are asked for, or a model-parallel group of several ranks.
    """
    if checkpoint_in_cpu:
        raise ConfigError(
            "checkpoint_in_cpu: activations are not moved to the host; nearest: torch.autograd.graph.save_on_cpu "
            "around the model's forward"
        )
    sizes = ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
    size = next((getattr(mpu_, name)() for name in sizes if hasattr(mpu_, name)), 1)
    if size > 1:
        raise ConfigError(f"activations are not split over a model-parallel group (of {size} ranks); leave mpu out")
    _settings.is_configured = True


def is_configured() -> bool:
    """Whether `configure` was called since the last `reset`."""
    return _settings.is_configured


def reset() -> None:
    """Forget `configure`."""
    _settings.is_configured = False


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `function`, and again in backward, with the same random numbers, instead of keeping what it computes."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch's generators. All ranks of a model-parallel group of one rank are this one."""
    torch.manual_seed(seed)


get_cuda_rng_tracker = unsupported("checkpointing.get_cuda_rng_tracker", _NO_GROUP, "torch's own generators")
partition_activations_in_checkpoint = unsupported(
    "checkpointing.partition_activations_in_checkpoint", _NO_GROUP, "checkpoint, which keeps a layer's input alone"
)
