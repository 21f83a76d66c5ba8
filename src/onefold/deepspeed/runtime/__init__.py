"""DeepSpeed's package `runtime`: public names under their long ones."""

from onefold.deepspeed.runtime import activation_checkpointing, dataloader, lr_schedules, utils, zero

__all__ = ["activation_checkpointing", "dataloader", "lr_schedules", "utils", "zero"]
