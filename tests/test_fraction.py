"""Promise: `fraction=` keeps on the device what was asked for, `"auto"` the most that fits, the same on every rank, and
whatever is no fraction is refused.
"""

from fractions import Fraction

import pytest
import torch

import onefold
from inside import insides
from models import Stack, build
from onefold import OFFLOAD, OFFLOAD_3, ZERO_2, Tier
from onefold.errors import PlanError
from onefold.plan.accounting import UnitBytes
from onefold.plan.mix import unit_plans
from onefold.setup import free_memory
from onefold.setup import offload_fraction as choice
from onefold.setup.offload_fraction import fitting

UNITS = [UnitBytes(params=2 * n, grads=2 * n, optim=2 * n, state=8 * n) for n in (100, 7, 7, 7, 50)]
NUMEL = sum(unit.params for unit in UNITS) // 2


def on_device(plan, kept):
    plans = unit_plans(plan.keeping(kept), UNITS)
    return sum(
        nbytes
        for each, unit in zip(plans, UNITS, strict=True)
        for placement, nbytes in zip(
            (each.params, each.grads, each.optim), (unit.params, unit.grads, unit.optim + unit.state), strict=True
        )
        if placement.farthest == Tier.DEVICE
    )


@pytest.mark.parametrize("plan", [OFFLOAD, OFFLOAD_3], ids=["offload", "offload_3"])
@pytest.mark.parametrize("available", [0, 2 * NUMEL, 1700, 1800, 2000, 14 * NUMEL - 1, 14 * NUMEL, 10**6])
def test_the_largest_part_that_fits_is_kept(plan, available):
    kept = fitting(plan, UNITS, 1, available)
    assert on_device(plan, kept) <= max(available, on_device(plan, 0))
    sizes = [unit.grads for unit in UNITS]
    for count in range(len(sizes) + 1):  # of all parts that end with a unit, none larger fits
        other = Fraction(sum(sizes[:count]), sum(sizes))
        assert on_device(plan, other) <= on_device(plan, kept) or on_device(plan, other) > available


def test_more_ranks_keep_more():
    few, many = fitting(OFFLOAD_3, UNITS, 1, 1000), fitting(OFFLOAD_3, UNITS, 4, 1000)
    assert few < many == 1


def chosen(rank, num_ranks, free_bytes, seconds):
    """The plan that "auto" takes where rank 1 has less memory than rank 0."""
    usual = free_memory.device_bytes, choice.update_seconds
    free_memory.device_bytes = lambda device: (0, free_bytes // (1 + rank))
    choice.update_seconds = lambda device, num_threads: seconds
    try:
        model = onefold.shard(build(Stack), OFFLOAD, fraction="auto")
    finally:
        free_memory.device_bytes, choice.update_seconds = usual
    return str(insides(model).plan)


@pytest.mark.parametrize(
    ("free_bytes", "seconds", "want"),
    [
        (10**9, (1e-10, 1e-9), str(ZERO_2)),
        (10**9, (1e-9, 1e-10), str(OFFLOAD)),
        (0, (1e-10, 1e-9), str(OFFLOAD)),
    ],
    ids=["there is room", "the host is faster", "there is none"],
)
def test_auto_takes_what_fits_where_the_device_is_faster(ranks, free_bytes, seconds, want):
    assert ranks(2).run(chosen, free_bytes, seconds) == [want] * 2


def test_speeds_are_measured():
    on_cpu, on_host = choice.update_seconds(torch.device("cpu"), 1)
    assert 0 < on_cpu < 1e-3
    assert 0 < on_host < 1e-3


def test_a_number_is_what_a_plan_keeps():
    model = onefold.shard(build(Stack), OFFLOAD, fraction=0.5)
    assert insides(model).plan == OFFLOAD.keeping(0.5)
    assert OFFLOAD.keeping(0) == OFFLOAD
    assert OFFLOAD.keeping(1) == ZERO_2


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan"), "half", True, [0.5]])
def test_what_is_no_fraction_is_refused(fraction):
    with pytest.raises(PlanError, match="fraction"):
        onefold.shard(build(Stack), OFFLOAD, fraction=fraction)
