"""Owns the keys of `optimizer.params` and `scheduler.params`, one section for each type DeepSpeed names."""

from typing import Annotated, ClassVar, Literal

from onefold.deepspeed.key_support import Section, honoured, ignored, refused
from onefold.deepspeed.values import (
    Anything,
    Betas,
    Count,
    Flag,
    Integer,
    MaybeCount,
    MaybeFlag,
    MaybeFree,
    MaybePerGroup,
    NonNegative,
    Number,
    PerGroup,
    Positive,
    Text,
    one_of,
    real,
)

_AS_IS = "the optimizer's argument of this name"
_FUSED = "which kernel updates is chosen by where the state rests"


class OptimizerParams(Section):
    """What all optimizers take."""

    lr: NonNegative = honoured(1e-3, _AS_IS)
    weight_decay: NonNegative = honoured(0.0, _AS_IS)
    max_grad_norm: Anything = refused(
        None, "clipping belongs to the run, not to the optimizer", "leave it out and set gradient_clipping"
    )


class AdamParams(OptimizerParams):
    """`Adam` and `AdamW`."""

    aliases: ClassVar[dict[str, str]] = {"adamw_mode": "adam_w_mode"}

    betas: Betas = honoured((0.9, 0.999), _AS_IS)
    eps: NonNegative = honoured(1e-8, _AS_IS)
    amsgrad: Flag = honoured(False, _AS_IS)
    bias_correction: Flag = honoured(True, "false: an AdamW or Adam whose moments are not corrected")
    adam_w_mode: Flag = honoured(True, "weight decay decoupled (AdamW) or, with type Adam, as an L2 term (Adam)")
    torch_adam: Flag = honoured(False, "the default of weight_decay: 0.01 when true and decoupled, else 0")
    set_grad_none: Flag = ignored(True, "zero_grad decides that")
    fp32_optimizer_states: Flag = ignored(True, "moments are always kept in fp32")
    foreach: MaybeFlag = ignored(None, _FUSED)
    fused: MaybeFlag = ignored(None, _FUSED)


class AdagradParams(OptimizerParams):
    """`Adagrad`."""

    lr: NonNegative = honoured(1e-2, _AS_IS)
    eps: NonNegative = honoured(1e-10, _AS_IS)
    lr_decay: NonNegative = honoured(0.0, _AS_IS)
    initial_accumulator_value: NonNegative = honoured(0.0, _AS_IS)


class LionParams(OptimizerParams):
    """`Lion`."""

    betas: Betas = honoured((0.9, 0.99), _AS_IS)
    set_grad_none: Flag = ignored(True, "zero_grad decides that")


OPTIMIZERS: dict[str, type[OptimizerParams]] = {
    "adam": AdamParams,
    "adamw": AdamParams,
    "adagrad": AdagradParams,
    "lion": LionParams,
}
"""By lower-case type; any other type is looked up in torch.optim."""

_MATRIX = "looks at whole matrices, and a rank holds parts of them"
NO_OPTIMIZERS: dict[str, tuple[str, str]] = {
    "lamb": ("LAMB scales each layer by a norm over the whole of it; rules here look at single elements", "AdamW"),
    "onebitadam": ("1-bit compressed communication is not supported", "AdamW"),
    "onebitlamb": ("1-bit compressed communication is not supported", "AdamW"),
    "zerooneadam": ("1-bit compressed communication is not supported", "AdamW"),
    "muon": (f"Muon {_MATRIX}", "AdamW"),
    "muadam": ("muP's learning rates come from the mup package", "AdamW with parameter groups of your own"),
    "muadamw": ("muP's learning rates come from the mup package", "AdamW with parameter groups of your own"),
    "musgd": ("muP's learning rates come from the mup package", "SGD with parameter groups of your own"),
    "adafactor": (f"Adafactor {_MATRIX}", "AdamW, or Lion for less state"),
    "lbfgs": ("LBFGS needs the loss several times a step", "AdamW"),
    "sparseadam": ("sparse gradients are not supported", "AdamW"),
}
"""Lower-case types that are refused: why, and the nearest."""


class OptimizerSection(Section):
    """`optimizer`."""

    type: Text = honoured(..., "the optimizer's class; Adam is AdamW unless adam_w_mode is false")
    params: MaybeFree = honoured(None, "the arguments of that class")
    legacy_fusion: Flag = ignored(False, _FUSED)


WarmupType = Annotated[Literal["log", "linear"], one_of("log", "linear")]
_SCHEDULE = "the schedule's argument of this name, with DeepSpeed's formula"


class ScheduleParams(Section):
    """What all schedules take."""

    last_batch_iteration: Integer = ignored(-1, "a schedule's place comes back with its state_dict")


class WarmupParams(ScheduleParams):
    """`WarmupLR`."""

    warmup_min_lr: PerGroup = honoured(0.0, _SCHEDULE)
    warmup_max_lr: MaybePerGroup = honoured(None, _SCHEDULE)
    warmup_num_steps: Count = honoured(1000, f"{_SCHEDULE}; at least 2")
    warmup_type: WarmupType = honoured("log", _SCHEDULE)


class WarmupDecayParams(WarmupParams):
    """`WarmupDecayLR`."""

    warmup_max_lr: PerGroup = honoured(0.001, _SCHEDULE)
    total_num_steps: Positive = honoured(..., _SCHEDULE)


class WarmupCosineParams(ScheduleParams):
    """`WarmupCosineLR`."""

    total_num_steps: Positive = honoured(..., _SCHEDULE)
    warmup_min_ratio: NonNegative = honoured(0.0, _SCHEDULE)
    warmup_num_steps: Count = honoured(1000, f"{_SCHEDULE}; at least 2")
    cos_min_ratio: NonNegative = honoured(0.0001, _SCHEDULE)
    warmup_type: WarmupType = honoured("log", _SCHEDULE)


class OneCycleParams(ScheduleParams):
    """`OneCycle`."""

    cycle_min_lr: PerGroup = honoured(..., _SCHEDULE)
    cycle_max_lr: PerGroup = honoured(..., _SCHEDULE)
    decay_lr_rate: Number = honoured(0.0, _SCHEDULE)
    cycle_first_step_size: Positive = honoured(2000, _SCHEDULE)
    cycle_second_step_size: MaybeCount = honoured(None, _SCHEDULE)
    cycle_first_stair_count: Count = honoured(0, _SCHEDULE)
    cycle_second_stair_count: MaybeCount = honoured(None, _SCHEDULE)
    decay_step_size: Count = honoured(0, _SCHEDULE)
    cycle_momentum: Flag = honoured(True, f"{_SCHEDULE}; without effect where the optimizer has no betas")
    cycle_min_mom: PerGroup = honoured(0.8, _SCHEDULE)
    cycle_max_mom: PerGroup = honoured(0.9, _SCHEDULE)
    decay_mom_rate: Number = honoured(0.0, _SCHEDULE)


class LRRangeTestParams(ScheduleParams):
    """`LRRangeTest`."""

    lr_range_test_min_lr: PerGroup = honoured(1e-3, _SCHEDULE)
    lr_range_test_step_size: Positive = honoured(2000, _SCHEDULE)
    lr_range_test_step_rate: Annotated[float, real(0)] = honoured(1.0, _SCHEDULE)
    lr_range_test_staircase: Flag = honoured(False, _SCHEDULE)


SCHEDULERS: dict[str, type[ScheduleParams]] = {
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}


class SchedulerSection(Section):
    """`scheduler`."""

    type: Text = honoured(..., "the schedule's class: DeepSpeed's five, or one of torch.optim.lr_scheduler")
    params: MaybeFree = honoured(None, "the arguments of that class")
