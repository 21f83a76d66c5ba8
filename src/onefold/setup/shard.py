"""Owns `shard`: the one place where a plan becomes structure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import nn

from onefold.comm.agreement import together
from onefold.comm.comm import Comm, default_device, start
from onefold.comm.control import Control
from onefold.comm.mesh import connect
from onefold.engine.grad_report import GradientReport
from onefold.engine.hooks import Gate, InlinedHooks, ModuleHooks, install_gradient_hooks
from onefold.engine.loss_scale import make_scaler
from onefold.engine.reducer import Reducer
from onefold.engine.runtime import Runtime
from onefold.engine.schedule import BACKWARD
from onefold.engine.session import Session, is_sharded, session_of
from onefold.engine.sharded_unit import ShardedUnit
from onefold.engine.unit import Unit
from onefold.errors import PlanError, PrecisionError, ShardError
from onefold.memory.streams import lanes_for, poll_oldest, wait_for_oldest
from onefold.plan.mix import unit_plans
from onefold.plan.precision import Precision
from onefold.plan.table import NAMED_PLANS, Plan, Tier
from onefold.setup.build import Builder, Formats, has_shards_to_expose
from onefold.setup.deferred_init import wake
from onefold.setup.find_units import UnitChoice, UnitSpec, discover, join_small, outside
from onefold.setup.gather_choice import GatherChoice, check_gather, choose_gather
from onefold.setup.gathered import gathered, guard_state_dict
from onefold.setup.host_memory_check import check_host
from onefold.setup.meta_init import has_meta, materialize
from onefold.setup.offload_fraction import FractionChoice, keep_some
from onefold.setup.reshard_policy import KeepChoice, bytes_to_keep, check_choice, kept_units
from onefold.setup.same_model import check_same_model
from onefold.system.cores import Share, cores_here, update_cores
from onefold.tiers.tier import storehouses

Model = TypeVar("Model", bound=nn.Module)
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

_VARIANTS = 8
"""Of one function, that torch compiles unless told otherwise."""


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
    _check(model, plan, precision, mesh, prefetch_bytes, keep_bytes, gather)
    target, compiler = _uncompiled(model)
    start()
    comm = connect(device := _device_of(target), mesh)
    specs = together(comm, lambda: _units(target, plan, units))
    choices = f"{plan}, fraction={fraction}, keep_bytes={keep_bytes}, gather={gather}"
    check_same_model(comm, target, specs, choices, precision)
    formats, share = Formats(target, precision), update_cores(comm.rank, comm.exchange_objects(cores_here()))
    places = Places.choose(plan, fraction, keep_bytes, target, specs, formats, comm, device, share.num_threads)
    comm = choose_gather(gather, comm, device) if places.has_shards_to_expose else comm
    session = _open_session(target, specs, places, formats, comm, device, prefetch_bytes, share)
    _compile(target, specs, compile, compiler)
    _attach(model, target, specs, session, is_compiled=compile or compiler is not None)
    return model


def _units(model: nn.Module, plan: Plan, units: UnitChoice | None) -> list[UnitSpec]:
    specs = discover(model, units)
    # Updates off the device are waited for, and placed, unit by unit: small ones are of use there.
    is_joined = units is None and not plan.params.partitioned and plan.optim.farthest == Tier.DEVICE
    return join_small(specs) if is_joined else specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where everything rests."""

    plan: Plan
    of_units: Sequence[Plan]
    """The single-tier plan of each unit."""
    kept: frozenset[int]
    """Units that stay gathered between a forward and its backward."""

    @property
    def has_shards_to_expose(self) -> bool:
        return any(has_shards_to_expose(plan) for plan in self.of_units)

    @classmethod
    def choose(
        cls,
        plan: Plan,
        fraction: FractionChoice,
        keep_bytes: KeepChoice,
        model: nn.Module,
        specs: Sequence[UnitSpec],
        formats: Formats,
        comm: Comm,
        device: torch.device,
        num_threads: int,
    ) -> "Places":
        """The same on every rank.

        Raises:
            HostMemoryError: what rests on a host does not fit there.
        """
        present = sum(param.nbytes for param in model.parameters() if param.device == device)
        states = [formats.states(spec) for spec in specs]
        plan = keep_some(plan, fraction, states, comm, device, present, num_threads)
        on_host = sum(param.nbytes for param in model.parameters() if param.device.type == "cpu")
        check_host(plan, states, comm, device, on_host)
        keep = bytes_to_keep(keep_bytes, plan, states, comm, device, present)
        return cls(
            plan=plan,
            of_units=unit_plans(plan, [each.size for each in states]),
            kept=kept_units(keep, [formats.gathered_bytes(spec, comm.num_shards) for spec in specs]),
        )


def _open_session(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    places: Places,
    formats: Formats,
    comm: Comm,
    device: torch.device,
    prefetch_bytes: int | None,
    share: Share,
) -> Session:
    lanes, precision, plan = lanes_for(device), formats.precision, places.plan
    houses = storehouses(plan, device, lanes, share.cores)
    comm.refreshes.finish_all()  # those of models that are gone hold their memory
    builder = Builder(formats, device, comm, lanes, houses)
    built = _build(model, specs, places, builder, device, comm)
    scaler = make_scaler(precision.loss_scale)  # type: ignore[arg-type]
    num_trained = sum(len(flat.params) for unit in built for flat, _ in unit.trained_flats)
    control = Control(comm, type(model).__name__, GradientReport.num_bytes(num_trained, len(built)))
    # Waiting holds up a stream on a GPU, but the whole rank on a CPU, and others may need it for their gathers.
    can_wait = device.type == "cuda" and not plan.params.partitioned
    bound = wait_for_oldest if can_wait else poll_oldest
    # Gathers come first in a pass, where there are any.
    is_gathering = any(isinstance(unit, ShardedUnit) for unit in built)
    enter_pass = _nothing if is_gathering else partial(control.enter, BACKWARD)
    reducer = Reducer(built, control, lanes, bound, lambda: scaler.scale, enter_pass)
    largest = max((unit.nbytes for unit in built[1:]), default=0)
    return Session(
        plan=plan,
        precision=precision,
        device=device,
        lanes=lanes,
        comm=comm,
        houses=houses,
        cores=share.cores,
        num_threads=share.num_threads,
        control=control,
        runtime=Runtime(
            model,
            built,
            control,
            reducer,
            largest if prefetch_bytes is None else prefetch_bytes,
            lambda: scaler.scale != 1,
        ),
        reducer=reducer,
        scaler=scaler,
        fingerprint=_fingerprint(plan, comm, built),
    )


def _nothing() -> None:
    """What is done before a pass that ranks have entered already."""


def _check(
    model: nn.Module,
    plan: Plan,
    precision: Precision,
    mesh: Any,
    prefetch_bytes: int | None,
    keep_bytes: KeepChoice,
    gather: str,
) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is one of {', '.join(name.upper() for name in NAMED_PLANS)} or a Plan, not {plan!r}")
    if not isinstance(precision, Precision):
        raise PrecisionError(f'precision is a Precision, such as onefold.Precision(params="bf16"), not {precision!r}')
    if not isinstance(model, nn.Module):
        raise ShardError(f"onefold.shard takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ShardError(
            f"the model is wrapped in {type(model).__name__}; give onefold.shard the module inside (model.module)"
        )
    if is_sharded(model):
        raise ShardError("the model (or a part of it) is already sharded; call onefold.shard once, on the whole model")
    if next(model.parameters(), None) is None:
        raise ShardError(f"{type(model).__name__} has no parameters to shard")
    _check_options(mesh, prefetch_bytes, keep_bytes, gather)


def _check_options(mesh: Any, prefetch_bytes: int | None, keep_bytes: KeepChoice, gather: str) -> None:
    check_choice(keep_bytes)
    check_gather(gather)
    if prefetch_bytes is not None and (not isinstance(prefetch_bytes, int) or prefetch_bytes < 0):
        raise ShardError(f"prefetch_bytes={prefetch_bytes!r}: give a number of bytes, 0 for none, or None")
    if mesh is not None and not (hasattr(mesh, "ndim") and hasattr(mesh, "mesh")):
        raise ShardError(
            f"mesh={mesh!r}: give a torch.distributed DeviceMesh of one or two axes, or None for all ranks"
        )
    if torch.is_inference_mode_enabled():
        raise ShardError("onefold.shard inside torch.inference_mode makes tensors that can never be trained; leave it")


def compile_units(model: nn.Module, compiler: Compiler) -> None:
    """Let `compiler` compile the forward of every block of a sharded model, as `shard(compile=True)` has it done. Only
    for models whose units were found, not given.

    Raises:
        OnefoldError: the model is not sharded.
    """
    session_of(model, "compiling")
    with gathered(model):
        specs = discover(model, None)
    _compile(model, specs, False, compiler)


def _uncompiled(model: nn.Module) -> tuple[nn.Module, Compiler | None]:
    """The module inside a `torch.compile`d model, and its compiler: gathers must happen outside compiled code, so the
    units are compiled instead of the whole."""
    inner = model._modules.get("_orig_mod")
    compiler: Any = vars(model).get("dynamo_ctx")
    return (model, None) if inner is None or compiler is None else (inner, compiler)


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
    specs: Sequence[UnitSpec],
    places: Places,
    builder: Builder,
    device: torch.device,
    comm: Comm,
) -> list[Unit]:
    seed = comm.exchange([torch.initial_seed() % 2**62])[0][0]
    is_meta = has_meta(model)
    births = [part for spec in specs for part in spec.births]
    units = []
    for index, (spec, plan) in enumerate(zip(specs, places.of_units, strict=True)):
        for part in spec.births if is_meta else ():
            together(comm, partial(materialize, model, part, births, device, seed))
        wake(param for _, param in spec.params)
        units.append(builder.build(spec, index, plan, index in places.kept))
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


def _attach(
    model: nn.Module, target: nn.Module, specs: Sequence[UnitSpec], session: Session, is_compiled: bool
) -> None:
    session.attach(target)
    _install(target, specs, session, InlinedHooks if is_compiled and len(specs) == 1 else ModuleHooks)
    if target is not model:
        object.__setattr__(model, "forward", target.__call__)
        session.attach(model)


def _compile(model: nn.Module, specs: Sequence[UnitSpec], is_asked: bool, given: Compiler | None) -> None:
    """Compile forwards, inside of the hooks that gather: with torch's defaults if asked, else as the model was."""
    if not is_asked and given is None:
        return
    hooked = {id(module) for spec in specs for _, module in spec.modules}
    if len(specs) > 1:
        hooked.update(id(module) for _, module in outside(model, specs))
    blocks = [module for spec in specs[len(specs) > 1 :] for _, module in spec.modules]  # the root only if it is all
    options = _room_for_variants(len(blocks), is_asked)
    for module in blocks:
        is_leaf = sum(id(each) in hooked for each in module.modules()) == 1
        if is_asked:
            module.forward = torch.compile(module.forward, fullgraph=is_leaf, **options)
        elif given is not None:
            module.forward = given(module.forward)


def _room_for_variants(num_blocks: int, is_asked: bool) -> dict[str, Any]:
    """What torch.compile needs to be told so that each block may be compiled as often as torch lets one function be.
    Blocks of a class share one cache: where they differ in a number (a layer's index), its 8 places would be full at
    the ninth block, which could not be compiled then."""
    limit = max(torch._dynamo.config.recompile_limit, _VARIANTS * num_blocks)
    if is_asked and "recompile_limit" in signature(torch.compile).parameters:  # not before torch 2.13
        return {"recompile_limit": limit}
    torch._dynamo.config.recompile_limit = limit
    return {}


def _install(model: nn.Module, specs: Sequence[UnitSpec], session: Session, inner: type[ModuleHooks]) -> None:
    dtype = session.precision.params if session.precision.cast_inputs else None
    gate = Gate(session.runtime, session.scaler, dtype if isinstance(dtype, torch.dtype) else None)
    for spec, unit in zip(specs, session.runtime.units, strict=True):
        for name, module in spec.modules:
            ModuleHooks(session.runtime, unit, name, gate).install(module)
    for name, module in outside(model, specs):  # an encoder, say, that is called by itself
        inner(session.runtime, session.runtime.units[0], name, gate).install(module)
    install_gradient_hooks(session.runtime, session.reducer)
    guard_state_dict(model, session)
