"""Owns the values of parameters between the making of a model and `shard`: each rank keeps a part of every one.

[Note: Asleep]
While a `DeferredInit` is open, a parameter falls asleep when its module is put into another: its constructor is done
with it then. Rank 0's value is everyone's. A parameter that sleeps is the same object with its shape, dtype and
device; its class lets only metadata through, and its storage is empty. A constructor that uses it all the same
(`nn.Transformer` initializes its layers' weights, Hugging Face the whole model's) wakes it, on all ranks alike, and it
falls asleep again when enough others were woken. `shard` wakes the parameters of one unit at a time.

Waking and falling asleep give a parameter new storage, so views taken before stay readable. The parameter stays on the
device that its constructor chose, so that what the constructor makes besides fits it; values travel over the device
where ranks communicate.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from onefold.comm.comm import Comm, default_device, start
from onefold.comm.mesh import connect
from onefold.engine.released import ReleasedParameter, metadata_only, name_of
from onefold.errors import OnefoldError, ReleasedParameterError
from onefold.memory.streams import Ticket

_AWAKE_BYTES = 2**28
"""What constructors woke may take before the first of it falls asleep again."""


class Asleep(ReleasedParameter):
    """The class of a parameter while its value is kept in parts. See [Note: Asleep]."""

    _onefold_kept: "_SleepState"

    def __deepcopy__(self, memo: Any) -> Any:
        return self._onefold_kept.deferred.copy(self, memo)

    def detach(self) -> Tensor:
        return self  # state_dict() detaches; reading what it gives raises

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.detach and isinstance(args[0], Asleep):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


@dataclass(slots=True, eq=False)
class _SleepState:
    """What a parameter carries from the first time it falls asleep."""

    deferred: "DeferredInit"
    name: str
    cls: type[nn.Parameter]
    """Its class while it is awake."""
    part: Tensor
    """This rank's elements, padded to as many as every rank has, 1-D."""

    def __call__(self) -> "DeferredInit":
        return self.deferred


class DeferredInit:
    """Keeps values of parameters in parts. It answers for parameters that sleep (released.Owner).

    Args:
        dtype: of floating-point parameters made while it is open; None leaves theirs.
        rest: where parts are kept; None is where the parameters are.
        greet: called with each parameter before it falls asleep for the first time.
        way_out: how to use a parameter that sleeps, for messages.
    """

    def __init__(
        self,
        way_out: str,
        *,
        dtype: torch.dtype | None = None,
        rest: torch.device | None = None,
        greet: Callable[[nn.Parameter], None] = lambda _: None,
    ) -> None:
        start()
        self._device = default_device()
        self._comm: Comm = connect(self._device)
        self._way_out = way_out
        self._dtype = dtype
        self._greet = greet
        self._rest = rest
        self._open = 0
        self._gathered = 0
        self._new: dict[int, tuple[str, nn.Parameter]] = {}
        self._woken: list[tuple[nn.Parameter, int]] = []
        """What constructors woke, and how many held its storage then."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, the parameters of modules that are made fall asleep."""
        hooks = (
            register_module_parameter_registration_hook(self._see_param),
            register_module_module_registration_hook(self._see_module),
        )
        self._open += 1
        try:
            yield
            self._fall_asleep(list(self._new.values()))
            self.sleep_again()
        finally:
            self._open -= 1
            self._new.clear()
            for hook in hooks:
                hook.remove()

    def take(self, module: nn.Module) -> None:
        """Let the parameters of `module` that are awake, and not on meta, fall asleep. Every rank calls it."""
        self._fall_asleep(list(module.named_parameters()))

    def copy(self, param: nn.Parameter, memo: Any) -> nn.Parameter:
        """A copy, awake, of a parameter that sleeps; for constructors, as `touch`."""
        self.touch([param], Tensor.clone)
        twin: nn.Parameter = param.__deepcopy__(memo)
        self._hide(param)
        return twin

    def describe(self, param: nn.Parameter) -> str:
        """What it is called, for messages."""
        kept: _SleepState = param.__dict__["_onefold_kept"]
        return f"parameter {kept.name!r} {list(param.shape)}"

    def touch(self, params: Sequence[nn.Parameter], func: Callable[..., Any]) -> None:
        """Wake `params` for a constructor, on every rank alike.

        Raises:
            ReleasedParameterError: outside of constructors, or where only some ranks may have come.
        """
        if not self._open or self._gathered:
            where = " here, where it is not gathered" if self._gathered else " outside of constructors"
            raise ReleasedParameterError(
                f"{name_of(func)} needs the value of {self.describe(params[0])}, which rests in parts until the model "
                f"is sharded, so it cannot be used{where}. {self._way_out}"
            )
        self.sleep_again(_AWAKE_BYTES)
        self._wake(params)
        self._woken += [(param, _holders(param)) for param in params]

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], write: bool) -> Iterator[None]:
        """Inside, `params`, which sleep, are whole on every rank; with `write`, rank 0's values are kept.

        Raises:
            OnefoldError: with `write`, on every rank if the work inside failed on any.
        """
        self._wake(params)
        self._gathered += 1
        problem: BaseException | None = None
        try:
            yield
        except BaseException as error:
            problem = error
            raise
        finally:
            self._gathered -= 1
            failed = self._failed(problem) if write else None
            if write and failed is None:
                self._fall_asleep([(param.__dict__["_onefold_kept"].name, param) for param in params])
            else:
                for param in params:
                    self._hide(param)
            if problem is None and failed is not None:
                raise OnefoldError(f"{failed} with parameters gathered, so rank {self._comm.rank} stops too")

    def _failed(self, problem: BaseException | None) -> str | None:
        """Which rank failed, and how; None if none did."""
        stories = self._comm.exchange_objects(None if problem is None else str(problem) or type(problem).__name__)
        return next((f"rank {rank} failed ({story})" for rank, story in enumerate(stories) if story is not None), None)

    # --- falling asleep, waking -------------------------------------------------------------------------------------

    def _see_param(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not _is_elsewhere(param):
            self._new[id(param)] = (f"{type(module).__name__}.{name}", param)

    def _see_module(self, _: nn.Module, __: str, module: nn.Module | None) -> None:
        if module is not None:
            kind = type(module).__name__
            self._fall_asleep([(f"{kind}.{name}", param) for name, param in module.named_parameters()])
            for param in module.parameters():
                self._new.pop(id(param), None)

    def sleep_again(self, most: int = 0) -> None:
        """Let what constructors woke fall asleep again, oldest first, until `most` bytes are awake."""
        here = [(param, count) for param, count in self._woken if deferred_init_of(param) is self]
        awake = [(param, count) for param, count in here if not isinstance(param, Asleep)]
        nbytes = sum(param.nbytes for param, _ in awake)
        self._woken = []
        for param, holders in awake:
            if nbytes <= most or (most and _holders(param) > holders):
                self._woken.append((param, holders))
                continue
            nbytes -= param.nbytes
            self._fall_asleep([(param.__dict__["_onefold_kept"].name, param)])

    def _fall_asleep(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        for name, param in named:
            if _is_elsewhere(param):
                continue
            name, param = self._new.get(id(param), (name, param))
            kept: _SleepState | None = param.__dict__.get("_onefold_kept")
            if kept is None:
                self._greet(param)
            is_cast = kept is None and self._dtype is not None and param.is_floating_point()
            value = param.data.to(self._device, self._dtype if is_cast else param.dtype).contiguous()  # to be sent
            if value.numel():
                self._comm.broadcast(value)
            flat = value.reshape(-1)
            each = -(-flat.numel() // self._comm.num_ranks)
            part = torch.zeros(each, dtype=value.dtype, device=param.device if self._rest is None else self._rest)
            mine = flat[self._comm.rank * each : (self._comm.rank + 1) * each]
            part[: mine.numel()] = mine
            param.__dict__["_onefold_kept"] = param.__dict__["_onefold_owner"] = _SleepState(
                self, name, type(param), part
            )
            self._hide(param)

    def _hide(self, param: nn.Parameter) -> None:
        kept: _SleepState = param.__dict__["_onefold_kept"]
        hollow = torch.empty(param.shape, dtype=kept.part.dtype, device=param.device)
        hollow.untyped_storage().resize_(0)
        param.data = hollow
        param.__class__ = Asleep  # type: ignore[assignment]

    def _wake(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            if not isinstance(param, Asleep):
                continue
            kept: _SleepState = param.__dict__["_onefold_kept"]
            with metadata_only():
                shape, device = param.shape, param.device
            part = kept.part.to(self._device)
            whole = torch.empty(part.numel() * self._comm.num_ranks, dtype=part.dtype, device=self._device)
            if part.numel():
                Ticket(self._comm.all_gather(whole, part)).wait()
            param.__class__ = kept.cls
            param.data = whole[: shape.numel()].view(shape).to(device, copy=True)

    def release(self, params: Iterable[nn.Parameter]) -> None:
        """Wake `params` for good: they are ordinary parameters again."""
        params = list(params)
        self._wake(params)
        for param in params:
            del param.__dict__["_onefold_kept"], param.__dict__["_onefold_owner"]


def deferred_init_of(param: nn.Parameter) -> DeferredInit | None:
    """What keeps the value of a parameter, asleep or woken; None of other parameters."""
    kept: _SleepState | None = param.__dict__.get("_onefold_kept")
    return None if kept is None else kept.deferred


def wake(params: Iterable[nn.Parameter]) -> None:
    """Make those of `params` that sleep ordinary parameters with their values. Every rank calls it alike."""
    for param in params:
        deferred = deferred_init_of(param)
        if deferred is not None:
            deferred.release([param])


def _holders(param: nn.Parameter) -> int:
    return int(torch._C._storage_Use_Count(param.untyped_storage()._cdata))


def _is_elsewhere(param: nn.Parameter) -> bool:
    """Whether there is no value here to be kept: it sleeps, is sharded, is on the meta device, or is no dense tensor
    (yet)."""
    is_owned = "_onefold_owner" in param.__dict__ and deferred_init_of(param) is None
    if is_owned or isinstance(param, ReleasedParameter | nn.parameter.UninitializedParameter):
        return True
    return param.is_meta or param.is_quantized or param.layout != torch.strided
