"""Promise: recomputation and wrapper modules change nothing about the gradients.

Libraries failed here because their hooks fire again in a recompute (and freed what the checkpoint still held), or
because `hasattr` on a wrapper answered for the module inside it.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import WIDTH, Block, Stack
from plans import every_plan, one_and_two_ranks
from ranks import Case, squared, train

# --- recomputed activations with frozen parameters


class Adapted(nn.Module):
    """A block with a low-rank adapter beside its linear layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.base = nn.Linear(WIDTH, WIDTH)
        self.lora_a = nn.Linear(WIDTH, 2, bias=False)
        self.lora_b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x, scale=1.0):
        hidden = self.norm(x)
        return x + torch.tanh(self.base(hidden) + scale * self.lora_b(self.lora_a(hidden)))


class Recomputed(Stack):
    def __init__(self, reentrant, trained, groups=1):
        super().__init__(block=Adapted)
        self.reentrant, self.groups = reentrant, groups
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in trained))

    def forward(self, x):
        x = self.embed(x).requires_grad_()
        for first in range(0, len(self.blocks), self.groups):
            run = partial(self._run, self.blocks[first : first + self.groups])
            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(x)

    @staticmethod
    def _run(blocks, x):
        for block in blocks:
            x = block(x, scale=0.5)
        return x


class Inside(Adapted):
    """A block that recomputes only a part of itself."""

    def forward(self, x):
        def part(x):
            return torch.tanh(self.base(self.norm(x)))

        return x + checkpoint(part, x, use_reentrant=False) + self.lora_b(self.lora_a(x))


TRAINED = {
    "adapters": ("lora",),
    "half an adapter": ("lora_b",),
    "norms": ("norm",),
    "last block": ("blocks.2",),
    "first block": ("blocks.0",),
    "head": ("head",),
    "everything": ("",),
}


@every_plan
@one_and_two_ranks
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("trained", TRAINED)
def test_checkpointing_with_frozen_parameters(ranks, trained, reentrant, plan, num_ranks):
    case = Case(model=partial(Recomputed, reentrant, TRAINED[trained]), work=squared)
    ranks(num_ranks).run(train, case, plan)


@every_plan
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_over_several_blocks(ranks, reentrant, plan):
    ranks(2).run(train, Case(model=partial(Recomputed, reentrant, ("lora", "head"), groups=2), work=squared), plan)


@every_plan
def test_checkpoint_inside_a_block(ranks, plan):
    ranks(2).run(train, Case(model=partial(Stack, block=Inside), work=squared), plan)


# --- wrappers that pass unknown attributes on to what they wrap


class Delegating(nn.Module):
    """Asks the wrapped module for every attribute it lacks, so `hasattr` on it tells about the inner module."""

    def __init__(self, make=Block, width=WIDTH):
        super().__init__()
        self.inner = make()
        self.copied = nn.Linear(width, width)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x) + self.copied(x)


class Eager(Delegating):
    """Answers any public attribute at all."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return lambda *args, **kwargs: True


class Hooked(Delegating):
    """Forwards attribute writes too."""

    def __setattr__(self, name, value):
        if name in ("inner", "copied") or name.startswith("_") or "inner" not in self.__dict__.get("_modules", {}):
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)


class Shell(Delegating):
    """The whole model behind a delegating wrapper."""

    def __init__(self):
        super().__init__(make=Stack, width=2)

    def forward(self, x):
        return self.copied(self.inner(x))


WRAPPERS = {
    "blocks": partial(Stack, block=Delegating),
    "blocks that know everything": partial(Stack, block=Eager),
    "blocks that forward writes": partial(Stack, block=Hooked),
    "model": Shell,
}


@every_plan
@one_and_two_ranks
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_that_delegate_attributes(ranks, wrapper, plan, num_ranks):
    ranks(num_ranks).run(train, Case(model=WRAPPERS[wrapper], work=squared, optimizer="adamw"), plan)
