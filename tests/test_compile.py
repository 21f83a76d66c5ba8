"""Promise: compiled models and compiled blocks train as they do eagerly, without compiling again each step.

Libraries failed here because hooks changed shapes under the traced call, so the compiler fell back or started over.
"""

import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import onefold
from checks import same, weights
from models import WIDTH, Block, Lean, Stack, build
from plans import NAMED_PLANS, every_plan
from ranks import Case, Turn, plain, squared, train

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
    ranks(2).run(train_compiled, Case(model=make, work=squared, steps=3), plan)


@every_plan
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_compiled_by_shard(ranks, plan, num_ranks):
    case = Case(model=Stack, work=squared, steps=3, options={"compile": True})
    ranks(num_ranks).run(train_compiled, case, plan)


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
    for seen in ranks(2).run(graphs_per_step, make, plan, options):
        assert seen[0] > 0
        assert seen[2:] == [seen[1]] * 3


def around(model):
    return compiled(model)


def around_in_place(model):
    model.compile(backend="aot_eager")
    return model


def compiled_after_shard(rank, num_ranks, plan, way):
    """`torch.compile` around a model that is already sharded: its hooks are where the compiled call is in pieces."""
    case = Case(model=Stack, work=squared)
    _, end = plain(case, rank, num_ranks)
    with fresh_compiler(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        model = onefold.shard(build(Stack), NAMED_PLANS[plan])
        optimizer = onefold.SGD(model, lr=0.1)
        outside = way(model)
        for step in range(case.steps):
            squared(outside, Turn(rank, step, sharded=True))
            optimizer.step()
            optimizer.zero_grad()
        same(weights(model), end)


@pytest.mark.parametrize("plan", ["zero_0", "zero_3", "offload", "offload_3"])
@pytest.mark.parametrize("way", [around, around_in_place])
def test_compiled_after_shard(ranks, way, plan):
    ranks(2).run(compiled_after_shard, plan, way)


# --- in one graph


class Checkpointed(Lean):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedStack(Stack):
    """A model that checkpoints its blocks from outside, as libraries do."""

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def accumulating(model, turn):
    with turn.accumulate(model):
        squared(model, turn)
    squared(model, turn)


class Experts(nn.Module):
    """No list of blocks: one unit, whose forward goes through modules that are called by themselves elsewhere."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.experts = nn.ModuleDict({name: Lean() for name in "abc"})

    def forward(self, x):
        x = self.embed(x)
        return sum(expert(x) for expert in self.experts.values())


def by_parts(model, turn):
    """The model, and a part of it alone."""
    squared(model, turn)
    model.experts["b"](model.embed(turn.randn(3, 4))).pow(2).mean().backward()


ONE_GRAPH = {
    "checkpoints outside": (partial(CheckpointedStack, block=Lean), squared, None),
    "checkpoints inside": (partial(Stack, block=Checkpointed), squared, None),
    "accumulation": (partial(Stack, block=Lean), accumulating, None),
    "both": (partial(CheckpointedStack, block=Lean), accumulating, None),
    "one unit": (Experts, squared, None),
    "one unit, and parts of it": (Experts, by_parts, None),
    "one unit of blocks": (partial(CheckpointedStack, block=Lean), accumulating, ()),
}


def trained_in_one_graph(rank, num_ranks, way, plan, options):
    """Breaks and graphs in training; results are held to plain PyTorch's."""
    make, work, units = ONE_GRAPH[way]
    options = {"compile": True, "units": units, **options}
    with fresh_compiler():
        counters.clear()
        train(rank, num_ranks, Case(model=make, work=work, steps=4, options=options), plan)
        return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("plan", "options"),
    [("zero_3", {}), ("zero_3", {"keep_bytes": 2000}), ("zero_2", {})],
    ids=["released", "kept", "whole"],
)
@pytest.mark.parametrize("way", list(ONE_GRAPH))
def test_blocks_compiled_by_shard_train_in_one_graph_each(ranks, way, plan, options):
    for breaks, graphs in ranks(2).run(trained_in_one_graph, way, plan, options):
        assert breaks == 0
        assert 1 <= graphs <= 3  # blocks are alike: one graph for all of them, and what checkpoints recompute


class Talkative(Block):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def in_pieces(rank, num_ranks, make, units):
    """A model that cannot be compiled in one graph."""
    with fresh_compiler():
        counters.clear()
        model = onefold.shard(build(make), onefold.ZERO_3, units=units, compile=True)
        squared(model, Turn(rank, 0, sharded=True))
        return counters["stats"]["unique_graphs"]


def test_a_block_that_breaks_is_refused(ranks):
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        ranks(1).run(in_pieces, partial(Stack, block=Talkative), None)


def test_what_has_units_inside_is_compiled_in_pieces(ranks):
    assert min(ranks(2).run(in_pieces, Stack, ("blocks.*", "blocks.*.up"))) > 1


class Numbered(Lean):
    """A block whose graph depends on its own number, as of those that drop more the deeper they are."""

    count = 0

    def __init__(self):
        super().__init__()
        self.number = Numbered.count = Numbered.count + 1

    def forward(self, x):
        for _ in range(self.number):
            x = 0.9 * x
        return super().forward(x)


class Deep(Stack):
    def __init__(self):
        Numbered.count = 0
        super().__init__(depth=10, block=Numbered)


def whole_deep():
    return compiled(Deep())


def trained_deep(rank, num_ranks, make, plan, options):
    """Graphs after two steps, and after two more; results are held to plain PyTorch's."""
    usual = torch._dynamo.config.recompile_limit
    try:
        seen = graphs_per_step(rank, num_ranks, make, plan, options)
        train_compiled(rank, num_ranks, Case(model=make, work=squared, steps=3, options=options), plan)
    finally:
        torch._dynamo.config.recompile_limit = usual
    return seen


@pytest.mark.parametrize(
    ("make", "plan"), [(Deep, "zero_3"), (whole_deep, "zero_0")], ids=["by shard-zero_3", "before shard-zero_0"]
)
def test_more_blocks_that_differ_in_a_number_than_torch_has_places_for(ranks, make, plan):
    options = {"compile": True} if make is Deep else {}
    for seen in ranks(2).run(trained_deep, make, plan, options):
        assert seen[-1] == seen[1] >= 10
