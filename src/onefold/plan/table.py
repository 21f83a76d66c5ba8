"""Owns the table: where parameters, gradients and optimizer state rest. No tensors.

Invariant: a `Plan` that exists is legal. The three laws are checked once, here, so nothing below asks again.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from onefold.errors import PlanError


class Tier(enum.IntEnum):
    """Where bytes rest, nearest to the arithmetic first; a larger value is farther away."""

    DEVICE = 0
    """Accelerator memory (or plain memory when training on CPU): fastest, scarcest."""
    HOST = 1
    """Host memory: each use costs one trip over the host link."""
    DISK = 2
    """Files: each use costs one trip over the disk and the host link."""


@dataclass(frozen=True, slots=True, init=False)
class Placement:
    """One cell of the table: is the state split over the data-parallel ranks, and on which tier does it rest?

    `tier` is one `Tier`, or a mapping from tiers to the fraction of the state that rests there (fractions sum to 1).

    | want                                  | write                                              |
    |---------------------------------------|----------------------------------------------------|
    | every rank holds everything           | `Placement(False, Tier.DEVICE)`                    |
    | each of N ranks holds 1/N             | `Placement(True, Tier.DEVICE)`                     |
    | 30% on the device, the rest on host   | `Placement(True, {Tier.DEVICE: .3, Tier.HOST: .7})` |

    Raises:
        PlanError: a tier is unknown, a fraction is not in (0, 1], or fractions do not sum to 1.
    """

    partitioned: bool
    fractions: tuple[tuple[Tier, Fraction], ...]

    def __init__(self, partitioned: bool, tier: "Tier | Mapping[Tier, float | Fraction]" = Tier.DEVICE) -> None:
        mix: Mapping[Tier, float | Fraction] = (
            {tier: 1} if isinstance(tier, Tier) else dict(tier) if isinstance(tier, Mapping) else {}
        )
        if not mix or not all(isinstance(key, Tier) for key in mix):
            raise PlanError(
                f"a tier is one of {[t.name for t in Tier]} or a mapping of them to fractions, not {tier!r}"
            )
        if not all(0 < value <= 1 for value in mix.values()) or abs(float(sum(mix.values())) - 1) > 1e-5:
            raise PlanError(f"the fractions of a mixed tier are in (0, 1] and sum to 1, not {dict(mix)}")
        exact = {key: Fraction(value).limit_denominator(10**6) for key, value in sorted(mix.items())}
        object.__setattr__(self, "partitioned", bool(partitioned))
        object.__setattr__(self, "fractions", tuple(exact.items()))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that hold a part of this state, nearest first."""
        return tuple(tier for tier, _ in self.fractions)

    @property
    def farthest(self) -> Tier:
        """The farthest tier that holds a part of this state."""
        return self.tiers[-1]

    def keeping(self, fraction: "float | Fraction") -> "Placement":
        """This placement with `fraction` of what rests off the device brought to the device.

        Raises:
            PlanError: `fraction` is not in [0, 1].
        """
        if not 0 <= fraction <= 1:
            raise PlanError(f"the fraction to keep on the device is in [0, 1], not {fraction!r}")
        kept = Fraction(fraction).limit_denominator(10**6)
        mix: dict[Tier, Fraction] = {tier: part * (1 - kept) for tier, part in self.fractions if tier != Tier.DEVICE}
        mix[Tier.DEVICE] = 1 - sum(mix.values(), Fraction())
        return Placement(self.partitioned, {tier: part for tier, part in mix.items() if part})

    def __str__(self) -> str:
        where = " + ".join(t.name.lower() if f == 1 else f"{float(f):.0%} {t.name.lower()}" for t, f in self.fractions)
        return f"{'part' if self.partitioned else 'whole'}, {where}"


LAWS = (
    "law 1: partitioning spreads upward (partitioned params need partitioned grads, those need partitioned optim)",
    "law 2: what leaves the device is partitioned",
    "law 3: nothing rests farther away than the optimizer state that refreshes it",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The table: one `Placement` each for parameters, gradients and optimizer state.

    Raises:
        PlanError: the table breaks one of the three laws; the message names the law and the nearest legal table.
    """

    params: Placement
    grads: Placement
    optim: Placement

    def __post_init__(self) -> None:
        for kind in ("params", "grads", "optim"):
            if not isinstance(getattr(self, kind), Placement):
                raise PlanError(f"{kind} of a Plan is a Placement, not {getattr(self, kind)!r}")
        params, grads, optim = self.params, self.grads, self.optim
        if params.partitioned > grads.partitioned or grads.partitioned > optim.partitioned:
            self._refuse(0, "partition the optimizer state first, then the gradients, then the parameters")
        for kind, placement in (("params", params), ("grads", grads), ("optim", optim)):
            if placement.farthest > Tier.DEVICE and not placement.partitioned:
                self._refuse(1, f"make {kind} partitioned, or keep it on DEVICE")
        for kind, placement in (("params", params), ("grads", grads)):
            if placement.farthest > optim.farthest:
                self._refuse(
                    2, f"move optim to {placement.farthest.name} too, or bring {kind} back to {optim.farthest.name}"
                )

    @property
    def tiers(self) -> frozenset[Tier]:
        """The tiers that hold a part of any state."""
        return frozenset(tier for placement in (self.params, self.grads, self.optim) for tier in placement.tiers)

    def keeping(self, fraction: "float | Fraction") -> "Plan":
        """This plan with `fraction` of everything it keeps off the device on the device instead: `OFFLOAD.keeping(0.5)`
        is halfway between OFFLOAD and ZERO_2.

        Raises:
            PlanError: `fraction` is not in [0, 1].
        """
        return Plan(*(placement.keeping(fraction) for placement in (self.params, self.grads, self.optim)))

    def _refuse(self, law: int, way_out: str) -> None:
        raise PlanError(f"{self} breaks {LAWS[law]}; {way_out}")

    def __str__(self) -> str:
        return f"Plan(params: {self.params}; grads: {self.grads}; optim: {self.optim})"


_WHOLE, _PART = Placement(False, Tier.DEVICE), Placement(True, Tier.DEVICE)
_HOST, _DISK = Placement(True, Tier.HOST), Placement(True, Tier.DISK)

ZERO_0 = Plan(params=_WHOLE, grads=_WHOLE, optim=_WHOLE)
"""Plain data parallelism: every rank holds everything."""
ZERO_1 = Plan(params=_WHOLE, grads=_WHOLE, optim=_PART)
"""Optimizer state split over the ranks (P_os)."""
ZERO_2 = Plan(params=_WHOLE, grads=_PART, optim=_PART)
"""Optimizer state and gradients split (P_os+g)."""
ZERO_3 = Plan(params=_PART, grads=_PART, optim=_PART)
"""Everything split (P_os+g+p): memory falls with the number of ranks, 1.5x the traffic."""
OFFLOAD = Plan(params=_WHOLE, grads=_HOST, optim=_HOST)
"""ZeRO-Offload: gradients and optimizer state in host memory."""
OFFLOAD_3 = Plan(params=_HOST, grads=_HOST, optim=_HOST)
"""ZeRO-3 with everything in host memory."""
INFINITY = Plan(params=_DISK, grads=_HOST, optim=_DISK)
"""ZeRO-Infinity: parameters and optimizer state on disk."""

NAMED_PLANS: Mapping[str, Plan] = {
    "zero_0": ZERO_0,
    "zero_1": ZERO_1,
    "zero_2": ZERO_2,
    "zero_3": ZERO_3,
    "offload": OFFLOAD,
    "offload_3": OFFLOAD_3,
    "infinity": INFINITY,
}


def legal_plans() -> list[Plan]:
    """All single-tier tables that obey the three laws: 24 of 216."""
    cells = [(partitioned, tier) for partitioned in (False, True) for tier in Tier]
    plans = []
    for params, grads, optim in product(cells, repeat=3):
        try:
            plans.append(Plan(Placement(*params), Placement(*grads), Placement(*optim)))
        except PlanError:
            continue
    return plans
