"""DeepSpeed's module `runtime.dataloader`."""

from onefold.deepspeed.loader import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
