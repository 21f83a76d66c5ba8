"""DeepSpeed's module `runtime.lr_schedules`: schedules by name, and the names."""

from onefold.deepspeed.schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

__all__ = ["VALID_LR_SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

VALID_LR_SCHEDULES = list(SCHEDULES)
