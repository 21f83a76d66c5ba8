"""Owns what a call of a kernel comes down to: a rule's number, state and scalars, the form of the weights, and checks.

Invariant: every kernel takes these numbers as they are made here, each rounded once to fp32, so kernels cannot differ
in what they start from. The numbers are those of csrc/onefold.h.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onefold.errors import OptimizerError

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
OWN, SPLIT = 0, 1
COPIES = {torch.bfloat16: 2, torch.float16: 3}
MAX_FACTORS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A rule as kernels want it: its number, the names of its state and its scalars, in the header's order."""

    number: int
    state: tuple[str, ...]
    scalars: tuple[float, ...]


def plan_of(rule: str, hyper: Mapping[str, Any], step: int) -> Plan:
    """The plan of one update.

    Raises:
        OptimizerError: no kernel knows the rule.
    """
    if rule not in RULES:
        known = ", ".join(sorted(RULES))
        raise OptimizerError(f"no compiled kernel for the rule {rule!r}, only {known}: use TorchKernel")
    return RULES[rule](hyper, step)


def factors_of(factors: Sequence[float], hyper: Mapping[str, Any]) -> tuple[float, ...]:
    """Two factors for the gradient, the last one negative where the rule maximizes.

    Raises:
        OptimizerError: there are more than two.
    """
    if len(factors) > MAX_FACTORS:
        raise OptimizerError(f"{len(factors)} factors: a kernel takes at most {MAX_FACTORS}; multiply some")
    *most, last = [*factors, 1.0, 1.0][:MAX_FACTORS]
    return (*most, -last if hyper.get("maximize", False) else last)


def state_of(rule: str, names: Sequence[str], state: Mapping[str, Tensor], numel: int, device: str) -> list[Tensor]:
    """The state tensors by those names, checked."""
    for name in names:
        if name not in state:
            raise OptimizerError(f"{rule} needs the state tensor {name!r}; got {sorted(state)}")
        check(state[name], f"state {name!r}", (torch.float32,), numel, device)
    return [state[name] for name in names]


def form_of(
    weight: Tensor, exact: Tensor | None, *, own: tuple[torch.dtype, ...] = (torch.float32,), device: str = "cpu"
) -> int:
    """The number of the form that weights are kept in, told by their dtypes; `own` may be exact by themselves."""
    numel = weight.numel()
    if exact is None:
        check(weight, "weight", own, numel, device)
        return OWN
    check(exact, "exact", (torch.int16, torch.float32), numel, device)
    if exact.dtype == torch.int16:
        check(weight, "weight", (torch.bfloat16,), numel, device)
        return SPLIT
    check(weight, "weight", tuple(COPIES), numel, device)
    return COPIES[weight.dtype]


def format_of(tensor: Tensor, name: str, numel: int, device: str = "cpu") -> int:
    """The number of a tensor's number format."""
    check(tensor, name, tuple(FORMATS), numel, device)
    return FORMATS[tensor.dtype]


def check(tensor: Tensor, name: str, dtypes: tuple[torch.dtype, ...], numel: int, device: str = "cpu") -> None:
    """Pointers carry no types: everything that a kernel relies on is checked here.

    Args:
        device: the type of device the tensor must be on.
    Raises:
        OptimizerError: the tensor is something else than a kernel would read it as.
    """
    right = tensor.device.type == device and tensor.dim() == 1 and tensor.is_contiguous()
    if right and tensor.dtype in dtypes and tensor.numel() == numel:
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise OptimizerError(
        f"{name}: expected a contiguous 1-D {device.upper()} tensor of {numel} elements, {wanted}; got "
        f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}, "
        f"strides {tensor.stride()}"
    )


def _adam(hyper: Mapping[str, Any], step: int, *, decoupled: bool = False) -> Plan:
    lr, eps, weight_decay = (float(hyper[key]) for key in ("lr", "eps", "weight_decay"))
    beta1, beta2 = (float(beta) for beta in hyper["betas"])
    correction1, correction2 = 1 - beta1**step, (1 - beta2**step) ** 0.5
    decay = 1 - lr * weight_decay if decoupled else weight_decay
    amsgrad = bool(hyper.get("amsgrad", False))
    return Plan(
        number=2 * decoupled + amsgrad,
        state=("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())),
        scalars=(1 - beta1, beta2, 1 - beta2, correction2, eps, -(lr / correction1), decay),
    )


def _adamw(hyper: Mapping[str, Any], step: int) -> Plan:
    return _adam(hyper, step, decoupled=True)


def _sgd(hyper: Mapping[str, Any], step: int) -> Plan:
    lr, momentum, weight_decay = (float(hyper[key]) for key in ("lr", "momentum", "weight_decay"))
    if momentum == 0:
        return Plan(number=4, state=(), scalars=(-lr, weight_decay))
    rest = 1 - float(hyper.get("dampening", 0))
    scalars = (-lr, weight_decay, momentum, rest, float(hyper.get("nesterov", False)))
    return Plan(number=5 if step == 1 else 6, state=("momentum_buffer",), scalars=scalars)


def _lion(hyper: Mapping[str, Any], step: int) -> Plan:
    lr, weight_decay = float(hyper["lr"]), float(hyper["weight_decay"])
    beta1, beta2 = (float(beta) for beta in hyper["betas"])
    return Plan(number=7, state=("exp_avg",), scalars=(-lr, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2))


def _adagrad(hyper: Mapping[str, Any], step: int) -> Plan:
    lr, lr_decay, eps, weight_decay = (float(hyper[key]) for key in ("lr", "lr_decay", "eps", "weight_decay"))
    return Plan(number=8, state=("sum",), scalars=(-(lr / (1 + (step - 1) * lr_decay)), eps, weight_decay))


RULES: Mapping[str, Callable[[Mapping[str, Any], int], Plan]] = {
    "adam": _adam,
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
    "adagrad": _adagrad,
}
