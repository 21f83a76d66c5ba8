"""Owns the move of a model's parameters into flat buffers, unit by unit, so that the peak is one unit above the
result."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from onefold.buffer import Buffer, CopyMaster, Master, OwnMaster, SplitMaster, exact_dtype
from onefold.comm import Comm
from onefold.discover import UnitSpec
from onefold.dtypes import Precision, split
from onefold.gradients import AwayKeep, Gradients, Keep, PartKeep, ReplicatedKeep, WholeKeep
from onefold.layout import Layout
from onefold.plan import Placement, Plan, Tier
from onefold.streams import Lanes
from onefold.tier import Storehouse, storehouse
from onefold.unit import Flat, PartUnit, Trained, Unit


@dataclass(frozen=True, slots=True)
class _Kind:
    """Parameters with one of these go into one flat buffer."""

    dtype: torch.dtype
    is_trained: bool


class Builder:
    """Builds units for one plan on one device."""

    def __init__(self, plan: Plan, precision: Precision, device: torch.device, comm: Comm, lanes: Lanes) -> None:
        self._precision = precision
        self._device = device
        self._comm = comm
        self._lanes = lanes
        self.houses: dict[Tier, Storehouse] = {}
        self._params = self._house(plan.params)
        self._grads = self._house(plan.grads)
        self._optim = self._house(plan.optim)
        self._unit_type = PartUnit if plan.params.partitioned else Unit
        self._keep_type: type[PartKeep | WholeKeep] = (
            PartKeep if plan.grads.partitioned else WholeKeep if plan.optim.partitioned else ReplicatedKeep
        )
        self._is_weight_own = plan.params.partitioned
        self._is_update_part = plan.optim.partitioned

    def _house(self, placement: Placement) -> Storehouse:
        house = storehouse(placement, self._device, self._lanes)
        return self.houses.setdefault(house.tier, house)

    def build(self, spec: UnitSpec, index: int, kept: set[int]) -> Unit:
        """Move the parameters of one unit. Rank 0's values are everyone's.

        Args:
            kept: ids of parameters whose dtype stays as it is.
        """
        kinds: dict[_Kind, list[tuple[str, nn.Parameter]]] = {}
        for name, param in sorted(spec.params, key=lambda item: item[1].dim() > 1):
            dtype = param.dtype if id(param) in kept else self._precision.param_dtype(param.dtype)
            kinds.setdefault(_Kind(dtype, param.requires_grad), []).append((name, param))
        flats = [self._build_flat(kind, members) for kind, members in kinds.items()]
        unit = self._unit_type(spec.name, index, flats, self._comm, self._lanes)
        unit.release()
        unit.try_free()
        return unit

    def _build_flat(self, kind: _Kind, members: Sequence[tuple[str, nn.Parameter]]) -> Flat:
        names, params = tuple(name for name, _ in members), tuple(param for _, param in members)
        layout = Layout.pack([(name, tuple(param.shape)) for name, param in members], self._comm.num_ranks)
        source = self._source(layout, params)
        buffer = Buffer(layout, kind.dtype, self._device, self._lanes)
        is_split = kind.is_trained and self._precision.master_form(kind.dtype) == "split"
        buffer.whole.copy_(split(source)[0] if is_split and source.dtype == torch.float32 else source)
        buffer.bind(params)
        own = slice(*layout.shard_range(self._comm.rank))
        updated = own if self._is_update_part else slice(0, layout.numel)
        weight = buffer.whole[updated]
        if self._is_weight_own:
            weight = self._params.allocate(layout.shard_numel, kind.dtype)
            weight.copy_(buffer.whole[own])
        trained = self._train(layout, kind, weight, source[updated], updated.start) if kind.is_trained else None
        buffer.settle()
        self._lanes.order_gather()
        flat = Flat(names=names, params=params, buffer=buffer, weight=weight, trained=trained, rest=self._params)
        if flat.has_twin:
            flat.publish(self._lanes, self._lanes.mark()).wait()
        return flat

    def _train(self, layout: Layout, kind: _Kind, weight: Tensor, source: Tensor, start: int) -> Trained:
        """What a trained flat has beside its compute weights; `source` holds the exact values of `weight`."""
        written, has_twin = weight, self._params.tier != self._optim.tier
        if has_twin:
            written = self._optim.allocate(weight.numel(), weight.dtype)
            written.copy_(weight)
        return Trained(
            master=self._master(written, source),
            gradients=self._gradients(layout, kind),
            start=start,
            numel=weight.numel(),
            rest=self._optim,
            weight=written,
            has_twin=has_twin,
        )

    def _source(self, layout: Layout, params: Sequence[nn.Parameter]) -> Tensor:
        source = torch.zeros(layout.numel, dtype=exact_dtype(params[0].dtype), device=self._device)
        for slot, param in zip(layout.slots, params, strict=True):
            source[slot.start : slot.stop].copy_(param.data.reshape(-1))
        self._comm.broadcast(source)
        return source

    def _master(self, weight: Tensor, source: Tensor) -> Master:
        form = self._precision.master_form(weight.dtype)
        if form == "own":
            return OwnMaster(weight)
        if form == "split":
            low = self._optim.allocate(weight.numel(), torch.int16)
            if source.dtype == torch.float32:
                low.copy_(split(source)[1])
            return SplitMaster(weight, low)
        copy = self._optim.allocate(weight.numel(), torch.float32)
        copy.copy_(source)
        return CopyMaster(weight, copy)

    def _gradients(self, layout: Layout, kind: _Kind) -> Gradients:
        dtype = self._precision.grad_dtype(kind.dtype)
        keep: Keep = (
            self._keep_type(layout, self._comm)
            if self._grads.tier == Tier.DEVICE
            else AwayKeep(layout, self._comm, dtype, self._grads)
        )
        return Gradients(layout, dtype, self._device, keep, self._comm)


def kept_params(model: nn.Module) -> set[int]:
    """Ids of parameters that stay in their dtype: batch norm's kernels take fp32 weights with 16-bit inputs."""
    return {id(param) for module in model.modules() if isinstance(module, _BatchNorm) for param in module.parameters()}
