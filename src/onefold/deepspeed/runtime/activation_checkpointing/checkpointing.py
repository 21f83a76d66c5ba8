"""`deepspeed.checkpointing` under its long name."""

from onefold.deepspeed.checkpointing import checkpoint, configure, is_configured, non_reentrant_checkpoint, reset

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]
