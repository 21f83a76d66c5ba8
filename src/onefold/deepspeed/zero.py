"""Owns DeepSpeed's module `zero`: building models in parts, and reading and writing parameters that rest in parts.

Invariant: a parameter means the same under every plan: what is written inside `GatheredParameters` with a modifier rank
is what every rank, shard and exact weight holds afterwards.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from onefold.deepspeed import comm
from onefold.deepspeed.dropped import Watch
from onefold.deepspeed.ds_attributes import ZeroParamStatus, add_ds_attributes
from onefold.deepspeed.source import read
from onefold.deepspeed.unsupported_names import unsupported
from onefold.deepspeed.values import said
from onefold.engine.session import Session, owner_session
from onefold.errors import ConfigError, OnefoldError
from onefold.setup.deferred_init import DeferredInit, PartitionedParameter, deferred_by
from onefold.setup.gathered import gathered

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
_HOST = ("cpu", "nvme")
_WAY_OUT = (
    "It was made under zero.Init: read or write it inside `with zero.GatheredParameters(params, modifier_rank=0):`, "
    "which every rank enters"
)

TiledLinear = unsupported("zero.TiledLinear", "no module is cut into tiles", "torch.nn.Linear under stage 3")
TiledLinearReturnBias = unsupported(
    "zero.TiledLinearReturnBias", "no module is cut into tiles", "torch.nn.Linear under stage 3"
)


class Init:
    """A context under which models are made without any rank holding one whole.

    The parameters of a module fall asleep when it is put into another: rank 0's values, each rank keeping a part. What
    constructors still do with them then, they do on the whole value. `initialize` (or `onefold.shard`) wakes them, one
    unit at a time. All ranks make the same modules in the same order.

    Args:
        module: one that is made already: its parameters fall asleep at once.
        remote_device: "cpu" or "nvme" keeps the parts in host memory; None, where the parameters are.
        config_dict_or_path, config: a DeepSpeed configuration, for the dtype and the remote device.
        enabled: False does nothing.
        dtype: of floating-point parameters; None takes it from the configuration, or leaves theirs.
        mem_efficient_linear, pin_memory: taken, and of no effect.

    Raises:
        ConfigError: a group of ranks of its own, quantized weights, or a device that is none of these.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: "Mapping[str, Any] | str | None" = None,
        config: "Mapping[str, Any] | str | None" = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        groups = (data_parallel_group, zero_param_parallel_group, sequence_data_parallel_group)
        if mpu is not None or any(group not in (None, comm.world_group()) for group in groups):
            raise ConfigError("zero.Init splits parameters over all ranks; leave mpu and the groups out")
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise ConfigError("zero.Init never quantizes weights; leave zero_quantized_weights out, and use bf16")
        self._contexts = ExitStack()
        self._deferred: DeferredInit | None = None
        if not enabled:
            return
        written = config_dict_or_path if config_dict_or_path is not None else config
        settings: Mapping[str, Any] = {} if written is None else read(written).values
        place = remote_device if remote_device is not None else _remote_device(settings)
        if place not in (None, "none", *_HOST) and not str(place).startswith("cuda"):
            raise ConfigError(f"remote_device={place!r}: expected cpu, nvme, or None")
        comm.init_distributed()
        self._deferred = DeferredInit(
            _WAY_OUT,
            dtype=dtype if dtype is not None else _dtype(settings),
            rest=torch.device("cpu") if place in _HOST else None,
            greet=partial(self._number, count()),
        )
        if module is not None:
            self._deferred.take(module)

    @staticmethod
    def _number(numbers: Iterator[int], param: nn.Parameter) -> None:
        add_ds_attributes(param, next(numbers))

    def __enter__(self) -> None:
        if self._deferred is not None:
            self._contexts.enter_context(self._deferred.open())

    def __exit__(self, *exception: Any) -> None:
        self._contexts.__exit__(*exception)


def _section(settings: Mapping[str, Any], *path: str) -> Any:
    found: Any = settings
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _dtype(settings: Mapping[str, Any]) -> torch.dtype | None:
    on = [dtype for name, dtype in _DTYPES.items() if _section(settings, name, "enabled") is True]
    return on[0] if on else None


def _remote_device(settings: Mapping[str, Any]) -> str | None:
    device = _section(settings, "zero_optimization", "offload_param", "device")
    return device if isinstance(device, str) else None


class GatheredParameters:
    """A context inside which parameters are whole. Every rank enters and leaves it.

    Parameters of a model that is neither made under `Init` nor sharded are whole anyway: nothing happens to them.

    Args:
        params: a parameter, or parameters. What is no parameter is passed over.
        modifier_rank: keep what this rank wrote, on every rank; None drops what is written into parameters that rest in
            parts, and says so once of each.
        fwd_module: taken, and not needed.
        enabled: False does nothing.

    Raises:
        OnefoldError: a parameter is gathered already by a context around this one, or is on the meta device.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        found = list(params) if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
        unique = {id(param): param for param in found if isinstance(param, nn.Parameter)}
        self._params = list(unique.values()) if enabled else []
        self._modifier = modifier_rank
        self._contexts = ExitStack()

    def __enter__(self) -> None:
        meta = [param for param in self._params if param.is_meta]
        if meta:
            raise OnefoldError(
                f"GatheredParameters was given a parameter {list(meta[0].shape)} on the meta device, which has no value"
                " yet; make the model under zero.Init instead of torch.device('meta')"
            )
        for context in self._gather():
            self._contexts.enter_context(context)
        if self._modifier is None:
            self._contexts.push(partial(self._look, Watch(self._params)))
        elif self._modifier:
            self._contexts.push(self._send)

    def __exit__(self, *exception: Any) -> bool | None:
        return self._contexts.__exit__(*exception)

    def _gather(self) -> Iterator[AbstractContextManager[None]]:
        """Contexts that gather what rests in parts."""
        inits: dict[int, tuple[DeferredInit, list[nn.Parameter]]] = {}
        sessions: dict[int, tuple[Session, list[nn.Parameter]]] = {}
        for param in self._params:
            deferred, session = deferred_by(param), owner_session(param)
            if deferred is not None:
                inits.setdefault(id(deferred), (deferred, []))[1].append(param)
            elif session is not None:
                sessions.setdefault(id(session), (session, []))[1].append(param)
        for deferred, params in inits.values():
            deferred.settle()
            whole = [param for param in params if not isinstance(param, PartitionedParameter)]
            if whole:
                raise OnefoldError(f"{deferred.describe(whole[0])} is gathered already, by a context around this one")
            yield deferred.gathered(params, write=self._modifier is not None)
        for _, params in sessions.values():
            yield gathered(params, write=self._modifier is not None)

    @staticmethod
    def _look(watch: Watch, *exception: Any) -> None:
        if exception[0] is None:
            watch.end()

    def _send(self, *exception: Any) -> None:
        """Bring the values of the modifying rank to rank 0, whose values are kept."""
        if exception[0] is None:
            for param in self._params:
                if deferred_by(param) is not None or owner_session(param) is not None:
                    comm.broadcast(param.data, self._modifier or 0)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Taken, and not needed: a parameter that is used outside of its module is gathered on the spot.

    Raises:
        ConfigError: it is no parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise ConfigError(f"register_external_parameter takes a torch.nn.Parameter, not {said(parameter)}")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """As `register_external_parameter`."""
    register_external_parameter(module, parameter)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the engine's model with all of its parameters whole, for many forwards in a row."""
    inner = getattr(model, "module", model)
    with GatheredParameters(list(inner.parameters())):
        yield inner
