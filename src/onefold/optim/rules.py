"""Owns the arithmetic of the optimizers: pure functions on contiguous runs of a flat shard.

Invariant: an element's new value depends on that element alone - its weight, gradient and state, the hyper-parameters
and the step number - so a shard may be cut into runs anywhere and the result stays the same, bit for bit. AdamW, Adam,
SGD and Adagrad repeat torch.optim's single-tensor sequence of operations and equal it bit for bit on CPU. A gradient
that has been used up serves as scratch: Adam, AdamW and SGD allocate nothing, Adagrad and Lion one run's worth.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from onefold.errors import OptimizerError

Hyper = Mapping[str, Any]
"""Live hyper-parameters of a parameter group, by torch.optim's names."""
State = Mapping[str, Tensor]
"""Flat state tensors by name, each as long as the run."""


@runtime_checkable
class Rule(Protocol):
    """How one optimizer updates a contiguous run of a flat shard. Holds the defaults; keeps no state of its own."""

    @property
    def name(self) -> str:
        """A short lower-case name, such as "adamw"."""
        ...

    def defaults(self) -> dict[str, Any]:
        """The hyper-parameters that parameter groups start from, by torch.optim's names."""
        ...

    def state_names(self, hyper: Hyper) -> tuple[str, ...]:
        """The flat state tensors this rule keeps: one element per parameter element, in the master's dtype."""
        ...

    def init_state(self, name: str, out: Tensor, hyper: Hyper) -> None:
        """Fill `out`, a freshly allocated 1-D state tensor called `name`, in place."""
        ...

    def update(self, master: Tensor, grad: Tensor, state: State, hyper: Hyper, step: int) -> None:
        """Update `master` and `state` in place by one step. Called under `torch.no_grad`.

        Args:
            master: 1-D, fp32 or fp64: the exact weights.
            grad: 1-D, the dtype and length of `master`; averaged, unscaled and clipped. May be overwritten.
            state: one tensor for each of `state_names(hyper)`, 1-D, the dtype and length of `master`.
            hyper: live hyper-parameters; numbers, or tensors of one element.
            step: the 1-based number of this update for these elements.
        Raises:
            OptimizerError: `state` lacks a tensor that `hyper` asks for.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) as in torch.optim.Adam: weight decay is L2, added to the gradient.

    `amsgrad` divides by the largest second moment seen so far (Reddi et al. 2018, algorithm 2).

    Raises:
        OptimizerError: lr, eps or weight_decay is negative, or a beta is not in [0, 1).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False

    name: ClassVar[str] = "adam"
    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _settle(self, "lr", "eps", "weight_decay")
        _settle_betas(self, self.betas)

    def defaults(self) -> dict[str, Any]:
        return _fields(self)

    def state_names(self, hyper: Hyper) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if hyper["amsgrad"] else ()))

    def init_state(self, name: str, out: Tensor, hyper: Hyper) -> None:
        out.zero_()

    def update(self, master: Tensor, grad: Tensor, state: State, hyper: Hyper, step: int) -> None:
        lr, eps, weight_decay = _number(hyper["lr"]), _number(hyper["eps"]), _number(hyper["weight_decay"])
        beta1, beta2 = (_number(beta) for beta in hyper["betas"])
        first, second = _tensor(self, state, "exp_avg"), _tensor(self, state, "exp_avg_sq")
        if hyper["maximize"]:
            grad.neg_()
        if weight_decay != 0 and self.decoupled:
            master.mul_(1 - lr * weight_decay)
        elif weight_decay != 0:
            grad.add_(master, alpha=weight_decay)
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if hyper["amsgrad"]:
            largest = _tensor(self, state, "max_exp_avg_sq")
            second = torch.maximum(largest, second, out=largest)
        correction1, correction2 = 1 - beta1**step, (1 - beta2**step) ** 0.5
        denominator = torch.sqrt(second, out=grad).div_(correction2).add_(eps)
        master.addcdiv_(first, denominator, value=-(lr / correction1))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) as in torch.optim.AdamW: decay shrinks the weight itself.

    Raises:
        OptimizerError: lr, eps or weight_decay is negative, or a beta is not in [0, 1).
    """

    weight_decay: float = 1e-2

    name: ClassVar[str] = "adamw"
    decoupled: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Stochastic gradient descent as in torch.optim.SGD (momentum of Sutskever et al. 2013, lr outside the buffer).

    The first update sets the momentum buffer to the gradient itself; dampening counts from the second on.

    Raises:
        OptimizerError: lr, momentum or weight_decay is negative, or nesterov without momentum or with dampening.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        _settle(self, "lr", "momentum", "weight_decay")
        object.__setattr__(self, "dampening", _number(self.dampening))
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            given = f"momentum={self.momentum}, dampening={self.dampening}"
            raise OptimizerError(f"SGD(nesterov=True) needs a positive momentum and no dampening, not {given}")

    def defaults(self) -> dict[str, Any]:
        return _fields(self)

    def state_names(self, hyper: Hyper) -> tuple[str, ...]:
        return ("momentum_buffer",) if _number(hyper["momentum"]) != 0 else ()

    def init_state(self, name: str, out: Tensor, hyper: Hyper) -> None:
        out.zero_()

    def update(self, master: Tensor, grad: Tensor, state: State, hyper: Hyper, step: int) -> None:
        lr, momentum, weight_decay = (_number(hyper[key]) for key in ("lr", "momentum", "weight_decay"))
        if hyper["maximize"]:
            grad.neg_()
        if weight_decay != 0:
            grad.add_(master, alpha=weight_decay)
        direction = grad
        if momentum != 0:
            buffer = _tensor(self, state, "momentum_buffer")
            if step == 1:
                buffer.copy_(grad)
            else:
                buffer.mul_(momentum).add_(grad, alpha=1 - _number(hyper["dampening"]))
            direction = grad.add_(buffer, alpha=momentum) if hyper["nesterov"] else buffer
        master.add_(direction, alpha=-lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion:
    """Lion (Chen et al. 2023, algorithm 2): the sign of a blend of momentum and gradient, with decoupled weight decay.

    Raises:
        OptimizerError: lr or weight_decay is negative, or a beta is not in [0, 1).
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    name: ClassVar[str] = "lion"

    def __post_init__(self) -> None:
        _settle(self, "lr", "weight_decay")
        _settle_betas(self, self.betas)

    def defaults(self) -> dict[str, Any]:
        return _fields(self)

    def state_names(self, hyper: Hyper) -> tuple[str, ...]:
        return ("exp_avg",)

    def init_state(self, name: str, out: Tensor, hyper: Hyper) -> None:
        out.zero_()

    def update(self, master: Tensor, grad: Tensor, state: State, hyper: Hyper, step: int) -> None:
        lr, weight_decay = _number(hyper["lr"]), _number(hyper["weight_decay"])
        beta1, beta2 = (_number(beta) for beta in hyper["betas"])
        momentum = _tensor(self, state, "exp_avg")
        if weight_decay != 0:
            master.mul_(1 - lr * weight_decay)
        # Both the old momentum and the gradient are needed again below, so the blend takes a run of its own.
        blend = momentum.mul(beta1).add_(grad, alpha=1 - beta1)
        master.add_(blend.sign_(), alpha=-lr)
        momentum.mul_(beta2).add_(grad, alpha=1 - beta2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """Adagrad (Duchi et al. 2011, diagonal form) as in torch.optim.Adagrad.

    Raises:
        OptimizerError: lr, lr_decay, eps, weight_decay or initial_accumulator_value is negative.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    maximize: bool = False

    name: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        _settle(self, "lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value")

    def defaults(self) -> dict[str, Any]:
        return _fields(self)

    def state_names(self, hyper: Hyper) -> tuple[str, ...]:
        return ("sum",)

    def init_state(self, name: str, out: Tensor, hyper: Hyper) -> None:
        out.fill_(_number(hyper["initial_accumulator_value"]))

    def update(self, master: Tensor, grad: Tensor, state: State, hyper: Hyper, step: int) -> None:
        lr, lr_decay = _number(hyper["lr"]), _number(hyper["lr_decay"])
        weight_decay, total = _number(hyper["weight_decay"]), _tensor(self, state, "sum")
        if hyper["maximize"]:
            grad.neg_()
        if weight_decay != 0:
            grad.add_(master, alpha=weight_decay)
        total.addcmul_(grad, grad, value=1)
        decayed = lr / (1 + (step - 1) * lr_decay)
        # The gradient is still the numerator here, so the denominator takes a run of its own.
        master.addcdiv_(grad, total.sqrt().add_(_number(hyper["eps"])), value=-decayed)


def _number(value: "float | Tensor") -> float:
    """A hyper-parameter as a Python float; a scheduler may have left a tensor of one element."""
    return float(value)


def _fields(rule: Any) -> dict[str, Any]:
    return {field.name: getattr(rule, field.name) for field in fields(rule)}


def _settle(rule: Any, *names: str) -> None:
    """Turn the named hyper-parameters into floats; refuse negative numbers and NaN, as torch.optim does."""
    for name in names:
        value = _number(getattr(rule, name))
        if not value >= 0:
            raise OptimizerError(f"{type(rule).__name__}({name}={value}): expected a number of at least 0")
        object.__setattr__(rule, name, value)


def _settle_betas(rule: Any, betas: Any) -> None:
    pair = tuple(_number(beta) for beta in betas)
    if len(pair) != 2 or not all(0 <= beta < 1 for beta in pair):
        raise OptimizerError(f"{type(rule).__name__}(betas={pair}): expected two numbers in [0, 1)")
    object.__setattr__(rule, "betas", pair)


def check_hyper(name: str, defaults: Hyper, groups: Sequence[Hyper]) -> None:
    """Raise unless the hyper-parameters of all groups that began as numbers still are, and have not gone.

    Raises:
        OptimizerError: says which one and what it is. Left to the update, it would be an error of a worker's thread.
    """
    for index, group in enumerate(groups):
        for key, default in defaults.items():
            if key not in group:
                raise OptimizerError(f"param_groups[{index}] has lost {key!r}; {name} began with {key}={default!r}")
            if _is_number(default) and not _is_number(group[key]):
                raise OptimizerError(f"param_groups[{index}] has {key}={group[key]!r}; {name} needs a number")
            if isinstance(default, tuple) and not _are_numbers(group[key], num := len(default)):
                raise OptimizerError(
                    f"param_groups[{index}] has {key}={group[key]!r}; {name} needs {num} numbers there"
                )


def _are_numbers(value: Any, num: int) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == num and all(_is_number(each) for each in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def check_state(rule: Rule, state: Iterable[str], needed: Iterable[str]) -> None:
    """Raise if `state` lacks a tensor of those names that are needed.

    Raises:
        OptimizerError: says why that may be, and the way out.
    """
    missing = sorted(set(needed) - set(state))
    if missing:
        raise OptimizerError(
            f"{rule.name} needs the state tensor {missing[0]!r}, but these elements have {sorted(state) or 'none'}: a "
            "hyper-parameter that decides which state exists (momentum, amsgrad) changed after the state was laid out; "
            "set it when the optimizer is made (a momentum that is to rise from nothing may start at 1e-9)"
        )


def _tensor(rule: Rule, state: State, name: str) -> Tensor:
    check_state(rule, state, (name,))
    return state[name]
