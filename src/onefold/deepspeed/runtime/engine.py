"""DeepSpeed's module `runtime.engine`."""

from onefold.deepspeed.client_optimizer import DeepSpeedOptimizer
from onefold.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine", "DeepSpeedOptimizer"]
