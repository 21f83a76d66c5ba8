"""Promise: compiled models and compiled blocks train as they do eagerly, without compiling again each step.

Libraries failed here because hooks changed shapes under the traced call, so the compiler fell back or started over.
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

import onefold
from onefold.plan import NAMED_PLANS
from ranks import Case, Stack, Turn, build, every_plan, plain, same, squared, train, weights

two_plans = pytest.mark.parametrize("plan", ["zero_0", "zero_3"])  # compiling takes seconds
compiled = partial(torch.compile, backend="aot_eager")


def whole():
    return compiled(Stack())


def in_place():
    model = Stack()
    model.compile(backend="aot_eager")
    return model


def blocks_in_place():
    model = Stack()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def blocks_wrapped():
    model = Stack()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = compiled(block)
    return model


def forward_replaced():
    model = Stack()
    for block in model.blocks:
        block.forward = compiled(block.forward)
    return model


MODELS = (whole, in_place, blocks_in_place, blocks_wrapped, forward_replaced)


@contextmanager
def fresh_compiler(backend="aot_eager"):
    """An empty compile cache, and `backend` in place of the slow default."""
    default = torch.compile
    torch._dynamo.reset()
    torch.compile = partial(default, backend=backend)
    yield
    torch.compile = default
    torch._dynamo.reset()


def train_compiled(rank, num_ranks, case, plan):
    with fresh_compiler():
        return train(rank, num_ranks, case, plan)


@two_plans
@pytest.mark.parametrize("make", MODELS)
def test_compiled_before_shard(ranks, make, plan):
    ranks(2).run(train_compiled, Case(model=make, work=squared, steps=3), plan, timeout_s=120)


@every_plan
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_compiled_by_shard(ranks, plan, num_ranks):
    case = Case(model=Stack, work=squared, steps=3, options={"compile": True})
    ranks(num_ranks).run(train_compiled, case, plan, timeout_s=120)


def graphs_per_step(rank, num_ranks, make, plan, options):
    """Graphs compiled so far, after each of five steps."""
    with fresh_compiler():
        counters.clear()
        model = onefold.shard(build(make), NAMED_PLANS[plan], **options)
        optimizer = onefold.SGD(model, lr=0.1)
        seen = []
        for step in range(5):
            squared(model, Turn(rank, step, sharded=True))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(counters["stats"]["unique_graphs"])
        return seen


@two_plans
@pytest.mark.parametrize("make", [*MODELS, Stack])
def test_nothing_is_compiled_again(ranks, make, plan):
    options = {"compile": True} if make is Stack else {}
    for seen in ranks(2).run(graphs_per_step, make, plan, options, timeout_s=120):
        assert seen[0] > 0
        assert seen[2:] == [seen[1]] * 3


def compiled_after_shard(rank, num_ranks, plan):
    """`torch.compile` around a model that is already sharded: the hooks then run in the traced call."""
    case = Case(model=Stack, work=squared)
    _, end = plain(case, rank, num_ranks)
    with fresh_compiler():
        model = onefold.shard(build(Stack), NAMED_PLANS[plan])
        optimizer = onefold.SGD(model, lr=0.1)
        outside = compiled(model)
        for step in range(case.steps):
            squared(outside, Turn(rank, step, sharded=True))
            optimizer.step()
            optimizer.zero_grad()
        same(weights(model), end)


@two_plans
def test_compiled_after_shard(ranks, plan):
    ranks(2).run(compiled_after_shard, plan, timeout_s=120)
