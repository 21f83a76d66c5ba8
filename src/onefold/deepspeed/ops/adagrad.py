"""Owns DeepSpeed's Adagrad class, for `initialize`."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from onefold.deepspeed.spec import OptimizerSpec, PerParameter
from onefold.errors import OptimizerError


class DeepSpeedCPUAdagrad(PerParameter):
    """Adagrad (Duchi et al. 2011) for state on the host. It makes no state before its first step, unlike torch's.

    Args:
        model_params: parameters, or groups of them.
    Raises:
        OptimizerError: amsgrad, which Adagrad does not have.
    """

    states = ("sum",)

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

    def _update(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        total = self.state[param]["sum"]
        grad = grad.add(param, alpha=group["weight_decay"])
        total.addcmul_(grad, grad)
        param.addcdiv_(grad, total.sqrt().add_(group["eps"]), value=-group["lr"])
