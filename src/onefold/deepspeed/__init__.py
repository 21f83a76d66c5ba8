"""DeepSpeed's configuration and names, in Onefold's terms. Needs pydantic: `pip install onefold[deepspeed]`."""

from onefold.deepspeed.engine import DeepSpeedEngine
from onefold.deepspeed.given import Given
from onefold.deepspeed.initialize import initialize
from onefold.deepspeed.report import report
from onefold.deepspeed.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from onefold.deepspeed.spec import OptimizerSpec, SchedulerSpec, Translation
from onefold.deepspeed.translate import Outcome, Verdict, examine, translate
from onefold.deepspeed.world import init_distributed

__all__ = [
    "DeepSpeedEngine",
    "Given",
    "LRRangeTest",
    "OneCycle",
    "OptimizerSpec",
    "Outcome",
    "SchedulerSpec",
    "Translation",
    "Verdict",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "examine",
    "init_distributed",
    "initialize",
    "report",
    "translate",
]
