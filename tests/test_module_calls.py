"""Promise: however modules call each other, and whatever of theirs a forward returns, gradients are plain PyTorch's,
under a loss scale too.

A module that calls itself looks, to hooks, like a forward that was begun a second time; a model may have no parameters
outside of its blocks; a returned parameter is both an output and a leaf; `hasattr` on a wrapper may answer for the
module inside it.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from checks import grads, same, tensors
from models import WIDTH, Block, Stack, build, sequential, sharded
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan
from ranks import Case, squared, train


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
    "returns parameters": Case(model=Telling, work=told, refusal="is not gathered", refused_under=["zero_3"]),
    "no root": Case(model=sequential, work=squared),
}
SCALES = {"unscaled": {}, "scaled": {"precision": onefold.Precision(loss_scale=1024.0)}}


@pairwise(name=list(CASES), scale=list(SCALES), plan=PLANS, num_ranks=(1, 2))
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


@pairwise(wrapper=list(WRAPPERS), plan=PLANS, num_ranks=(1, 2))
def test_wrappers_that_delegate_attributes(ranks, wrapper, plan, num_ranks):
    ranks(num_ranks).run(train, Case(model=WRAPPERS[wrapper], work=squared, optimizer="adamw"), plan)


# --- what is passed through and returned


class Passing(Stack):
    """Returns what it was given, too."""

    def forward(self, x):
        return super().forward(x), x


def hooks_on_an_input(rank, num_ranks, plan):
    model, x = sharded(plan, Passing), torch.ones(3, 4, requires_grad=True)
    for _ in range(3):
        score, passed = model(x)
        (score.sum() + passed.sum()).backward()
    return len(x._backward_hooks or ())


@every_plan
def test_a_tensor_passed_through_gathers_no_hooks(ranks, plan):
    assert ranks(2).run(hooks_on_an_input, plan) == [0, 0]


class Twice(Stack):
    """Returns one tensor in two places, and keeps it in a third."""

    def forward(self, x):
        self.kept = loss = super().forward(x).square().mean()
        return {"loss": loss, "parts": (loss,)}


def changed_in_one_place(rank, num_ranks, plan, precision):
    model, plain = sharded(plan, Twice, precision=precision), build(Twice)
    for each in (model, plain):
        output = each(torch.linspace(-1, 1, 12).view(3, 4))
        output["loss"] *= 3
        (output["parts"][0].square() + each.kept).backward()
    same(grads(model), {name: param.grad for name, param in plain.named_parameters()})


@pytest.mark.parametrize("precision", [None, onefold.Precision(loss_scale=256.0)], ids=["plain", "scaled"])
@pytest.mark.parametrize("plan", ["zero_2", "zero_3"])
def test_a_tensor_that_is_returned_twice_stays_one(ranks, plan, precision):
    ranks(2).run(changed_in_one_place, plan, precision)
