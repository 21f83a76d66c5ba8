"""Owns the yardstick: plain PyTorch, replicated in one process, gradients averaged over the replicas.

A `Case` is one way to train. `train` runs it sharded, on a rank, and holds gradients, weights and buffers to what the
plain replica of the same rank has. Invariant: the sharded and the plain run see the same code, data and random numbers;
only `shard` and the optimizer's constructor differ.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from checks import Tensors, grads, pending, same, tensors, weights
from models import build, plant, sharded
from plans import PLANS

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install deepspeed==0.19.8"
)
thinned = pytest.mark.parametrize(
    ("plan", "num_ranks"),
    [("zero_0", 2), ("zero_1", 2), ("zero_2", 1), ("zero_2", 2), ("zero_3", 1), ("zero_3", 2)],
    ids=lambda value: str(value),
)

OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", {"lr": 0.05, "eps": 1e-3}),
    # eps so large that a gradient which is zero but for rounding does not move a weight
    "adamw": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}),
}


class Turn:
    """One training step of one rank: its data, which do not depend on how the model is held."""

    def __init__(self, rank: int, step: int, *, sharded: bool) -> None:
        self.rank, self.step, self.sharded = rank, step, sharded
        self._generator = torch.Generator().manual_seed(1000 * step + rank + 1)
        plant(1000 * step + rank + 1)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def randint(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self._generator)

    def accumulate(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """`onefold.accumulate`, which plain PyTorch does not need."""
        return onefold.accumulate(model) if self.sharded else contextlib.nullcontext()


def nothing(*ignored: Any) -> None:
    """What a case does before a step, unless it says otherwise."""


def no_schedule(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return nothing


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    `model()` builds it (the seed is set before); `work(model, turn)` does the forwards and backwards of one step;
    `before(model, step)` may change the model between steps. `optimizer` is a key of `OPTIMIZERS`, or a function of
    the model and whether it is sharded; `schedule(optimizer)` returns what to call after each step. `options` go to
    `shard`. When `refusal` is given, Onefold refuses instead under the plans `refused_under`, on every rank, with an
    error of its own whose message matches it.
    """

    model: Callable[[], nn.Module]
    work: Callable[[nn.Module, Turn], None]
    before: Callable[[nn.Module, int], None] = nothing
    optimizer: str | Callable[[nn.Module, bool], torch.optim.Optimizer] = "sgd"
    schedule: Callable[[torch.optim.Optimizer], Callable[[], None]] = no_schedule
    steps: int = 2
    steps_per_zero: int = 1
    tolerance: float = 1e-5
    refusal: str | None = None
    refused_under: Collection[str] = PLANS
    options: Mapping[str, Any] = field(default_factory=dict)


def squared(model, turn):
    model(turn.randn(3, 4)).pow(2).mean().backward()


def average(replicas: list[nn.Module]) -> None:
    """Give every replica the mean gradient. A replica without one counts as zero; none anywhere stays none."""
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if found:
            mean = torch.stack([grad.detach().to_dense().to(torch.float64) for grad in found]).sum(0) / len(replicas)
            for parameter in parameters:
                parameter.grad = mean.to(found[0].dtype)


def optimizer_for(case: Case, model: nn.Module, *, sharded: bool) -> torch.optim.Optimizer:
    if callable(case.optimizer):
        return case.optimizer(model, sharded)
    name, options = OPTIMIZERS[case.optimizer]
    if sharded:
        return getattr(onefold, name)(model, **options)
    return getattr(torch.optim, name)(model.parameters(), **options)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def plain(case: Case, rank: int, num_ranks: int) -> tuple[list[tuple[Tensors, list[float]]], Tensors]:
    """Averaged gradients and learning rates of each step, and the weights and buffers `rank` ends with."""
    replicas = [build(case.model) for _ in range(num_ranks)]
    optimizers = [optimizer_for(case, replica, sharded=False) for replica in replicas]
    schedules = [case.schedule(optimizer) for optimizer in optimizers]
    history = []
    for step in range(case.steps):
        for number, replica in enumerate(replicas):
            case.before(replica, step)
            case.work(replica, Turn(number, step, sharded=False))
        average(replicas)
        history.append((pending(replicas[rank]), rates(optimizers[rank])))
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule()
            if (step + 1) % case.steps_per_zero == 0:
                optimizer.zero_grad()
    return history, tensors(replicas[rank])


def train(rank: int, num_ranks: int, case: Case, plan: str) -> None:
    """Train the case sharded and compare; or see it refused, where the case says that it is."""
    history, end = plain(case, rank, num_ranks)
    if case.refusal is not None and plan in case.refused_under:
        with pytest.raises(onefold.errors.OnefoldError, match=case.refusal):
            _steps(rank, case, sharded(plan, case.model, **case.options), history)
        return
    model = sharded(plan, case.model, **case.options)
    if not case.options:
        same(weights(model), tensors(build(case.model)), 0)
    _steps(rank, case, model, history)
    same(weights(model), end, case.tolerance)


def _steps(rank: int, case: Case, model: nn.Module, history: list[tuple[Tensors, list[float]]]) -> None:
    """The sharded half of `plain`: the same steps, each held to the gradients and learning rates there."""
    optimizer = optimizer_for(case, model, sharded=True)
    schedule = case.schedule(optimizer)
    for step, (wanted_grads, wanted_rates) in enumerate(history):
        case.before(model, step)
        case.work(model, Turn(rank, step, sharded=True))
        same(grads(model), wanted_grads, case.tolerance)
        if rates(optimizer) != wanted_rates:
            raise AssertionError(f"step {step}: learning rates {rates(optimizer)}, wanted {wanted_rates}")
        optimizer.step()
        schedule()
        if (step + 1) % case.steps_per_zero == 0:
            optimizer.zero_grad()
