"""Owns the move of a model's parameters into flat buffers, unit by unit, so that the peak is one unit above the
result."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onefold.comm.comm import Comm
from onefold.engine.flat import Flat, Trained
from onefold.engine.gradients import AwayKeep, Gradients, PartKeep, ReplicatedKeep, WholeKeep
from onefold.engine.replicated_unit import ReplicatedUnit
from onefold.engine.sharded_unit import KeptUnit, ShardedUnit
from onefold.engine.unit import Unit
from onefold.memory.buffer import Buffer, CopyMaster, Master, OwnMaster, SplitMaster, exact_dtype
from onefold.memory.streams import Lanes
from onefold.plan.precision import split
from onefold.plan.table import Plan, Tier
from onefold.setup.pack import Pack, PackedUnit
from onefold.system.cores import Share
from onefold.tiers.tier import Storehouse


def has_shards_to_expose(plan: Plan) -> bool:
    """Whether ranks gather what others of them updated where it rests; `plan` has one tier for each kind of state."""
    return plan.optim.partitioned and plan.optim.farthest == Tier.DEVICE


class Structure:
    """What a unit's single-tier plan calls for.

    Args:
        stays_gathered: parameters that rest in shards stay gathered between a forward and its backward.
    """

    def __init__(self, plan: Plan, houses: Mapping[Tier, Storehouse], stays_gathered: bool) -> None:
        self.params = houses[plan.params.farthest]
        self.grads = houses[plan.grads.farthest]
        self.optim = houses[plan.optim.farthest]
        self.unit_type = (KeptUnit if stays_gathered else ShardedUnit) if plan.params.partitioned else ReplicatedUnit
        self.keep_type: type[PartKeep | WholeKeep] = (
            PartKeep if plan.grads.partitioned else WholeKeep if plan.optim.partitioned else ReplicatedKeep
        )
        self.is_weight_own = plan.params.partitioned
        self.is_update_part = plan.optim.partitioned
        self.is_exposed = has_shards_to_expose(plan)
        self.has_twin = self.params.tier != self.optim.tier

    def keep(self, pack: Pack, comm: Comm) -> PartKeep | WholeKeep:
        """How the reduced gradients of `pack` rest."""
        if self.grads.tier != Tier.DEVICE:
            return AwayKeep(pack.layout, comm, pack.grad_dtype, self.grads)
        return self.keep_type(pack.layout, comm)


@dataclass(frozen=True, slots=True)
class Builder:
    """Builds units for ranks, each with its device, and with cores for updates on the host."""

    comm: Comm
    device: torch.device
    lanes: Lanes
    share: Share

    def build(self, packed: PackedUnit, index: int, structure: Structure) -> Unit:
        """Move the parameters of one unit to where they rest. Rank 0's values are everyone's."""
        flats = [self._build_flat(pack, structure) for pack in packed.packs]
        unit_type = structure.unit_type if flats else ReplicatedUnit  # a root may have no parameters of its own
        is_joined = bool(packed.spec.parts)
        unit = unit_type(packed.spec.name, index, flats, self.comm, self.lanes, is_joined=is_joined)
        unit.release()
        unit.try_free()
        return unit

    def _build_flat(self, pack: Pack, structure: Structure) -> Flat:
        layout, source = pack.layout, self._source(pack)
        buffer = Buffer(layout, self._whole(pack, structure), self.lanes)
        is_cut = pack.is_trained and pack.master_type is SplitMaster and source.dtype == torch.float32
        buffer.whole.copy_(split(source)[0] if is_cut else source)
        buffer.bind(pack.params)
        own = slice(*layout.shard_range(self.comm.shard))
        updated = own if structure.is_update_part else slice(0, layout.numel)
        weight = buffer.whole[updated]
        if structure.is_weight_own:
            weight = structure.params.allocate(layout.shard_numel, pack.dtype)
            weight.copy_(buffer.whole[own])
            weight = self.comm.expose(weight) if structure.is_exposed else weight
        trained = self._train(pack, structure, weight, source[updated]) if pack.is_trained else None
        buffer.note_holders()
        self.lanes.order_gather()
        flat = Flat(
            names=pack.names,
            params=pack.params,
            buffer=buffer,
            weight=weight,
            start=updated.start,
            trained=trained,
            rest=structure.params,
        )
        if flat.has_twin:
            flat.publish(self.lanes, self.lanes.mark()).wait()
            flat.note_versions()
        return flat

    def _source(self, pack: Pack) -> Tensor:
        """Rank 0's values, exactly."""
        source = torch.zeros(pack.layout.numel, dtype=exact_dtype(pack.params[0].dtype), device=self.device)
        for slot, param in zip(pack.layout.slots, pack.params, strict=True):
            source[slot.start : slot.stop].copy_(param.data.reshape(-1))
        self.comm.broadcast(source)
        return source

    def _whole(self, pack: Pack, structure: Structure) -> Tensor:
        """Memory for all of a flat buffer."""
        numel = pack.layout.numel
        if pack.is_trained and structure.is_exposed and not structure.is_weight_own and numel:
            return self.comm.expose_whole(torch.empty(numel, dtype=pack.dtype, device=self.device))
        with self.lanes.allocate_for_gather():
            return torch.empty(numel, dtype=pack.dtype, device=self.device)

    def _train(self, pack: Pack, structure: Structure, weight: Tensor, source: Tensor) -> Trained:
        """What a trained flat has beside its compute weights; `source` holds the exact values of `weight`."""
        written = weight
        if structure.has_twin:
            written = structure.optim.allocate(weight.numel(), weight.dtype)
            written.copy_(weight)
        return Trained(
            master=_master(pack.master_type, written, source, structure.optim),
            gradients=Gradients(pack.layout, pack.grad_dtype, self.device, structure.keep(pack, self.comm), self.comm),
            numel=weight.numel(),
            rest=structure.optim,
            weight=written,
            has_twin=structure.has_twin,
        )


def _master(kind: type[Master], weight: Tensor, source: Tensor, house: Storehouse) -> Master:
    if kind is OwnMaster:
        return OwnMaster(weight)
    if kind is SplitMaster:
        low = house.allocate(weight.numel(), torch.int16)
        if source.dtype == torch.float32:
            low.copy_(split(source)[1])
        return SplitMaster(weight, low)
    copy = house.allocate(weight.numel(), torch.float32)
    copy.copy_(source)
    return CopyMaster(weight, copy)
