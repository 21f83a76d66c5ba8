"""Owns `fraction=`: how much of what a plan keeps off the device is kept on it after all."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch

from onefold.comm.comm import Comm
from onefold.errors import PlanError
from onefold.optim import rules
from onefold.optim.kernels.fused import fused_kernel
from onefold.optim.kernels.host import Run, Step, host_kernel
from onefold.plan.mix import UnitBytes, unit_plans
from onefold.plan.table import Plan, Tier
from onefold.tiers.tier import available_bytes

FractionChoice = float | Literal["auto"] | None

_ACTIVATIONS = Fraction(1, 4)
"""The part of the device's memory left for activations."""
_UNITS_AT_WORK = 9
"""Whole units that are alive in a backward beside the states: gradients on their way, gathered parameters."""
_PROBE_NUMEL = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStates:
    """What training one unit takes."""

    size: UnitBytes
    optim: int
    """Bytes of Adam's state with master weights: what other rules keep is less."""
    moments: int = 0
    """Bytes of it that are taken when the optimizer is made."""


def keep_some(
    plan: Plan,
    fraction: FractionChoice,
    units: Sequence[UnitStates],
    comm: Comm,
    device: torch.device,
    present: int,
    num_threads: int,
) -> Plan:
    """`plan` with `fraction` of what it keeps off the device on the device instead. "auto" takes as much as fits there,
    if updates are measured to be faster there; the same on every rank. `present`: as for `room`.

    Raises:
        PlanError: `fraction` is none of a number in [0, 1], "auto" and None.
    """
    if fraction is None:
        return plan
    if fraction != "auto":
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise PlanError(f'fraction={fraction!r}: give a number in [0, 1] to keep on the device, "auto", or None')
        return plan.keeping(fraction)
    available = room(units, comm, device, present)
    told = comm.exchange([int(1e15 * seconds) for seconds in update_seconds(device, num_threads)])
    near, far = (min(each) for each in zip(*told, strict=True))
    kept = fitting(plan, units, comm.num_shards, available) if near < far else Fraction(0)
    logging.getLogger("onefold").info(
        "fraction='auto' keeps %.0f%% on the device: there is room for %.1f GiB beside activations; updating a "
        "parameter takes %.3f ns there and %.3f ns on the host",
        100 * float(kept),
        available / 2**30,
        near / 1e6,
        far / 1e6,
    )
    return plan.keeping(kept)


def room(units: Sequence[UnitStates], comm: Comm, device: torch.device, present: int) -> int:
    """Bytes that states, and units kept gathered, may take on the device: what is free there, less an allowance for
    activations and for units at work; the least of all ranks. It may be negative.

    `present`: bytes of the model's parameters that are there now, and will be moved.
    """
    total, free = device_bytes(device)
    told = comm.exchange([total, free + present * (device.type == "cuda")])
    total, free = (min(each) for each in zip(*told, strict=True))
    largest = max(unit.size.params for unit in units)
    allowance = int(total * _ACTIVATIONS) + _UNITS_AT_WORK * largest
    return int(free - allowance)


def fitting(plan: Plan, units: Sequence[UnitStates], num_shards: int, available: int) -> Fraction:
    """The largest fraction whose states on the device take at most `available` bytes a rank; 0 if none does. It lies in
    the middle of the first unit that does not fit, so that no rounding changes which units do."""
    sizes = [unit.size.grads for unit in units]
    for count in range(len(units), -1, -1):
        rest = sizes[count] if count < len(units) else 0
        kept = Fraction(2 * sum(sizes[:count]) + rest, 2 * sum(sizes) or 1)
        if on_device(plan.keeping(kept), units, num_shards) <= available:
            return kept
    return Fraction(0)


def on_device(plan: Plan, units: Sequence[UnitStates], num_shards: int) -> int:
    """Bytes of states that one rank has on the device, without padding."""
    return sum(on_tier(plan, units, num_shards, Tier.DEVICE))


def on_tier(plan: Plan, units: Sequence[UnitStates], num_shards: int, tier: Tier) -> tuple[int, int]:
    """Bytes of states that one rank has on `tier`, without padding: what `shard` takes, and the optimizer after it."""
    held = moments = 0
    for each, unit in zip(unit_plans(plan, [unit.size for unit in units]), units, strict=True):
        has_twin = each.params.farthest != each.optim.farthest
        for placement, nbytes in (
            (each.params, unit.size.params),
            (each.grads, unit.size.grads),
            (each.optim, unit.optim - unit.moments + has_twin * unit.size.params),
        ):
            if placement.farthest == tier:
                held += -(-nbytes // (num_shards if placement.partitioned else 1))
        if each.optim.farthest == tier:
            moments += -(-unit.moments // (num_shards if each.optim.partitioned else 1))
    return held, moments


def device_bytes(device: torch.device) -> tuple[int, int]:
    """(total, free) bytes of the device's memory; free counts what torch's allocator holds without using it."""
    if device.type != "cuda":
        free = available_bytes()
        return free, free
    free, total = torch.cuda.mem_get_info(device)
    return total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


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
