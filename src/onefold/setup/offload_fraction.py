"""Owns `fraction=`: how much of what a plan keeps off the device is kept on it after all."""

import logging
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

import torch

from onefold.errors import PlanError
from onefold.optim import rules
from onefold.optim.kernels.fused import fused_kernel
from onefold.optim.kernels.host import Run, Step, host_kernel
from onefold.plan.accounting import UnitBytes
from onefold.plan.budget import Budget
from onefold.plan.table import Plan
from onefold.setup.free_memory import Demand

FractionChoice = float | Literal["auto"] | None

_PROBE_NUMEL = 2**22


def with_fraction(plan: Plan, fraction: FractionChoice, demand: Demand, num_threads: int) -> Plan:
    """`plan` with `fraction` of what it keeps off the device on the device instead. "auto" takes as much as fits there,
    if updates are measured to be faster there; the same on every rank.

    Raises:
        PlanError: `fraction` is none of a number in [0, 1], "auto" and None.
    """
    if fraction is None:
        return plan
    if fraction != "auto":
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise PlanError(f'fraction={fraction!r}: give a number in [0, 1] to keep on the device, "auto", or None')
        return plan.keeping(fraction)
    available = demand.room()
    told = demand.comm.exchange([int(1e15 * seconds) for seconds in update_seconds(demand.device, num_threads)])
    near, far = (min(each) for each in zip(*told, strict=True))
    kept = fitting(plan, demand.units, demand.comm.num_shards, available) if near < far else Fraction(0)
    logging.getLogger("onefold").info(
        "fraction='auto' keeps %.0f%% on the device: there is room for %.1f GiB beside activations; updating a "
        "parameter takes %.3f ns there and %.3f ns on the host",
        100 * float(kept),
        available / 2**30,
        near / 1e6,
        far / 1e6,
    )
    return plan.keeping(kept)


def fitting(plan: Plan, units: Sequence[UnitBytes], num_shards: int, available: int) -> Fraction:
    """The largest fraction whose states on the device take at most `available` bytes a rank; 0 if none does. It lies in
    the middle of the first unit that does not fit, so that no rounding changes which units do."""
    sizes = [unit.grads for unit in units]
    for count in range(len(units), -1, -1):
        rest = sizes[count] if count < len(units) else 0
        kept = Fraction(2 * sum(sizes[:count]) + rest, 2 * sum(sizes) or 1)
        if Budget.at_rest(plan.keeping(kept), units, num_shards).device_bytes <= available:
            return kept
    return Fraction(0)


def update_seconds(device: torch.device, num_threads: int) -> tuple[float, float]:
    """Measured seconds a parameter of AdamW's update in fp32: on the device, and on the host."""
    rule, host = rules.AdamW(), torch.device("cpu")
    step = Step(rule=rule, hyper=rule.defaults(), number=1)

    def run(where: torch.device) -> Run:
        weight, grad, mean, square = (torch.zeros(_PROBE_NUMEL, device=where) for _ in range(4))
        return Run(weight=weight, exact=None, grad=grad, state={"exp_avg": mean, "exp_avg_sq": square})

    near, far, fused = run(device), run(host), fused_kernel(device)

    def update_near() -> None:
        if fused is None:
            rule.update(near.weight, near.grad, near.state, step.hyper, step.number)
        else:
            fused.update(near, step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return _best(update_near), _best(lambda: host_kernel(num_threads).update(far, step))


def _best(update: Callable[[], None]) -> float:
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    return min(seconds) / _PROBE_NUMEL
