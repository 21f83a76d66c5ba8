"""Owns every hook Onefold puts on a model: on modules, parameters and outputs. Nothing else of the model is changed.

Hooks translate what PyTorch reports into calls of the runtime and the reducer; they decide nothing.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from onefold.engine.grad_states import GradStates
from onefold.engine.reducer import Reducer, is_captured
from onefold.engine.released import ReleasedParameter
from onefold.engine.running import in_backward
from onefold.engine.runtime import Runtime
from onefold.engine.unit import Unit
from onefold.errors import PrecisionError, ShardError

_TORCHS_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class Scale(Protocol):
    """Where the current loss scale is read."""

    @property
    def scale(self) -> float: ...


class ModuleHooks:
    """The hooks of one module that a unit gathers for. A compiler leaves them alone, with all that they call: it would
    trace into gathers, and compile again whenever something there had changed. `torch.compiler.disable` would import it
    with this module, which takes a second; torch's optimizers have the one that waits for the first call."""

    def __init__(self, runtime: Runtime, unit: Unit, name: str, gate: "Gate") -> None:
        self._runtime = runtime
        self._unit = unit
        self._name = name
        self._gate = gate

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after, always_call=True)

    @_disable_dynamo
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        is_outermost = self._runtime.is_outermost and not in_backward()
        self._runtime.enter(module, self._unit, self._name)
        if not is_outermost:
            return None
        self._gate.take_back()
        return self._gate.inward(args, kwargs)

    @_disable_dynamo
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._runtime.leave(module)
        if self._runtime.is_outermost and not in_backward() and torch.is_grad_enabled():
            return self._gate.outward(module, output)
        return None

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ShardError(
            "a sharded model cannot be copied: its values rest in shards on several ranks. Copy the model before "
            "onefold.shard, or build a second one and load the weights read inside `with onefold.gathered(model):`"
        )

    def __reduce__(self) -> NoReturn:
        raise ShardError(
            "a sharded model cannot be pickled; save the weights read inside `with onefold.gathered(model):`"
        )


class InlinedHooks(ModuleHooks):
    """The hooks of a module that is called by itself, or inside a module whose forward is compiled as a whole. There
    they do nothing, so that it stays one graph: that module's own have done it all."""

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if torch.compiler.is_compiling() else super().before(module, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if torch.compiler.is_compiling() else super().after(module, args, output)


class Gate:
    """What happens to tensors that enter and leave the whole model.

    Outputs tell the runtime that a backward pass begins. With a loss scale, gradients are multiplied by it as they
    enter at the outputs and divided by it as they leave at the inputs, so the caller's loop never sees scaled numbers.
    Tensors that a forward leaves in attributes of its modules (auxiliary losses) are outputs too, until the next
    forward, which finds them as they were.
    """

    def __init__(self, runtime: Runtime, scale: Scale, dtype: torch.dtype | None) -> None:
        self._hooks = BoundaryHooks(runtime, scale)
        self._scale = scale
        self._dtype = dtype
        self._left: list[tuple[Any, Any, Tensor, Tensor]] = []
        """Container, key, and the tensor there inside and outside of forwards."""

    def _let_out_attributes(self, model: nn.Module, let_out: Callable[[Tensor], Tensor]) -> None:
        if self._scale.scale == 1:
            return
        for module in model.modules():
            for name in vars(module).keys() - _TORCHS_OWN:
                self._let_out_of(vars(module), name, let_out)

    def _let_out_of(self, container: Any, key: Any, let_out: Callable[[Tensor], Tensor]) -> None:
        value = container[key]
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                container[key] = let_out(value)
                self._left.append((container, key, value, container[key]))
        elif isinstance(value, (list, dict)):
            for inner in list(value) if isinstance(value, dict) else range(len(value)):
                self._let_out_of(value, inner, let_out)

    def take_back(self) -> None:
        left, self._left = self._left, []
        for container, key, inside, outside in left:
            is_there = key in container if isinstance(container, dict) else key < len(container)
            if is_there and container[key] is outside:
                container[key] = inside

    def inward(self, args: Any, kwargs: Any) -> Any:
        return map_tensors(args, self._take_in), map_tensors(kwargs, self._take_in)

    def outward(self, model: nn.Module, output: Any) -> Any:
        let_out = _once(self._let_out)
        self._let_out_attributes(model, let_out)
        return map_tensors(output, let_out)

    def _take_in(self, tensor: Tensor) -> Tensor:
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        if self._scale.scale != 1 and tensor.requires_grad and torch.is_grad_enabled():
            return change_gradient(tensor, self._hooks.leave)
        return tensor

    def _let_out(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or isinstance(tensor, ReleasedParameter):
            return tensor
        if self._scale.scale != 1:
            return change_gradient(tensor, self._hooks.enter_scaled)
        if isinstance(tensor, nn.Parameter):  # has hooks of its own
            return tensor
        if tensor.is_leaf:  # the caller's own tensor, passed through: it gets no hook
            tensor = tensor.view_as(tensor)
        tensor.register_hook(self._hooks.enter)
        return tensor


class BoundaryHooks:
    """The hooks of tensors that enter and leave the whole model. See [Note: Who keeps a model alive]."""

    __slots__ = ("_runtime", "_scale")

    def __init__(self, runtime: Runtime, scale: Scale) -> None:
        self._runtime = ref(runtime)
        self._scale = scale

    def enter(self, grad: Tensor) -> None:
        self._open()

    def enter_scaled(self, grad: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise PrecisionError(
                "create_graph=True cannot be combined with a loss scale: second derivatives would carry the scale "
                'twice. Use Precision(params="bf16"), which needs no loss scale'
            )
        self._open(at_output=True)
        return grad * self._scale.scale

    def leave(self, grad: Tensor) -> Tensor:
        return grad / self._scale.scale

    def _open(self, at_output: bool = False) -> None:
        runtime = self._runtime()
        if runtime is not None:
            runtime.open_backward(at_output)


class GradientHooks:
    """The hooks of one trained parameter. See [Note: Who keeps a model alive]."""

    __slots__ = ("_index", "_reducer", "_runtime", "_slot", "_states")

    def __init__(self, runtime: Runtime, reducer: Reducer, index: int, states: GradStates, slot: int) -> None:
        self._runtime = ref(runtime)
        self._reducer = ref(reducer)
        self._states = ref(states)
        self._index = index
        self._slot = slot

    def before(self, grad: Tensor) -> Tensor | None:
        """Autograd has the gradient of one parameter, and is about to accumulate it into `.grad`, or to return it
        (torch.autograd.grad): then as this method returns it, without the loss scale."""
        reducer, states = self._reducer(), self._states()
        if reducer is None or states is None or (reducer.scale == 1 and states.is_none(self._slot)):
            return None
        if is_captured(states.flat.params[self._slot]):
            return None if reducer.scale == 1 else grad / reducer.scale
        states.enter(self._slot)
        return None

    def after(self, param: Tensor) -> None:
        runtime, reducer, states = self._runtime(), self._reducer(), self._states()
        if runtime is not None and reducer is not None and states is not None:
            runtime.open_backward()
            reducer.arrive(self._index, states, self._slot)


def install_gradient_hooks(runtime: Runtime, reducer: Reducer) -> None:
    """Let every trained parameter tell the reducer about its gradient."""
    for index, group in reducer.states.items():
        for states in group:
            for slot, param in enumerate(states.flat.params):
                if param.requires_grad:
                    hooks = GradientHooks(runtime, reducer, index, states, slot)
                    param.register_hook(hooks.before)
                    param.register_post_accumulate_grad_hook(hooks.after)


def register_state_dict_hooks(
    model: nn.Module,
    before_load: Callable[..., None],
    after_load: Callable[..., None],
    before_save: Callable[..., None],
) -> None:
    """Call these around `load_state_dict` and before `state_dict` of the whole model."""
    model._register_load_state_dict_pre_hook(before_load)
    model.register_load_state_dict_post_hook(after_load)
    model.register_state_dict_pre_hook(before_save)


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else ctx.change(grad), None


def change_gradient(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The same values in the same memory, whose gradient is changed as it goes on to `tensor`. It is no view: code that
    works in place (`loss *= 2`) would rebase that, around any hook."""
    changed: Tensor = _Changed.apply(tensor, change)  # type: ignore[no-untyped-call]
    return changed


def change_entering(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a model returned, with gradients changed as they enter at its tensors: each once, whatever other output
    depends on the same tensor."""

    def outside(tensor: Tensor) -> Tensor:
        return change_gradient(tensor, change) if tensor.requires_grad and not tensor.is_leaf else tensor

    return map_tensors(output, _once(outside))


def _once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`change` that gives one result for one tensor, wherever that is returned: what works in place on it at one place
    is seen at the others, also by autograd."""
    changed: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    return once


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in nested tuples, lists, dicts and dataclasses changed; the rest, and what holds no
    tensor, is returned as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        items = [map_tensors(item, change) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, dict):
        return _map_dict(value, change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        mapped = {name: map_tensors(old, change) for name, old in fields.items()}
        if all(mapped[name] is old for name, old in fields.items()):
            return value
        changed = copy.copy(value)
        for name, new in mapped.items():
            object.__setattr__(changed, name, new)
        return changed
    return value


def _map_dict(value: dict[Any, Any], change: Callable[[Tensor], Tensor]) -> dict[Any, Any]:
    mapped = {key: map_tensors(old, change) for key, old in value.items()}
    if all(mapped[key] is old for key, old in value.items()):
        return value
    changed = copy.copy(value)
    for key, new in mapped.items():
        changed[key] = new
    return changed
