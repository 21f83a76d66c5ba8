"""Owns the move of a model's parameters into flat buffers, unit by unit, so that the peak is one unit above the
result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from onefold.comm.comm import Comm
from onefold.engine.flat import Flat, Trained
from onefold.engine.gradients import AwayKeep, Gradients, Keep, PartKeep, ReplicatedKeep, WholeKeep
from onefold.engine.replicated_unit import ReplicatedUnit
from onefold.engine.sharded_unit import KeptUnit, ShardedUnit
from onefold.engine.unit import Unit
from onefold.memory.buffer import Buffer, CopyMaster, Master, OwnMaster, SplitMaster, exact_dtype
from onefold.memory.streams import Lanes
from onefold.plan.layout import Layout
from onefold.plan.mix import UnitBytes
from onefold.plan.precision import Precision, split
from onefold.plan.table import Plan, Tier
from onefold.setup.find_units import UnitSpec
from onefold.setup.offload_fraction import UnitStates
from onefold.tiers.tier import Storehouse


@dataclass(frozen=True, slots=True)
class _Kind:
    """Parameters with one of these go into one flat buffer."""

    dtype: torch.dtype
    is_trained: bool


_MASTERS: Mapping[str, type[OwnMaster | SplitMaster | CopyMaster]] = {
    "own": OwnMaster,
    "split": SplitMaster,
    "fp32": CopyMaster,
}


def has_shards_to_expose(plan: Plan) -> bool:
    """Whether ranks gather what others of them updated where it rests; `plan` has one tier for each kind of state."""
    return plan.optim.partitioned and plan.optim.farthest == Tier.DEVICE


class UnitStructure:
    """What the single-tier plan of a unit becomes: where its state rests, and the classes that hold it."""

    def __init__(self, plan: Plan, houses: Mapping[Tier, Storehouse], is_kept: bool) -> None:
        self.params = houses[plan.params.farthest]
        self.grads = houses[plan.grads.farthest]
        self.optim = houses[plan.optim.farthest]
        self.unit_type = (KeptUnit if is_kept else ShardedUnit) if plan.params.partitioned else ReplicatedUnit
        self.keep_type: type[PartKeep | WholeKeep] = (
            PartKeep if plan.grads.partitioned else WholeKeep if plan.optim.partitioned else ReplicatedKeep
        )
        self.is_weight_own = plan.params.partitioned
        self.is_update_part = plan.optim.partitioned
        self.is_exposed = has_shards_to_expose(plan)


class Formats:
    """The number formats of a model's parameters."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.precision = precision
        # Batch norm's kernels take fp32 weights with 16-bit inputs: its parameters stay as they are.
        self._kept = {
            id(p) for module in model.modules() if isinstance(module, _BatchNorm) for p in module.parameters()
        }

    def kind(self, param: nn.Parameter) -> _Kind:
        dtype = param.dtype if id(param) in self._kept else self.precision.param_dtype(param.dtype)
        return _Kind(dtype, param.requires_grad)

    def flats(self, spec: UnitSpec) -> list[tuple[_Kind, list[tuple[str, nn.Parameter]]]]:
        """The parameters of each flat buffer of a unit."""
        kinds: dict[_Kind, list[tuple[str, nn.Parameter]]] = {}
        for name, param in sorted(spec.params, key=lambda item: item[1].dim() > 1):
            kinds.setdefault(self.kind(param), []).append((name, param))
        return list(kinds.items())

    def gathered_bytes(self, spec: UnitSpec, num_shards: int) -> int:
        """Bytes of a unit's whole parameters, padding included."""
        return sum(_pack(members, num_shards).numel * kind.dtype.itemsize for kind, members in self.flats(spec))

    def states(self, spec: UnitSpec) -> UnitStates:
        """What training a unit takes."""
        size, masters, moments = UnitBytes(params=0, grads=0), 0, 0
        for param, kind in ((param, self.kind(param)) for _, param in spec.params):
            grad_itemsize = self.precision.grad_dtype(kind.dtype).itemsize if kind.is_trained else 0
            part = UnitBytes(params=param.numel() * kind.dtype.itemsize, grads=param.numel() * grad_itemsize)
            size = UnitBytes.of((size, part))
            if kind.is_trained:
                master = _MASTERS[self.precision.master_form(kind.dtype)]
                masters += param.numel() * master.itemsize
                moments += param.numel() * 2 * exact_dtype(kind.dtype).itemsize
        return UnitStates(size=size, optim=masters + moments, moments=moments)


def _pack(members: Sequence[tuple[str, nn.Parameter]], num_shards: int) -> Layout:
    return Layout.pack([(name, tuple(param.shape)) for name, param in members], num_shards)


class Builder:
    """Builds units on one device."""

    def __init__(
        self,
        formats: Formats,
        device: torch.device,
        comm: Comm,
        lanes: Lanes,
        houses: Mapping[Tier, Storehouse],
    ) -> None:
        self._formats = formats
        self._precision = formats.precision
        self._device = device
        self._comm = comm
        self._lanes = lanes
        self._houses = houses

    def build(self, spec: UnitSpec, index: int, plan: Plan, is_kept: bool) -> Unit:
        """Move the parameters of one unit to where its single-tier plan says. Rank 0's values are everyone's.

        `is_kept`: parameters that rest in shards stay gathered between a forward and its backward.
        """
        structure = UnitStructure(plan, self._houses, is_kept)
        flats = [self._build_flat(kind, members, structure) for kind, members in self._formats.flats(spec)]
        unit_type = structure.unit_type if flats else ReplicatedUnit  # a root may have no parameters
        unit = unit_type(spec.name, index, flats, self._comm, self._lanes)
        unit.release()
        unit.try_free()
        return unit

    def _build_flat(self, kind: _Kind, members: Sequence[tuple[str, nn.Parameter]], structure: UnitStructure) -> Flat:
        names, params = tuple(name for name, _ in members), tuple(param for _, param in members)
        layout = _pack(members, self._comm.num_shards)
        source = self._source(layout, params)
        buffer = Buffer(layout, self._whole(layout, kind, structure), self._lanes)
        is_split = kind.is_trained and self._precision.master_form(kind.dtype) == "split"
        buffer.whole.copy_(split(source)[0] if is_split and source.dtype == torch.float32 else source)
        buffer.bind(params)
        own = slice(*layout.shard_range(self._comm.shard))
        updated = own if structure.is_update_part else slice(0, layout.numel)
        weight = buffer.whole[updated]
        if structure.is_weight_own:
            weight = structure.params.allocate(layout.shard_numel, kind.dtype)
            weight.copy_(buffer.whole[own])
            weight = self._comm.expose(weight) if structure.is_exposed else weight
        trained = self._train(layout, kind, structure, weight, source[updated]) if kind.is_trained else None
        buffer.note_holders()
        self._lanes.order_gather()
        flat = Flat(
            names=names,
            params=params,
            buffer=buffer,
            weight=weight,
            start=updated.start,
            trained=trained,
            rest=structure.params,
        )
        if flat.has_twin:
            flat.publish(self._lanes, self._lanes.mark()).wait()
            flat.note_versions()
        return flat

    def _whole(self, layout: Layout, kind: _Kind, structure: UnitStructure) -> Tensor:
        """Memory for all of a flat buffer."""
        if kind.is_trained and structure.is_exposed and not structure.is_weight_own and layout.numel:
            return self._comm.expose_whole(torch.empty(layout.numel, dtype=kind.dtype, device=self._device))
        with self._lanes.allocate_for_gather():
            return torch.empty(layout.numel, dtype=kind.dtype, device=self._device)

    def _train(self, layout: Layout, kind: _Kind, structure: UnitStructure, weight: Tensor, source: Tensor) -> Trained:
        """What a trained flat has beside its compute weights; `source` holds the exact values of `weight`."""
        written, has_twin = weight, structure.params.tier != structure.optim.tier
        if has_twin:
            written = structure.optim.allocate(weight.numel(), weight.dtype)
            written.copy_(weight)
        return Trained(
            master=self._master(written, source, structure.optim),
            gradients=self._gradients(layout, kind, structure),
            numel=weight.numel(),
            rest=structure.optim,
            weight=written,
            has_twin=has_twin,
        )

    def _source(self, layout: Layout, params: Sequence[nn.Parameter]) -> Tensor:
        source = torch.zeros(layout.numel, dtype=exact_dtype(params[0].dtype), device=self._device)
        for slot, param in zip(layout.slots, params, strict=True):
            source[slot.start : slot.stop].copy_(param.data.reshape(-1))
        self._comm.broadcast(source)
        return source

    def _master(self, weight: Tensor, source: Tensor, house: Storehouse) -> Master:
        form = self._precision.master_form(weight.dtype)
        if form == "own":
            return OwnMaster(weight)
        if form == "split":
            low = house.allocate(weight.numel(), torch.int16)
            if source.dtype == torch.float32:
                low.copy_(split(source)[1])
            return SplitMaster(weight, low)
        copy = house.allocate(weight.numel(), torch.float32)
        copy.copy_(source)
        return CopyMaster(weight, copy)

    def _gradients(self, layout: Layout, kind: _Kind, structure: UnitStructure) -> Gradients:
        dtype = self._precision.grad_dtype(kind.dtype)
        keep: Keep = (
            structure.keep_type(layout, self._comm)
            if structure.grads.tier == Tier.DEVICE
            else AwayKeep(layout, self._comm, dtype, structure.grads)
        )
        return Gradients(layout, dtype, self._device, keep, self._comm)
