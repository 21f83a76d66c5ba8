"""Owns deferred init: the values of parameters between the making of a model and `shard`, of which a rank keeps a part.

[Note: Deferred init]
While a `DeferredInit` is open, a parameter is partitioned when its module is put into another: the constructor of that
module is done with it then. Rank 0's value is everyone's. A partitioned parameter is the same object with its shape,
dtype and device; its class lets only metadata through, and its storage is empty. A constructor that uses it all the
same (`nn.Transformer` initializes its layers' weights, Hugging Face the whole model's) has it gathered, on all ranks
alike, and it is partitioned again when enough others were gathered. `shard` materializes one unit at a time.

Each time, a parameter gets new storage, so views that someone took before stay readable. It stays on the device that
its constructor chose, so that what the constructor makes besides fits it; values travel over the device where ranks
communicate.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from onefold.comm.comm import default_device
from onefold.comm.mesh import connect
from onefold.engine.released import ReleasedParameter, metadata_only, name_of
from onefold.errors import OnefoldError, ReleasedParameterError
from onefold.memory.streams import Ticket
from onefold.setup.join_ranks import join_ranks

_GATHERED_BYTES = 2**28
"""What constructors had gathered may take before the first of it is partitioned again."""


class PartitionedParameter(ReleasedParameter):
    """The class of a parameter while its value is kept in parts. See [Note: Deferred init]."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__dict__["_onefold_owner"]().copy(self, memo)

    def detach(self) -> Tensor:
        return self  # state_dict() detaches; who reads what it gives is told


@dataclass(slots=True, eq=False)
class _Partition:
    """What a parameter carries once it was partitioned, and as long as it may be again."""

    owner: "DeferredInit"
    name: str
    cls: type[nn.Parameter]
    """Its class while it is whole."""
    part: Tensor
    """This rank's elements, padded to as many as every rank has, 1-D."""

    def __call__(self) -> "DeferredInit":
        return self.owner


class DeferredInit:
    """Partitions parameters, and answers for them (released.Owner).

    Args:
        way_out: how to use a partitioned parameter, for messages.
        dtype: of floating-point parameters made while it is open; None leaves theirs.
        rest: where parts are kept; None is where the parameters are.
        greet: called with each parameter before it is partitioned for the first time.
    """

    def __init__(
        self,
        way_out: str,
        *,
        dtype: torch.dtype | None = None,
        rest: torch.device | None = None,
        greet: Callable[[nn.Parameter], None] = lambda _: None,
    ) -> None:
        join_ranks()
        self._device = default_device()
        self._comm = connect(self._device)
        self._way_out = way_out
        self._dtype = dtype
        self._greet = greet
        self._rest = rest
        self._open = 0
        self._gathered = 0
        self._new: dict[int, tuple[str, nn.Parameter]] = {}
        """Parameters of modules under construction, and what to call them."""
        self._used: list[tuple[nn.Parameter, int]] = []
        """What constructors had gathered, and how many held its storage then."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, the parameters of modules that are made get partitioned."""
        hooks = (
            register_module_parameter_registration_hook(self._see_param),
            register_module_module_registration_hook(self._see_module),
        )
        self._open += 1
        try:
            yield
            for name, param in list(self._new.values()):
                self._partition(name, param)
            self.settle()
        finally:
            self._open -= 1
            self._new.clear()
            for hook in hooks:
                hook.remove()

    def take(self, module: nn.Module) -> None:
        """Partition the parameters of `module` that are whole, and not on meta. Every rank calls it."""
        for name, param in module.named_parameters():
            self._partition(name, param)

    def copy(self, param: nn.Parameter, memo: Any) -> nn.Parameter:
        """A copy, whole, of a partitioned parameter; for constructors, as `touch`."""
        self.touch([param], Tensor.clone)
        twin: nn.Parameter = param.__deepcopy__(memo)
        self._hide(param)
        return twin

    def describe(self, param: nn.Parameter) -> str:
        """What it is called, for messages."""
        return f"{_partition_of(param).name!r} {list(param.shape)}"

    def is_whole(self, _: nn.Parameter) -> bool:
        """No partitioned parameter is."""
        return False

    def touch(self, params: Sequence[nn.Parameter], func: Callable[..., Any]) -> None:
        """Gather `params` for a constructor, on every rank alike.

        Raises:
            ReleasedParameterError: outside of constructors, or where only some ranks may have come.
        """
        if not self._open or self._gathered:
            where = " here, where it is not gathered" if self._gathered else " outside of constructors"
            raise ReleasedParameterError(
                f"{name_of(func)} needs the value of parameter {self.describe(params[0])}, which rests in parts until "
                f"the model is sharded, so it cannot be used{where}. {self._way_out}"
            )
        self.settle(_GATHERED_BYTES)
        self.gather(params)
        self._used += [(param, _holders(param)) for param in params]

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], write: bool) -> Iterator[None]:
        """Inside, partitioned `params` are whole on every rank; with `write`, rank 0's values are kept.

        Raises:
            OnefoldError: with `write`, on every rank if the work inside failed on any.
        """
        self.gather(params)
        self._gathered += 1
        problem: BaseException | None = None
        try:
            yield
        except BaseException as error:
            problem = error
            raise
        finally:
            self._gathered -= 1
            story = None if problem is None else str(problem) or type(problem).__name__
            stories = self._comm.exchange_objects(story) if write else []
            failed = [f"rank {rank} failed ({told})" for rank, told in enumerate(stories) if told is not None]
            for param in params:
                if write and not failed:
                    self._partition("", param)
                else:
                    self._hide(param)
            if problem is None and failed:
                raise OnefoldError(f"{failed[0]} with parameters gathered, so rank {self._comm.rank} stops too")

    def settle(self, most: int = 0) -> None:
        """Partition again what constructors had gathered, oldest first, until `most` bytes are whole."""
        whole = [(p, n) for p, n in self._used if deferred_by(p) is self and not isinstance(p, PartitionedParameter)]
        nbytes = sum(param.nbytes for param, _ in whole)
        self._used = []
        for param, holders in whole:
            if nbytes <= most or (most and _holders(param) > holders):
                self._used.append((param, holders))
            else:
                nbytes -= param.nbytes
                self._partition("", param)

    def gather(self, params: Iterable[nn.Parameter]) -> None:
        """Make those of `params` whole that are partitioned now."""
        for param in params:
            if not isinstance(param, PartitionedParameter):
                continue
            kept = _partition_of(param)
            with metadata_only():
                shape, device = param.shape, param.device
            part = kept.part.to(self._device)
            whole = torch.empty(part.numel() * self._comm.num_ranks, dtype=part.dtype, device=self._device)
            if part.numel():
                Ticket(self._comm.all_gather(whole, part)).wait()
            param.__class__ = kept.cls
            param.data = whole[: shape.numel()].view(shape).to(device, copy=True)

    def _see_param(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not _is_elsewhere(param):
            self._new[id(param)] = (f"{type(module).__name__}.{name}", param)

    def _see_module(self, _: nn.Module, __: str, module: nn.Module | None) -> None:
        if module is not None:
            for name, param in module.named_parameters():
                self._partition(f"{type(module).__name__}.{name}", param)

    def _partition(self, name: str, param: nn.Parameter) -> None:
        """Keep this rank's part of rank 0's value. A parameter is called `name` from now on, if there is one, unless it
        is seen for the first time, and the module that it was made in gave it another."""
        name, _ = self._new.pop(id(param), (name, param))
        if _is_elsewhere(param):
            return
        dtype = param.dtype
        if deferred_by(param) is None:
            self._greet(param)
            dtype = self._dtype if self._dtype is not None and param.is_floating_point() else dtype
        else:
            name = name or _partition_of(param).name
        value = param.data.to(self._device, dtype).contiguous()  # to be sent
        if value.numel():
            self._comm.broadcast(value)
        each = -(-value.numel() // self._comm.num_ranks)
        part = torch.zeros(each, dtype=dtype, device=param.device if self._rest is None else self._rest)
        mine = value.reshape(-1)[self._comm.rank * each :][:each]
        part[: mine.numel()] = mine
        param.__dict__["_onefold_owner"] = _Partition(self, name, type(param), part)  # after it was greeted
        self._hide(param)

    def _hide(self, param: nn.Parameter) -> None:
        hollow = torch.empty(param.shape, dtype=_partition_of(param).part.dtype, device=param.device)
        hollow.untyped_storage().resize_(0)
        param.data = hollow
        param.__class__ = PartitionedParameter  # type: ignore[assignment]


def deferred_by(param: nn.Parameter) -> DeferredInit | None:
    """Who keeps the value of a parameter, partitioned or gathered; None of others."""
    owner = param.__dict__.get("_onefold_owner")
    return owner() if isinstance(owner, _Partition) else None


def materialize_deferred(params: Iterable[nn.Parameter]) -> None:
    """Make partitioned ones of `params` ordinary parameters with their values. Every rank calls it alike."""
    for param in params:
        owner = deferred_by(param)
        if owner is not None:
            owner.gather([param])
            del param.__dict__["_onefold_owner"]


def _partition_of(param: nn.Parameter) -> _Partition:
    partition: _Partition = param.__dict__["_onefold_owner"]
    return partition


def _holders(param: nn.Parameter) -> int:
    return int(torch._C._storage_Use_Count(param.untyped_storage()._cdata))


def _is_elsewhere(param: nn.Parameter) -> bool:
    """Whether there is no value here to be kept: it is partitioned, is sharded, is on the meta device, or is no dense
    tensor (yet)."""
    is_owned = "_onefold_owner" in param.__dict__ and deferred_by(param) is None
    if is_owned or isinstance(param, ReleasedParameter | nn.parameter.UninitializedParameter):
        return True
    return param.is_meta or param.is_quantized or param.layout != torch.strided
