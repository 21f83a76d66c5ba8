"""Owns the accounting: bytes one rank holds on each tier, and elements a step puts on the wire.

Integers only - no tensors, no torch. Everything is derived from a `Plan`'s placements and from `Layout`s, never from a
plan's name. Invariant: all ranks hold the same number of bytes (shards are equal), so a `Budget` speaks for each rank.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onefold.errors import PlanError
from onefold.plan.accounting import FlatSpec, UnitBytes, rank_bytes
from onefold.plan.mix import unit_plans
from onefold.plan.table import Placement, Plan, Tier

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one rank holds between steps and what one step moves.

    Wire counts follow the ZeRO paper (section 7): an all-gather or a reduce-scatter of a buffer of Psi elements counts
    Psi, an all-reduce counts 2 Psi, whatever the number of ranks. Psi includes padding.

    | plan              | after backward         | after the update | in forward and backward | wire  |
    |-------------------|------------------------|------------------|-------------------------|-------|
    | nothing split     | all-reduce, 2 Psi      |                  |                         | 2 Psi |
    | optim split       | reduce-scatter, Psi    | all-gather, Psi  |                         | 2 Psi |
    | params split too  | reduce-scatter, Psi    |                  | two all-gathers, 2 Psi  | 3 Psi |

    Frozen parameters are never reduced nor refreshed; when params are split they are gathered like any other.

    A part is one of as many as ranks share (the shard axis of a mesh of two axes). Where replicas hold each part again,
    what is above crosses the wire inside of a replica only, and an all-reduce of the averaged part follows between the
    ranks that hold it: 2 Psi / S for S parts, whatever the plan.

    Args:
        params_bytes, grads_bytes, optim_bytes: bytes by tier; tiers left out hold 0.
        gather_numel: elements of all all-gathers of one step.
        reduce_numel: elements of all reductions of one step, inside of a replica.
        replica_numel: elements of those between replicas; 0 where there is but one.
        padding_numel: elements of all whole flat buffers that belong to no parameter.
        root_unit_bytes: whole parameters of the root unit. This and the next two are 0 when parameters rest whole
            (nothing is gathered) and when the budget was made from a parameter count (units are unknown).
        largest_unit_bytes: whole parameters of the largest unit other than the root.
        all_units_bytes: whole parameters of all units.
        kept_bytes: whole parameters of the units that stay gathered between forward and backward.
        is_root_kept: whether the root unit is one of them.
        link_bytes: bytes that cross this rank's host link in one step, both ways together (see `_link_bytes`).
    """

    params_bytes: Mapping[Tier, int]
    grads_bytes: Mapping[Tier, int]
    optim_bytes: Mapping[Tier, int]
    gather_numel: int = 0
    reduce_numel: int = 0
    replica_numel: int = 0
    padding_numel: int = 0
    root_unit_bytes: int = 0
    largest_unit_bytes: int = 0
    all_units_bytes: int = 0
    kept_bytes: int = 0
    is_root_kept: bool = False
    link_bytes: int = 0

    def __post_init__(self) -> None:
        # Every tier is always present, so that budgets compare equal and lookups need no default.
        for kind in ("params_bytes", "grads_bytes", "optim_bytes"):
            held: Mapping[Tier, int] = getattr(self, kind)
            object.__setattr__(self, kind, {tier: held.get(tier, 0) for tier in Tier})

    @classmethod
    def of(
        cls,
        plan: Plan,
        units: Sequence[Sequence[FlatSpec]],
        *,
        forward_gathers: Sequence[int] | None = None,
        backward_gathers: Sequence[int] | None = None,
        root: int = 0,
        kept: Collection[int] = (),
        num_replicas: int = 1,
    ) -> "Budget":
        """The budget of a model cut into units.

        Args:
            plan: where each kind of state rests; of a mixed tier each unit takes one, see [Note: A mix is of units].
            units: the flat buffers of each unit (a unit has several when dtypes differ or some parameters are frozen).
            forward_gathers: times each unit is gathered in one forward when params are partitioned; None means once.
            backward_gathers: the same for one backward.
            root: index of the root unit, which stays gathered while others come and go; past the end: there is none.
            kept: indices of the units that stay gathered between forward and backward, which then gathers them no more.
            num_replicas: ranks that hold the same part.
        Raises:
            PlanError: a gather count is missing or one too many.
        """
        flats = [flat for unit in units for flat in unit]
        # [Note: A mix is of units]
        plans = unit_plans(plan, [UnitBytes.of(flat.used for flat in unit) for unit in units])
        resting = [UnitBytes.of(flat.resting for flat in unit) for unit in units]
        gathers = _gathers(len(units), forward_gathers, backward_gathers, kept)
        used = [(each, flat, times) for each, unit, times in zip(plans, units, gathers, strict=True) for flat in unit]
        gather_numel, reduce_numel = _wire_numel(
            plan,
            trained=sum(flat.layout.numel for flat in flats if flat.trainable),
            fetched=sum(flat.layout.numel * times for _, flat, times in used),
        )
        return cls(
            **rank_bytes(plans, resting, max((flat.layout.num_shards for flat in flats), default=1)),
            gather_numel=gather_numel,
            reduce_numel=reduce_numel,
            replica_numel=_replica_numel(sum(f.layout.shard_numel for f in flats if f.trainable), num_replicas),
            padding_numel=sum(flat.layout.padding_numel for flat in flats),
            link_bytes=sum(
                _link_bytes(each, part * flat.grad_itemsize, part * flat.param_itemsize, times)
                for each, flat, times in used
                for part in (flat.layout.shard_numel,)
            ),
            **_window([unit.params * plan.params.partitioned for unit in resting], root, kept),
        )

    @classmethod
    def at_rest(cls, plan: Plan, units: Sequence[UnitBytes], num_shards: int) -> "Budget":
        """What one rank keeps of units of so many bytes, and nothing of what a step moves."""
        return cls(**rank_bytes(unit_plans(plan, units), units, num_shards))

    @classmethod
    def for_numel(
        cls,
        plan: Plan,
        numel: int,
        num_ranks: int,
        *,
        param_itemsize: int = 2,
        grad_itemsize: int = 2,
        optim_itemsize: int = 12,
        num_replicas: int = 1,
    ) -> "Budget":
        """The ZeRO paper's accounting (section 5, Table 1) from a parameter count alone: no units, no padding.

        One rank's part of a kind is its exact share in bytes, rounded up. The default sizes are the paper's: 2-byte
        parameters and gradients, K = 12 bytes of Adam state. `num_ranks` share the parts; `num_replicas` hold each.

        Raises:
            PlanError: `numel` is negative, or `num_ranks` or `num_replicas` is not positive.
        """
        if numel < 0 or min(num_ranks, num_replicas) < 1:
            raise PlanError(
                f"a budget needs numel >= 0, num_ranks >= 1 and num_replicas >= 1, not numel={numel}, "
                f"num_ranks={num_ranks}, num_replicas={num_replicas}"
            )

        def share(itemsize: int, partitioned: bool = True) -> int:
            return -(-numel * itemsize // (num_ranks if partitioned else 1))

        gather_numel, reduce_numel = _wire_numel(plan, trained=numel, fetched=2 * numel)
        return cls(
            params_bytes=split_bytes(plan.params, share(param_itemsize, plan.params.partitioned)),
            grads_bytes=split_bytes(plan.grads, share(grad_itemsize, plan.grads.partitioned)),
            optim_bytes=split_bytes(plan.optim, share(optim_itemsize, plan.optim.partitioned)),
            gather_numel=gather_numel,
            reduce_numel=reduce_numel,
            replica_numel=_replica_numel(share(1), num_replicas),
            link_bytes=_link_bytes(plan, share(grad_itemsize), share(param_itemsize), 2),
        )

    @property
    def tier_bytes(self) -> dict[Tier, int]:
        """Model states by tier."""
        return {tier: self.params_bytes[tier] + self.grads_bytes[tier] + self.optim_bytes[tier] for tier in Tier}

    @property
    def model_states_bytes(self) -> int:
        """Model states on all tiers: parameters, gradients and optimizer state."""
        return sum(self.tier_bytes.values())

    @property
    def device_bytes(self) -> int:
        """Model states on the device."""
        return self.tier_bytes[Tier.DEVICE]

    @property
    def wire_numel(self) -> int:
        """Elements on the wire in one step, gathers and reductions together, on all axes."""
        return self.gather_numel + self.reduce_numel + self.replica_numel

    def window_bytes(self, prefetch_bytes: int = 0) -> int:
        """Most bytes of gathered parameters alive at once, on top of the model states; 0 when parameters rest whole.

        The root unit stays, and so may the units that are kept; the unit in use is at worst the largest, and units
        gathered ahead fill at most `prefetch_bytes`; together they are never more than the whole model.
        """
        staying = self.kept_bytes + (0 if self.is_root_kept else self.root_unit_bytes)
        return min(staying + self.largest_unit_bytes + prefetch_bytes, self.all_units_bytes)

    def table(self) -> str:
        """A fixed-width text table: state by tier in GiB and in bytes, then what a step moves."""
        kinds = {"params": self.params_bytes, "grads": self.grads_bytes, "optim": self.optim_bytes}
        rows = [(kind, tier.name.lower(), held[tier]) for kind, held in kinds.items() for tier in Tier if held[tier]]
        rows += [("total", tier.name.lower(), nbytes) for tier, nbytes in self.tier_bytes.items() if nbytes]
        rows += [("total", "all tiers", self.model_states_bytes)]
        if self.all_units_bytes:
            rows += [("window", "root unit", self.root_unit_bytes), ("window", "largest unit", self.largest_unit_bytes)]
        if self.kept_bytes:
            rows += [("window", "kept units", self.kept_bytes)]
        if self.link_bytes:
            rows += [("a step", "host link", self.link_bytes)]
        moved = [("gather", self.gather_numel), ("reduce", self.reduce_numel), ("padding", self.padding_numel)]
        if self.replica_numel:
            moved.insert(2, ("replicas", self.replica_numel))
        lines = [f"{'a rank':<8}{'where':<14}{'GiB':>12}{'bytes':>26}"]
        lines += [f"{kind:<8}{where:<14}{nbytes / _GIB:>12,.3f}{nbytes:>26,}" for kind, where, nbytes in rows]
        lines += [f"{'a step':<8}{'':<26}{'elements':>26}"]
        lines += [f"{kind:<8}{'':<26}{numel:>26,}" for kind, numel in moved]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def max_numel(
    plan: Plan,
    memory_bytes: int | Mapping[Tier, int],
    num_ranks: int,
    *,
    param_itemsize: int = 2,
    grad_itemsize: int = 2,
    optim_itemsize: int = 12,
) -> int:
    """The most parameters whose model states fit, by the accounting of `Budget.for_numel` (the paper's Table 2).

    Args:
        plan: where each kind of state rests.
        memory_bytes: bytes one rank has on the device, or by tier; a tier left out has no limit.
        num_ranks: data-parallel ranks.
        param_itemsize, grad_itemsize, optim_itemsize: as for `Budget.for_numel`.
    Raises:
        PlanError: the plan keeps nothing on the tiers named, so any number of parameters fits.
    """
    limits = memory_bytes if isinstance(memory_bytes, Mapping) else {Tier.DEVICE: memory_bytes}
    sizes = ((plan.params, param_itemsize), (plan.grads, grad_itemsize), (plan.optim, optim_itemsize))
    if not any(size and tier in limits for placement, size in sizes for tier in placement.tiers):
        named = ", ".join(tier.name for tier in limits) or "no tier"
        raise PlanError(f"{plan} keeps nothing on {named}, so there is no largest model; give memory_bytes by tier")

    itemsizes = {"param_itemsize": param_itemsize, "grad_itemsize": grad_itemsize, "optim_itemsize": optim_itemsize}

    def fits(numel: int) -> bool:
        held = Budget.for_numel(plan, numel, num_ranks, **itemsizes).tier_bytes
        return all(held[tier] <= limit for tier, limit in limits.items())

    # Bytes on each tier never fall as numel grows (see split_bytes), so double and bisect: exact at any size.
    above = 1
    while fits(above):
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below


def split_bytes(placement: Placement, nbytes: int) -> dict[Tier, int]:
    """Cut `nbytes` over the tiers of `placement`: each takes its exact fraction rounded down, the farthest the rest.

    Fractions are taken of what nearer tiers left, so no tier's part ever falls when `nbytes` grows.
    """
    parts, left, weight = {}, nbytes, sum(fraction for _, fraction in placement.fractions)
    for tier, fraction in placement.fractions:
        parts[tier] = left * fraction // weight
        left, weight = left - parts[tier], weight - fraction
    return parts


def _window(whole: Sequence[int], root: int, kept: Collection[int]) -> dict[str, Any]:
    """What a `Budget` tells of units that are whole, given the bytes of each."""
    return {
        "root_unit_bytes": sum(whole[root : root + 1]),
        "largest_unit_bytes": max((size for index, size in enumerate(whole) if index != root), default=0),
        "all_units_bytes": sum(whole),
        "kept_bytes": sum(whole[index] for index in kept),
        "is_root_kept": root in kept,
    }


def _gathers(
    num_units: int, forward: Sequence[int] | None, backward: Sequence[int] | None, kept: Collection[int]
) -> list[int]:
    """Times each unit is gathered in one step: the sum over forward and backward."""
    counts = [
        [1] * num_units if forward is None else forward,
        [int(unit not in kept) for unit in range(num_units)] if backward is None else backward,
    ]
    for times in counts:
        if len(times) != num_units:
            raise PlanError(f"a gather count is needed for each of {num_units} units, not {len(times)}: {list(times)}")
    return [sum(each) for each in zip(*counts, strict=True)]


def _wire_numel(plan: Plan, *, trained: int, fetched: int) -> tuple[int, int]:
    """(gather, reduce) elements of one step.

    `trained`: elements that are updated; `fetched`: those forward and backward gather if params are partitioned.
    """
    # Where each rank updates only its part it needs only that part of the sum, and the others need its result.
    refreshed, reduced = (trained, trained) if plan.optim.partitioned else (0, 2 * trained)
    return (fetched if plan.params.partitioned else refreshed), reduced


def _replica_numel(part: int, num_replicas: int) -> int:
    """Elements of one step's all-reduces of a trained part between `num_replicas` that hold it."""
    return 2 * part if num_replicas > 1 else 0


def _link_bytes(plan: Plan, grads: int, params: int, num_gathers: int) -> int:
    """Bytes over one rank's host link in one step of one micro-batch, both ways together (ZeRO-Offload, section 3).

    Optimizer state never crosses: the update runs where it rests (from disk: on the host). A gradient goes down where
    it rests or is used off the device. Parameters come up at each gather where they rest off the device, and once where
    only the update that refreshes them is off it. Of mixed tiers, what the kind that keeps less on the device has there
    is taken to be within what the other has there.

    Args:
        grads, params: bytes of one rank's shard; gradients 0 where nothing is trained.
        num_gathers: gathers of the parameters in a step, if they are partitioned.
    """

    def off_device(placement: Placement, nbytes: int) -> int:
        return nbytes - split_bytes(placement, nbytes).get(Tier.DEVICE, 0)

    grads_rest, grads_used = off_device(plan.grads, grads), off_device(plan.optim, grads)
    down_and_back = max(grads_rest, grads_used) + max(grads_rest - grads_used, 0)
    refresh = abs(off_device(plan.optim, params) - off_device(plan.params, params)) if grads else 0
    return down_and_back + refresh + num_gathers * off_device(plan.params, params)
