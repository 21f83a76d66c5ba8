"""Owns what a configuration becomes: values of Onefold's public surface, ready to be used.

Invariant: a `Translation` that exists can be carried out; nothing in it is "auto" or unsupported.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onefold.deepspeed.schedules import SCHEDULES
from onefold.optim.optimizer import Optimizer
from onefold.optim.optimizers import SGD, Adagrad, Adam, AdamW, Elementwise, Lion
from onefold.plan.precision import Precision
from onefold.plan.table import Plan


class PerParameter(torch.optim.Optimizer):
    """An optimizer of DeepSpeed's that torch lacks, one parameter after another.

    Attributes:
        states: what it keeps of each parameter, in its shape, zeros at first.
    """

    states: ClassVar[tuple[str, ...]]

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
                if not self.state[param]:
                    self.state[param].update({name: torch.zeros_like(param) for name in self.states})
                self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        raise NotImplementedError


class UncorrectedAdam(PerParameter):
    """Adam whose moments are not corrected for their start at zero (`bias_correction: false`, as BERT was trained).

    Args:
        decoupled: weight decay as in AdamW; false: as an L2 term of the gradient.
    """

    states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.decoupled = decoupled

    def _update(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[param]
        first, second = group["betas"]
        if not self.decoupled:
            grad = grad.add(param, alpha=group["weight_decay"])
        state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        if self.decoupled:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"])


NATIVE: Mapping[str, type[Optimizer]] = {cls.__name__: cls for cls in (AdamW, Adam, SGD, Lion, Adagrad)}


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer and its arguments.

    Args:
        name: one of Onefold's own (`NATIVE`), "UncorrectedAdam", or a class of torch.optim.
        arguments: its hyper-parameters.
    """

    name: str
    arguments: Mapping[str, Any]

    @property
    def torch_class(self) -> type[torch.optim.Optimizer] | None:
        """The class that runs through `Elementwise`; None for Onefold's own."""
        if self.name in NATIVE:
            return None
        return UncorrectedAdam if self.name == "UncorrectedAdam" else getattr(torch.optim, self.name)

    def build(
        self,
        model: nn.Module,
        *,
        max_grad_norm: float | None = None,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> Optimizer:
        """The optimizer of a sharded `model`.

        Raises:
            OptimizerError: the model is not sharded, or the groups do not fit it.
        """
        common = {"max_grad_norm": max_grad_norm, "param_groups": param_groups}
        if self.name in NATIVE:
            return NATIVE[self.name](model, **self.arguments, **common)  # type: ignore[arg-type]
        cls = self.torch_class
        return Elementwise(model, cls, **self.arguments, **common)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.arguments.items())})"


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """A learning-rate schedule and its arguments: one of `SCHEDULES`, or of torch.optim.lr_scheduler."""

    name: str
    arguments: Mapping[str, Any]

    def build(self, optimizer: torch.optim.Optimizer) -> Any:
        """The schedule of `optimizer`; step it once for each step of the optimizer.

        Raises:
            ConfigError: a list of rates does not fit the parameter groups.
        """
        cls = SCHEDULES.get(self.name) or getattr(torch.optim.lr_scheduler, self.name)
        return cls(optimizer, **self.arguments)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.arguments.items())})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A configuration in Onefold's terms.

    Args:
        plan, precision, prefetch_bytes, compile: arguments of `onefold.shard`.
        autocast: dtype for `torch.autocast` around the forward pass; None for none.
        optimizer, scheduler: None where the script brings its own.
        max_grad_norm: argument of the optimizer; None does not clip.
        micro_batch, accumulation, train_batch: samples of one backward on one rank; backward passes a step; samples
            a step on all ranks.
        save_16bit: whether `save_16bit_model` writes whole weights under a plan that splits them.
        drop_last: of a data loader made from `training_data`.
        managed: whether the engine counts the backwards of a step; else every `step()` updates.
    """

    plan: Plan
    precision: Precision
    autocast: torch.dtype | None = None
    optimizer: OptimizerSpec | None = None
    scheduler: SchedulerSpec | None = None
    max_grad_norm: float | None = 1.0
    micro_batch: int = 1
    accumulation: int = 1
    train_batch: int = 1
    prefetch_bytes: int | None = None
    compile: bool = False
    save_16bit: bool = False
    drop_last: bool = False
    managed: bool = True
    shard_arguments: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        arguments = {
            "plan": self.plan,
            "precision": self.precision,
            "compile": self.compile,
            "prefetch_bytes": self.prefetch_bytes,
        }
        object.__setattr__(self, "shard_arguments", arguments)
