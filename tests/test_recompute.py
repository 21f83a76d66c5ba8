"""Promise: recomputing activations changes nothing about the gradients.

Libraries failed here because their hooks fire again in a recompute, and freed what the checkpoint still held.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models import WIDTH, Block, Stack
from pairs import pairwise
from plans import PLANS, every_plan
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


@pairwise(trained=TRAINED, reentrant={"non-reentrant": False, "reentrant": True}, plan=PLANS, num_ranks=(1, 2))
def test_checkpointing_with_frozen_parameters(ranks, trained, reentrant, plan, num_ranks):
    case = Case(model=partial(Recomputed, reentrant, trained), work=squared)
    ranks(num_ranks).run(train, case, plan)


@every_plan
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_over_several_blocks(ranks, reentrant, plan):
    ranks(2).run(train, Case(model=partial(Recomputed, reentrant, ("lora", "head"), groups=2), work=squared), plan)


@every_plan
def test_checkpoint_inside_a_block(ranks, plan):
    ranks(2).run(train, Case(model=partial(Stack, block=Inside), work=squared), plan)


# --- checkpoints that keep some results


class Selective(nn.Module):
    """A block whose matrix products are kept and whose rest is computed again."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        def policy(context, operation, *args, **kwargs):
            keep = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)


class CheckpointedOutside(Stack):
    """Blocks checkpointed from outside, selectively."""

    def forward(self, x):
        x = self.embed(x)
        operations = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        for block in self.blocks:
            contexts = partial(create_selective_checkpoint_contexts, operations)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return self.head(x)


SELECTIVE = {
    "inside a block": Case(model=partial(Stack, block=Selective), work=squared),
    "around blocks": Case(model=CheckpointedOutside, work=squared),
}


@pairwise(name=list(SELECTIVE), plan=PLANS, num_ranks=(1, 2))
def test_selective_checkpoints(ranks, plan, num_ranks, name):
    ranks(num_ranks).run(train, SELECTIVE[name], plan)
