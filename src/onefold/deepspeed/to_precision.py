"""Owns the way to a `Precision`: `fp16`, `bf16`, `torch_autocast`, `data_types` and the like as one."""

import torch

from onefold.deepspeed.sections import BF16, FP16, DataTypes
from onefold.deepspeed.walk import Findings
from onefold.plan.precision import DynamicLossScale, Precision

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "half": torch.float16}
_AUTOCAST_SCALE = DynamicLossScale(initial=2.0**16, window=2000, hysteresis=1, raise_at_minimum=False)


def precision_of(findings: Findings) -> Precision:
    """What is computed, summed and kept in which format. Neither fp16 nor bf16: the parameters stay as they are."""
    config = findings.config
    half, brain = config.fp16 or FP16(), config.bf16 or BF16()
    if half.enabled and brain.enabled:
        findings.refuse("bf16.enabled", "fp16.enabled is true too; choose one")
        half = FP16()
    reduce = _reduce(findings)
    if half.enabled:
        precision = Precision("fp16", reduce, _loss_scale(findings, half), cast_inputs=half.auto_cast)
    elif brain.enabled:
        precision = Precision("bf16", reduce, cast_inputs=False)
    else:
        scale = _AUTOCAST_SCALE if autocast_of(findings) == torch.float16 else None
        precision = Precision(None, reduce, scale, cast_inputs=False)
    for name, section in (("fp16", half), ("bf16", brain)):
        if not section.enabled:
            for key in findings.keys:
                if key.path.startswith(f"{name}.") and key.path != f"{name}.enabled":
                    findings.note(key.path, f"{name} is off", "ignored")
            findings.note(f"{name}.enabled", "off")
    return precision


def _loss_scale(findings: Findings, half: FP16) -> float | DynamicLossScale:
    if half.loss_scale > 0:
        for name in ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"):
            findings.note(f"fp16.{name}", "the loss scale is fixed", "ignored")
        findings.note("fp16.min_loss_scale", "the loss scale is fixed", "ignored")
        findings.note("fp16.loss_scale", f"fixed at {half.loss_scale:g}")
        return half.loss_scale
    initial = 2.0**half.initial_scale_power
    if half.min_loss_scale > initial:
        findings.refuse(
            "fp16.min_loss_scale",
            f"{half.min_loss_scale:g} is above the scale to start from, {initial:g}; lower it, or raise "
            "initial_scale_power",
        )
    findings.note("fp16.loss_scale", f"dynamic, from {initial:g}")
    return DynamicLossScale(
        initial=initial,
        window=half.loss_scale_window,
        hysteresis=half.hysteresis,
        consecutive_hysteresis=half.consecutive_hysteresis,
        minimum=half.min_loss_scale,
    )


def _reduce(findings: Findings) -> str | None:
    config = findings.config
    kept = (config.data_types or DataTypes()).grad_accum_dtype
    wire = config.communication_data_type
    if config.fp32_allreduce:
        if wire not in (None, "fp32"):
            findings.refuse("communication_data_type", f"{wire}, and fp32_allreduce is true; choose one")
        wire = "fp32"
    if kept is not None and wire is not None and kept != wire:
        findings.refuse(
            "data_types.grad_accum_dtype",
            f"gradients are summed over the ranks and kept in one format: {kept} here, {wire} there; choose one",
        )
    return wire or kept


def autocast_of(findings: Findings) -> torch.dtype | None:
    """The dtype of `torch.autocast` around the forward pass; None for none."""
    section = findings.config.torch_autocast
    if section is None or not section.enabled:
        for key in findings.keys:
            if key.path.startswith("torch_autocast.") and key.path != "torch_autocast.enabled":
                findings.note(key.path, "torch_autocast is off", "ignored")
        return None
    name = section.dtype.removeprefix("torch.")
    return _AUTOCAST.get(name) or (torch.float16 if name == "float16" else torch.bfloat16)
