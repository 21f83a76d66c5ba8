"""Owns the optimizers users name: each is `Optimizer` with one rule.

All take, besides the hyper-parameters of the torch.optim class of the same name: `no_decay`, `param_groups`,
`max_grad_norm`, `delayed` and `delay_after` (see `Optimizer`).
"""

from typing import Any, Unpack

import torch
from torch import nn

from onefold.optim import rules
from onefold.optim.calls import Common
from onefold.optim.elementwise import tried
from onefold.optim.optimizer import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        rule = rules.AdamW(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize)
        super().__init__(model, rule, **common)


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015) with weight decay as an L2 term, as torch.optim.Adam."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        rule = rules.Adam(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize)
        super().__init__(model, rule, **common)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as torch.optim.SGD."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        rule = rules.SGD(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )
        super().__init__(model, rule, **common)


class Lion(Optimizer):
    """Lion (Chen et al. 2023): the sign of an interpolated momentum."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, rules.Lion(lr=lr, betas=betas, weight_decay=weight_decay), **common)


class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011), as torch.optim.Adagrad."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        rule = rules.Adagrad(
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            maximize=maximize,
        )
        super().__init__(model, rule, **common)


class Elementwise(Optimizer):
    """Any torch.optim class whose update of an element looks at that element alone, run on flat shards.

    Args:
        cls: the class, such as torch.optim.Adamax; tried out first, and refused if it is not element-wise.
        arguments: its keyword arguments, and those that every optimizer takes.
    Raises:
        OptimizerError: the class looks at more than single elements (Muon, Adafactor, LBFGS, ...); says why.
    """

    def __init__(self, model: nn.Module, cls: type[torch.optim.Optimizer], **arguments: Any) -> None:
        common: Common = {}
        for key in ("no_decay", "param_groups", "max_grad_norm", "delayed", "delay_after"):
            if key in arguments:
                common[key] = arguments.pop(key)
        super().__init__(model, tried(cls, arguments), **common)
