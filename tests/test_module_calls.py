"""Promise: however modules call each other, and whatever of theirs a forward returns, gradients are plain PyTorch's,
under a loss scale too.

A module that calls itself looks, to hooks, like a forward that was begun a second time; a model may have no parameters
outside of its blocks; a returned parameter is both an output and a leaf.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from checks import same, tensors
from models import WIDTH, Stack, build, sequential
from plans import NAMED_PLANS
from ranks import Case, squared, thinned, train


class Tree(nn.Module):
    """Calls itself for its branches; the innermost ones are leaves."""

    def __init__(self, width=4, depth=2, is_recomputed=False):
        super().__init__()
        self.leaf = nn.Linear(width, width)
        self.join = nn.Linear(2 * width, width)
        self.depth, self.is_recomputed = depth, is_recomputed

    def forward(self, x, depth=None):
        depth = self.depth if depth is None else depth
        if depth == 0:
            return torch.tanh(self.leaf(x))
        branch = partial(checkpoint, self, use_reentrant=False) if self.is_recomputed else self
        return torch.tanh(self.join(torch.cat([branch(x, depth - 1), branch(2 * x, depth - 1)], -1)))


def forest(is_recomputed=False):
    return Stack(block=partial(Tree, WIDTH, is_recomputed=is_recomputed))


class Telling(Stack):
    """Returns two of its parameters: one that it uses, and one that only its caller does."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return super().forward(x), self.head.weight, self.bias


def told(model, turn):
    logits, weight, bias = model(turn.randn(3, 4))
    ((logits + bias).pow(2).mean() + weight.pow(2).sum()).backward()


CASES = {
    "calls itself": Case(model=Tree, work=squared),
    "calls itself, recomputed": Case(model=partial(Tree, is_recomputed=True), work=squared),
    "blocks call themselves": Case(model=forest, work=squared, optimizer="adamw"),
    "blocks call themselves, recomputed": Case(model=partial(forest, is_recomputed=True), work=squared),
    "returns parameters": Case(model=Telling, work=told, refusal="is not gathered"),
    "no root": Case(model=sequential, work=squared),
}
SCALES = {"unscaled": {}, "scaled": {"precision": onefold.Precision(loss_scale=1024.0)}}


@thinned
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_calls(ranks, name, scale, plan, num_ranks):
    ranks(num_ranks).run(train, replace(CASES[name], options=SCALES[scale]), plan)


def read_by_torchs_names(rank, num_ranks, plan):
    model = onefold.shard(build(sequential), NAMED_PLANS[plan])
    with onefold.gathered(model):
        same({name: value.clone() for name, value in model.state_dict().items()}, tensors(build(sequential)))
        return model(torch.ones(1, 4)).detach() if rank == 0 else None


@pytest.mark.parametrize("plan", ["zero_2", "zero_3"])
def test_a_model_without_a_root_is_read_and_run_by_one_rank(ranks, plan):
    assert ranks(2).run(read_by_torchs_names, plan)[1] is None
