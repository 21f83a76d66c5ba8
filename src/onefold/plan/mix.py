"""Owns the choice which units of a mixed plan rest where. Integers only.

[Note: A mix is of units]
A unit's state rests on one tier per kind: a mixed plan is a plan of single tiers for each unit. Units are laid out in
the order forward needs them, nearest tier first, each tier up to its fraction and never above it. So the units that the
next forward needs first are updated on the device, at once, and the host's updates have the whole forward before them
to hide under.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate

from onefold.plan.accounting import UnitBytes
from onefold.plan.table import Placement, Plan, Tier


def unit_plans(plan: Plan, units: Sequence[UnitBytes]) -> list[Plan]:
    """The single-tier plan of each unit; `units` in the order forward uses them. Optimizer state is cut as the
    gradients it belongs to. Law 3 holds for every unit: nothing of it rests farther away than its optimizer state."""
    optim = list(_tiers(plan.optim, [unit.grads for unit in units]))
    grads = _tiers(plan.grads, [unit.grads for unit in units])
    params = _tiers(plan.params, [unit.params for unit in units])
    return [
        Plan(
            params=Placement(plan.params.partitioned, min(of_params, of_optim)),
            grads=Placement(plan.grads.partitioned, min(of_grads, of_optim)),
            optim=Placement(plan.optim.partitioned, of_optim),
        )
        for of_params, of_grads, of_optim in zip(params, grads, optim, strict=True)
    ]


def _tiers(placement: Placement, sizes: Sequence[int]) -> Iterator[Tier]:
    """For each unit the nearest tier whose part of the whole it ends within."""
    limits = list(accumulate((fraction for _, fraction in placement.fractions), initial=Fraction()))[1:]
    limits[-1] = Fraction(1)  # fractions sum to 1 but for what `Placement` rounded
    total = sum(sizes)
    for end in accumulate(sizes):
        yield next(tier for tier, limit in zip(placement.tiers, limits, strict=True) if end <= limit * total)
