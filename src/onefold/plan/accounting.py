"""Owns the account: bytes of every kind of state, from one flat buffer to what one rank keeps on each tier.

Integers only - no tensors, no torch: layouts, number formats and plans are enough, without a GPU or a process group.
Budgets, what fits on a device or a host, and the choice which units of a mixed plan rest where all read this account.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from onefold.plan.layout import Layout
from onefold.plan.table import Plan, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """One unit's state in bytes, all ranks' parts together; what is frozen has nothing but parameters.

    Args:
        params, grads: bytes of those.
        optim: of what updates need from the start: master weights.
        twin: of the copy of trained parameters that updates write where parameters rest on another tier than `optim`.
        state: of what an optimizer adds to `optim`: moments.
    """

    params: int
    grads: int
    optim: int = 0
    twin: int = 0
    state: int = 0

    @classmethod
    def of(cls, parts: "Iterable[UnitBytes]") -> "UnitBytes":
        """The sum of the parts of a unit."""
        listed = list(parts)
        return cls(**{kind.name: sum(getattr(part, kind.name) for part in listed) for kind in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatSpec:
    """One flat buffer and what each of its elements costs at rest.

    Args:
        layout: where its parameters lie and how it splits over the ranks.
        param_itemsize: bytes an element of the parameters, for example 2 for bf16.
        grad_itemsize: bytes an element of the gradients as they are kept; 0 where the parameters are frozen.
        optim_itemsize: bytes an element of the optimizer state, master weights included; 0 where frozen. Adam on bf16:
            10 with a split master (2 + 4 + 4), 12 with a separate fp32 master (4 + 4 + 4).
        num_grad_buffers: gradients that rest at once; 2 where updates are delayed.
        twin_itemsize, state_itemsize: bytes an element of what `UnitBytes` calls so, where not in `optim_itemsize`.
    """

    layout: Layout
    param_itemsize: int
    grad_itemsize: int
    optim_itemsize: int
    num_grad_buffers: int = 1
    twin_itemsize: int = 0
    state_itemsize: int = 0

    @property
    def trainable(self) -> bool:
        """True when gradients exist, so something is reduced and updated."""
        return self.grad_itemsize > 0

    @property
    def used(self) -> UnitBytes:
        """Bytes that belong to parameters: no padding, and one gradient."""
        return self._bytes(self.layout.used_numel, 1)

    @property
    def resting(self) -> UnitBytes:
        """Bytes that are really taken."""
        return self._bytes(self.layout.numel, self.num_grad_buffers)

    def _bytes(self, numel: int, num_grad_buffers: int) -> UnitBytes:
        return UnitBytes(
            params=numel * self.param_itemsize,
            grads=numel * self.grad_itemsize * num_grad_buffers,
            optim=numel * self.optim_itemsize,
            twin=numel * self.twin_itemsize,
            state=numel * self.state_itemsize,
        )


def rank_bytes(plans: Sequence[Plan], units: Sequence[UnitBytes], num_shards: int) -> dict[str, Any]:
    """Bytes that one of `num_shards` ranks keeps on each tier: `params_bytes`, `grads_bytes` and `optim_bytes`.

    Args:
        plans: the single-tier plan of each unit.
    """
    held = {kind: dict.fromkeys(Tier, 0) for kind in ("params_bytes", "grads_bytes", "optim_bytes")}
    for plan, unit in zip(plans, units, strict=True):
        twin = unit.twin if plan.params.farthest != plan.optim.farthest else 0
        for kind, placement, nbytes in (
            ("params_bytes", plan.params, unit.params),
            ("grads_bytes", plan.grads, unit.grads),
            ("optim_bytes", plan.optim, unit.optim + twin),
            ("optim_bytes", plan.optim, unit.state),
        ):
            held[kind][placement.farthest] += -(-nbytes // (num_shards if placement.partitioned else 1))
    return held
