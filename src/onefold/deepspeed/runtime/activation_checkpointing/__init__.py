"""DeepSpeed's package of this name: `checkpointing` under its long name."""

from onefold.deepspeed import checkpointing

__all__ = ["checkpointing"]
