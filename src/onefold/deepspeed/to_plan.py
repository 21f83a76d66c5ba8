"""Owns the way to a plan: `zero_optimization` as three placements, and how much is gathered ahead."""

from fractions import Fraction

import torch

from onefold.deepspeed.walk import Findings
from onefold.deepspeed.zero_section import OffloadOptimizer, OffloadParam, Zero
from onefold.plan.precision import Precision
from onefold.plan.table import NAMED_PLANS, Placement, Plan, Tier

_PATH = "zero_optimization"
_WHOLE, _PART, _HOST = Placement(False), Placement(True), Placement(True, Tier.HOST)


def plan_of(findings: Findings) -> Plan:
    """Where parameters, gradients and optimizer state rest."""
    zero = findings.config.zero_optimization or Zero()
    optim, params = _devices(findings, zero)
    if zero.stage == 0 and optim:
        findings.refuse(
            _device(findings, "offload_optimizer"),
            "stage 0 keeps everything whole, and what leaves the device is partitioned; nearest: stage 2",
        )
        optim = False
    if zero.stage < 3 and params:
        findings.note(_device(findings, "offload_param"), "parameters leave the device at stage 3 only", "ignored")
        params = False
    if params and not optim:
        findings.note(
            _device(findings, "offload_param"),
            "OFFLOAD_3: the optimizer state follows to the host, for nothing rests farther away than it",
            "adapted",
        )
    plan = Plan(
        params=_HOST if params else _PART if zero.stage == 3 else _WHOLE,
        grads=_HOST if (params or optim) and zero.stage >= 2 else _PART if zero.stage >= 2 else _WHOLE,
        optim=_HOST if params or optim else _PART if zero.stage >= 1 else _WHOLE,
    )
    plan = _keeping(findings, zero, plan)
    findings.note(f"{_PATH}.stage", plan_name(plan))
    return plan


def plan_name(plan: Plan) -> str:
    """The name of `plan`, or its table."""
    return next((name.upper() for name, each in NAMED_PLANS.items() if each == plan), str(plan))


def _keeping(findings: Findings, zero: Zero, plan: Plan) -> Plan:
    """`plan` with the share of the state that `ratio` leaves on the device."""
    ratio = (zero.offload_optimizer or OffloadOptimizer()).ratio
    path = f"{_PATH}.offload_optimizer.ratio"
    if plan.optim.farthest == Tier.DEVICE:
        findings.note(path, "nothing is off the device", "ignored")
        return plan
    kept = 1 - Fraction(ratio).limit_denominator(10**6)
    if kept and plan.params.farthest > Tier.DEVICE:
        findings.note(path, f"{float(kept):.3g} of everything stays on the device, parameters included", "adapted")
    return plan.keeping(kept)


def _devices(findings: Findings, zero: Zero) -> tuple[bool, bool]:
    """Whether optimizer state and parameters leave the device."""
    optim = _leaves(findings, "offload_optimizer", zero.offload_optimizer, zero.cpu_offload)
    older = zero.cpu_offload_param if zero.cpu_offload_param is not None else zero.cpu_offload_params
    return optim, _leaves(findings, "offload_param", zero.offload_param, older)


def _leaves(findings: Findings, name: str, section: OffloadOptimizer | OffloadParam | None, older: bool | None) -> bool:
    device = "none" if section is None else section.device
    if older is not None and section is not None and older != (device != "none"):
        path = _device(findings, name)
        findings.refuse(path, f"{device}, and an older key says {str(older).lower()}; keep one of them")
    if device == "nvme":
        findings.refuse(f"{_PATH}.{name}.device", "state does not rest on disks in this version; nearest: cpu")
    return device != "none" or bool(older)


def _device(findings: Findings, name: str) -> str:
    """The key that made state leave the device."""
    older = ("cpu_offload",) if name == "offload_optimizer" else ("cpu_offload_param", "cpu_offload_params")
    paths = [f"{_PATH}.{name}.device", *(f"{_PATH}.{key}" for key in older)]
    return next((path for path in paths if findings.key(path)), paths[0])


def prefetch_of(findings: Findings, plan: Plan, precision: Precision) -> int | None:
    """Bytes of parameters to gather ahead; None leaves it to `shard`."""
    zero = findings.config.zero_optimization or Zero()
    wanted, most = f"{_PATH}.stage3_prefetch_bucket_size", f"{_PATH}.stage3_max_live_parameters"
    if not plan.params.partitioned:
        findings.note(wanted, "parameters are whole: nothing is gathered", "ignored")
        findings.note(most, "parameters are whole: nothing is gathered", "ignored")
        return None
    if "stage3_prefetch_bucket_size" not in zero.model_fields_set:
        return None
    elements = min(zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters)
    dtype = precision.params if isinstance(precision.params, torch.dtype) else findings.given.model_dtype
    size = elements * (dtype or torch.float32).itemsize
    findings.note(wanted, f"prefetch_bytes={size}")
    return size
