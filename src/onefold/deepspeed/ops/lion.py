"""Owns DeepSpeed's Lion classes, for `initialize`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from onefold.deepspeed.spec import OptimizerSpec


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023): the sign of an interpolated momentum, with decoupled weight decay.

    Args:
        model_params: parameters, or groups of them.
    """

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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(momentum.lerp(param.grad, 1 - first).sign_(), alpha=-group["lr"])
                momentum.lerp_(param.grad, 1 - second)
        return loss


class DeepSpeedCPULion(Lion):
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


class FusedLion(Lion):
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
