"""Owns DeepSpeed's Adagrad class, for `initialize`."""

from collections.abc import Iterable
from typing import Any

import torch

from onefold.deepspeed.spec import OptimizerSpec
from onefold.errors import OptimizerError


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad with DeepSpeed's arguments.

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
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)

    @property
    def spec(self) -> OptimizerSpec:
        """What `initialize` runs in its place."""
        return OptimizerSpec("Adagrad", {name: self.defaults[name] for name in ("lr", "eps", "weight_decay")})
