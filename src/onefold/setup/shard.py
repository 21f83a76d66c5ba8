"""Owns `shard`: the one place where a plan becomes structure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import nn

from onefold.comm.agreement import together
from onefold.comm.comm import Comm, default_device
from onefold.comm.control import Control
from onefold.comm.mesh import connect
from onefold.engine.grad_report import GradientReport
from onefold.engine.hooks import Gate, InlinedHooks, ModuleHooks, install_gradient_hooks
from onefold.engine.loss_scale import make_scaler
from onefold.engine.reducer import Reducer
from onefold.engine.runtime import Runtime
from onefold.engine.schedule import BACKWARD
from onefold.engine.session import Session
from onefold.engine.sharded_unit import ShardedUnit
from onefold.engine.unit import Unit
from onefold.errors import ShardError
from onefold.memory.streams import lanes_for, poll_oldest, wait_for_oldest
from onefold.plan.mix import unit_plans
from onefold.plan.precision import Precision
from onefold.plan.table import Plan, Tier
from onefold.setup.build import Builder, Structure, has_shards_to_expose
from onefold.setup.check_arguments import check_model, check_options
from onefold.setup.compile_units import Compiler, compile_blocks, uncompiled
from onefold.setup.deferred_init import materialize_deferred
from onefold.setup.find_units import UnitChoice, UnitSpec, discover, join_small, outside
from onefold.setup.free_memory import Demand
from onefold.setup.gather_choice import GatherChoice, choose_gather
from onefold.setup.gathered import guard_state_dict
from onefold.setup.host_memory_check import check_host
from onefold.setup.join_ranks import join_ranks
from onefold.setup.meta_init import has_meta, materialize
from onefold.setup.offload_fraction import FractionChoice, with_fraction
from onefold.setup.pack import PackedUnit, pack
from onefold.setup.reshard_policy import KeepChoice, bytes_to_keep, kept_units
from onefold.setup.same_model import check_same_model
from onefold.system.cores import cores_here, update_cores
from onefold.tiers.tier import Storehouse, storehouses

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    plan: Plan,
    *,
    mesh: Any = None,
    units: UnitChoice | None = None,
    precision: Precision | None = None,
    compile: bool = False,
    prefetch_bytes: int | None = None,
    keep_bytes: KeepChoice = None,
    fraction: FractionChoice = None,
    gather: GatherChoice = "auto",
) -> Model:
    """Place a model's training state as `plan` says. Returns the same object; its loop stays plain PyTorch.

    Args:
        model: any module; on CPU, on a GPU, or built under `torch.device("meta")`. Rank 0's values become everyone's.
        plan: `ZERO_0` to `ZERO_3`, or a `Plan` of your own.
        mesh: a DeviceMesh to shard over; of two axes ("replicate", "shard"), to keep replicas. None takes all ranks.
        units: what is gathered together - module classes, modules, or name patterns; None finds the repeated blocks.
        precision: number formats; None keeps the model's own dtypes.
        compile: compile the forward of every block (every unit but the root; a model that is one unit, as a whole), in
            one graph each: torch raises where it cannot. What has units inside is compiled in pieces between them.
        prefetch_bytes: bytes of parameters gathered ahead of their use; None means as many as the largest unit has.
        keep_bytes: bytes of parameters that stay gathered between a forward and its backward, in whole units, the last
            ones first; "auto" means what states leave of a GPU beside activations of a quarter of its memory.
        fraction: how much of what the plan keeps off the device to keep on it, in whole units, those that a forward
            needs first: in [0, 1], as `OFFLOAD.keeping(0.5)`, or "auto" for as much as fits beside such activations.
        gather: "collective" (NCCL, gloo); "copy": ranks of one machine copy shards from memory that all of them see,
            and gradients into it; "auto" takes the faster of both on GPUs of one machine, and a collective elsewhere.

    Raises:
        ShardError, HostMemoryError: the model cannot be sharded; the host lacks memory (says what would fit).
        PlanError, PrecisionError: `plan` or `precision` is not one, or places state where this version cannot.
    """
    precision = precision if precision is not None else Precision()
    check_model(model, plan, precision)
    check_options(mesh, prefetch_bytes, keep_bytes, gather)
    target, compiler = uncompiled(model)
    join_ranks()
    comm = connect(device := _device_of(target), mesh)
    specs = together(comm, lambda: _units(target, units))
    check_same_model(comm, target, specs, f"{plan}, {fraction=}, {keep_bytes=}, {gather=}", precision)
    packed = pack(target, specs, precision, comm.num_shards)
    builder = Builder(comm, device, lanes_for(device), update_cores(comm.rank, comm.exchange_objects(cores_here())))
    design = Design.choose(plan, fraction, keep_bytes, packed, builder)
    if any(map(has_shards_to_expose, design.plans)):
        builder = replace(builder, comm=choose_gather(gather, comm, device))
    session = _open_session(target, packed, design, builder, precision, prefetch_bytes)
    return _install(model, target, specs, session, None if compile else compiler, compile or compiler is not None)


def _units(model: nn.Module, units: UnitChoice | None) -> list[UnitSpec]:
    specs = discover(model, units)
    return join_small(specs) if units is None else specs


@dataclass(frozen=True, slots=True)
class Design:
    """Where everything rests."""

    plan: Plan
    plans: Sequence[Plan]
    """The single-tier plan of each unit."""
    kept: frozenset[int]
    """Units that stay gathered between a forward and its backward."""

    @classmethod
    def choose(
        cls, plan: Plan, fraction: FractionChoice, keep_bytes: KeepChoice, packed: Sequence[PackedUnit], by: Builder
    ) -> "Design":
        """The same on every rank.

        Raises:
            HostMemoryError: what rests on a host does not fit there.
        """
        present: Counter[str] = Counter()
        for param in (param for unit in packed for each in unit.packs for param in each.params):
            present[param.device.type] += param.nbytes
        units = [unit.used for unit in packed]
        demand = Demand(units=units, comm=by.comm, device=by.device, present=present)
        plan = with_fraction(plan, fraction, demand, by.share.num_threads)
        check_host(plan, demand)
        kept = kept_units(bytes_to_keep(keep_bytes, plan, demand), [unit.resting.params for unit in packed])
        return cls(plan, unit_plans(plan, units), kept)


def _open_session(
    model: nn.Module,
    packed: Sequence[PackedUnit],
    design: Design,
    builder: Builder,
    precision: Precision,
    prefetch_bytes: int | None,
) -> Session:
    comm, device, lanes, share = builder.comm, builder.device, builder.lanes, builder.share
    houses = storehouses(design.plan, device, lanes, share.cores)
    comm.refreshes.finish_all()  # those of models that are gone hold their memory
    units = _build(model, packed, design, houses, builder)
    scaler = make_scaler(precision.loss_scale)  # type: ignore[arg-type]
    num_trained = sum(len(flat.params) for unit in units for flat, _ in unit.trained_flats)
    control = Control(comm, type(model).__name__, GradientReport.num_bytes(num_trained, len(units)))
    # Waiting holds up a stream on a GPU, but the whole rank on a CPU, and others may need it for their gathers.
    can_wait = device.type == "cuda" and not design.plan.params.partitioned
    bound = wait_for_oldest if can_wait else poll_oldest
    # Gathers come first in a pass, where there are any.
    is_gathering = any(isinstance(unit, ShardedUnit) for unit in units)
    enter_pass = _nothing if is_gathering else partial(control.enter, BACKWARD)
    reducer = Reducer(units, control, lanes, bound, lambda: scaler.scale, enter_pass)
    largest = max((unit.nbytes for unit in units[1:]), default=0)
    ahead = largest if prefetch_bytes is None else prefetch_bytes
    return Session(
        plan=design.plan,
        precision=precision,
        device=device,
        lanes=lanes,
        comm=comm,
        houses=houses,
        cores=share.cores,
        num_threads=share.num_threads,
        control=control,
        runtime=Runtime(model, units, control, reducer, ahead, lambda: scaler.scale != 1),
        reducer=reducer,
        scaler=scaler,
        fingerprint=_fingerprint(design.plan, comm, units),
    )


def _nothing() -> None:
    """What is done before a pass that ranks have entered already."""


def _device_of(model: nn.Module) -> torch.device:
    """The device the model is on; a model on CPU or meta goes where the ranks communicate.

    Raises:
        ShardError: it is spread over several devices.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    accelerators = sorted((device for device in devices if device.type == "cuda"), key=str)
    if len(accelerators) > 1:
        raise ShardError(f"the model is spread over {', '.join(map(str, accelerators))}; put it on one device a rank")
    return accelerators[0] if accelerators else default_device()


def _build(
    model: nn.Module,
    packed: Sequence[PackedUnit],
    design: Design,
    houses: Mapping[Tier, Storehouse],
    builder: Builder,
) -> list[Unit]:
    comm, device = builder.comm, builder.device
    seed = comm.exchange([torch.initial_seed() % 2**62])[0][0]
    is_meta = has_meta(model)
    init_units = [part for unit in packed for part in unit.spec.init_units]
    units = []
    for index, (unit, plan) in enumerate(zip(packed, design.plans, strict=True)):
        for part in unit.spec.init_units if is_meta else ():
            together(comm, partial(materialize, model, part, init_units, device, seed))
        materialize_deferred(param for _, param in unit.spec.params)
        structure = Structure(plan, houses, index in design.kept)
        units.append(builder.build(unit, index, structure))
    largest = max(unit.reduced_bytes for unit in units)
    if largest:
        comm.expect_reductions(largest)
    for _, buffer in model.named_buffers():
        buffer.data = buffer.data.to(device)
        if buffer.numel():
            values = buffer.data.contiguous()  # an expanded buffer has fewer places in memory than elements
            comm.broadcast(values)
            buffer.data = values
    return units


def _fingerprint(plan: Plan, comm: Comm, units: Sequence[Unit]) -> str:
    geometry = [(flat.names, flat.layout.numel, str(flat.weight.dtype)) for unit in units for flat in unit.flats]
    return f"shard {comm.shard} of {comm.num_shards}, {plan}, geometry {crc32(repr(geometry).encode()):08x}"


def _install(
    model: Model,
    target: nn.Module,
    specs: Sequence[UnitSpec],
    session: Session,
    compiler: Compiler | None,
    is_compiled: bool,
) -> Model:
    """`model`, which may be a wrapper around `target`, with everything that makes its session answer."""
    if is_compiled:
        compile_blocks(target, specs, compiler)
    session.attach(target)
    dtype = session.precision.params if session.precision.cast_inputs else None
    gate = Gate(session.runtime, session.scaler, dtype if isinstance(dtype, torch.dtype) else None)
    for spec, unit in zip(specs, session.runtime.units, strict=True):
        for name, module in spec.modules:
            ModuleHooks(session.runtime, unit, name, gate).install(module)
    inner = InlinedHooks if is_compiled and len(specs) == 1 else ModuleHooks
    for name, module in outside(target, specs):  # an encoder, say, that is called by itself
        inner(session.runtime, session.runtime.units[0], name, gate).install(module)
    install_gradient_hooks(session.runtime, session.reducer)
    guard_state_dict(target, session)
    if target is not model:
        object.__setattr__(model, "forward", target.__call__)
        session.attach(model)
    return model
