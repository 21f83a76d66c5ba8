"""Owns how tests hold an update on the host, and look at weights while it is held."""

import threading

import pytest
import torch

import onefold
from checks import same, tensors, weights
from inside import TorchKernel, kernel_on_the_host
from models import Stack, build

PLANS = {
    "offload": onefold.OFFLOAD,
    "offload_3": onefold.OFFLOAD_3,
    "zero_3 and host": onefold.Plan(
        params=onefold.Placement(True), grads=onefold.Placement(True), optim=onefold.Placement(True, onefold.Tier.HOST)
    ),
}
every_plan = pytest.mark.parametrize("plan", PLANS)
STRESSED = {
    **{name: (plan, {}) for name, plan in PLANS.items()},
    "half": (onefold.OFFLOAD.keeping(0.5), {}),
    "delayed": (onefold.OFFLOAD, {"delayed": True, "delay_after": 5}),
}


class Held(TorchKernel):
    """Updates nothing before it is told to."""

    def __init__(self):
        self.go = threading.Event()
        self.was_told = []

    def update(self, run, step):
        self.was_told.append(self.go.wait(240))
        super().update(run, step)


def prepared(plan, kernel, **options):
    """A model whose gradients are there, and its optimizer with `kernel` for the host."""
    model = onefold.shard(build(Stack), PLANS[plan] if isinstance(plan, str) else plan)
    with kernel_on_the_host(lambda *_: kernel):
        optimizer = onefold.SGD(model, lr=0.1, **options)
    model(torch.ones(3, 4)).square().mean().backward()
    return model, optimizer


def updated():
    """The weights that plain PyTorch has after the same step."""
    model = build(Stack)
    model(torch.ones(3, 4)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model


def through_forward(model, plain):
    x = torch.full((2, 4), 0.5)
    same({"output": model(x).detach()}, {"output": plain(x).detach()})


def through_gathered(model, plain):
    same(weights(model), tensors(plain))


def through_a_weight(model, plain):
    with onefold.gathered(model.blocks[1]):
        same({"w": model.blocks[1].up.weight.detach().clone()}, {"w": plain.blocks[1].up.weight.detach()})


def through_backward(model, plain):
    for each in (model, plain):
        each.zero_grad()
        each(torch.ones(2, 4)).sum().backward()
    with onefold.gathered(model):
        same(
            {name: param.grad for name, param in model.named_parameters()},
            {name: param.grad for name, param in plain.named_parameters()},
        )
