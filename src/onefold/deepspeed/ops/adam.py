"""Owns DeepSpeed's Adam classes: its arguments on torch's Adam, for `initialize`."""

from collections.abc import Iterable
from typing import Any

import torch

from onefold.deepspeed.spec import OptimizerSpec, UncorrectedAdam
from onefold.deepspeed.unsupported_names import unsupported
from onefold.errors import OptimizerError


class _CorrectedAdam(torch.optim.Adam):
    """torch's Adam, decoupled (AdamW) unless told otherwise.

    Raises:
        OptimizerError: amsgrad, which DeepSpeed's do not have either.
    """

    def __new__(cls, *arguments: Any, bias_correction: bool = True, **named: Any) -> Any:
        """Without bias correction it is an UncorrectedAdam."""
        corrected = arguments[2] if len(arguments) > 2 else bias_correction
        if corrected:
            return super().__new__(cls)
        names = ("params", "lr", "bias_correction", "betas", "eps", *cls._later)
        given = dict(zip(names, arguments, strict=False)) | named
        decoupled = given.get("adam_w_mode", given.get("adamw_mode", True))
        wanted = {name: given[name] for name in ("lr", "betas", "eps", "weight_decay") if name in given}
        params = given["params"] if "params" in given else given["model_params"]
        return UncorrectedAdam(params, decoupled=decoupled, **wanted)

    _later: tuple[str, ...] = ()

    @property
    def spec(self) -> OptimizerSpec:
        """What `initialize` runs in its place."""
        arguments = {name: self.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        return OptimizerSpec("AdamW" if self.defaults["decoupled_weight_decay"] else "Adam", arguments)

    def _set_up(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        decoupled: bool,
    ) -> None:
        if amsgrad:
            raise OptimizerError(f"{type(self).__name__} has no amsgrad; nearest: torch.optim.AdamW(amsgrad=True)")
        torch.optim.Adam.__init__(
            self, params, lr, (betas[0], betas[1]), eps, weight_decay, decoupled_weight_decay=decoupled
        )


class FusedAdam(_CorrectedAdam):
    """Adam for state on the device. Arguments as torch's, but `adam_w_mode` False makes weight decay an L2 term."""

    _later = ("adam_w_mode", "weight_decay", "amsgrad", "set_grad_none")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self._set_up(params, lr, betas, eps, weight_decay, amsgrad, adam_w_mode)


class DeepSpeedCPUAdam(_CorrectedAdam):
    """Adam for state on the host. Arguments as torch's, but `adamw_mode` False makes weight decay an L2 term."""

    _later = ("weight_decay", "amsgrad", "adamw_mode", "fp32_optimizer_states")

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self._set_up(model_params, lr, betas, eps, weight_decay, amsgrad, adamw_mode)


_ZENFLOW = ("updating important gradients first changes what is computed", "ops.adam.DeepSpeedCPUAdam")
ZenFlowCPUAdam = unsupported("ops.adam.ZenFlowCPUAdam", *_ZENFLOW)
ZenFlowSelectiveAdamW = unsupported("ops.adam.ZenFlowSelectiveAdamW", *_ZENFLOW)
