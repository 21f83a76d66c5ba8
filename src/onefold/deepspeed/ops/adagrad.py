"""Owns DeepSpeed's Adagrad class, for `initialize`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from onefold.deepspeed.spec import OptimizerSpec
from onefold.errors import OptimizerError


class DeepSpeedCPUAdagrad(torch.optim.Optimizer):
    """Adagrad (Duchi et al. 2011) for state on the host. It makes no state before its first step, unlike torch's.

    Args:
        model_params: parameters, or groups of them.
    Raises:
        OptimizerError: amsgrad, which Adagrad does not have.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise OptimizerError("DeepSpeedCPUAdagrad has no amsgrad; leave it out")
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @property
    def spec(self) -> OptimizerSpec:
        """What `initialize` runs in its place."""
        return OptimizerSpec("Adagrad", dict(self.defaults))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = param.grad.add(param, alpha=group["weight_decay"])
                total = self.state[param].setdefault("sum", torch.zeros_like(param))
                total.addcmul_(grad, grad)
                param.addcdiv_(grad, total.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss
