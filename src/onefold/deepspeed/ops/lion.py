"""Owns DeepSpeed's Lion classes, for `initialize`."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from onefold.deepspeed.spec import OptimizerSpec, PerParameter


class _PerParameterLion(PerParameter):
    """Lion (Chen et al. 2023): the sign of an interpolated momentum, with decoupled weight decay.

    Args:
        model_params: parameters, or groups of them.
    """

    states = ("exp_avg",)

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(model_params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @property
    def spec(self) -> OptimizerSpec:
        """What `initialize` runs in its place."""
        return OptimizerSpec("Lion", dict(self.defaults))

    def _update(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        momentum = self.state[param]["exp_avg"]
        first, second = group["betas"]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(momentum.lerp(grad, 1 - first).sign_(), alpha=-group["lr"])
        momentum.lerp_(grad, 1 - second)


class DeepSpeedCPULion(_PerParameterLion):
    """Lion for state on the host."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(_PerParameterLion):
    """Lion for state on the device."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
