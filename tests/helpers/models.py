"""Owns the small models that tests share. A model that one promise needs is beside that promise's tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from plans import NAMED_PLANS

WIDTH = 8


class Block(nn.Module):
    """The repeated block of small models; keeps an intermediate, as models that expose attention maps do."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        self.middle = torch.tanh(self.up(self.norm(x)))
        return x + self.down(self.middle)


class Lean(Block):
    """A block that keeps no intermediate: one that a checkpoint recomputes would hold the weights' memory."""

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Checkpointed(Lean):
    """A block that recomputes itself."""

    is_reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.is_reentrant)


class Reentrant(Checkpointed):
    is_reentrant = True


class Stack(nn.Module):
    """A small model of repeated blocks, each a unit of its own: [n, 4] to [n, 2]."""

    def __init__(self, depth=3, block=Block):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sequential():
    """Blocks of blocks, and no parameter outside of them."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    plant(seed)
    return make()


def plant(seed: int) -> None:
    """As `torch.manual_seed` for the CPU, which takes half a millisecond: it looks for devices of every kind."""
    torch.default_generator.manual_seed(seed)


def sharded(plan: str, make: Callable[[], nn.Module] = Stack, **options: Any) -> nn.Module:
    """A small model under a plan, by its name."""
    return onefold.shard(build(make), NAMED_PLANS[plan], **options)


def backward(model: nn.Module, factor: float = 1.0) -> None:
    """One backward of a `Stack`, on data that are always the same."""
    (factor * model(torch.linspace(-1, 1, 12).view(3, 4)).square().mean()).backward()


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """The model, built on the meta device."""
    with torch.device("meta"):
        return make()


def wide():
    """Sixteen layers of the same size."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))


class Routed(nn.Module):
    """Runs its blocks in the order it is told, with an inner part that has blocks of its own."""

    def __init__(self, depth=4):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, order=(0, 1, 2, 3)):
        x = self.embed(x)
        for index in order:
            x = self.blocks[index](x)
        return self.head(x)
