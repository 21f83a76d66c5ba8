"""Promise: what a rank really holds and sends is what the budget says, to the byte and to the element.

Bytes for every plan, number of ranks, precision and kind of model; the wire, counted in its seam, for models whose
every unit needs its weights in backward.
"""

from functools import partial

import pytest
import torch
from torch import nn

import onefold
from inside import counted
from models import WIDTH, Block, Stack, build
from onefold import Precision, Tier
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan
from ranks import Turn

# --- models


def frozen():
    """Half of one block, all of another and the embedding do not train."""
    model = Stack()
    for part in (model.embed, model.blocks[0].up, model.blocks[1]):
        part.requires_grad_(False)
    return model


class Tied(nn.Module):
    """Tokens to scores of tokens with one matrix, and two blocks that share a layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 13)
        self.head.weight = self.embed.weight
        self.blocks[2].up = self.blocks[0].up

    def forward(self, x):
        x = self.embed(x.abs().long().clamp(max=12)).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wide(nn.Module):
    """A layer in fp64 between layers in the model's own dtype."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.wide = nn.Linear(7, 5, dtype=torch.float64)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        x = self.wide(self.first(x).to(self.wide.weight.dtype))
        return self.last(x.to(self.last.weight.dtype))


MODELS = {"plain": Stack, "frozen": frozen, "tied": Tied, "mixed dtypes": Wide}
PRECISIONS = {
    "as is": Precision(),
    "bf16": Precision(params="bf16"),
    "bf16, all else fp32": Precision(params="bf16", master="fp32", reduce="fp32"),
    "fp16": Precision(params="fp16", loss_scale=16.0),
}


def backward(model, rank, step):
    model(Turn(rank, step, sharded=True).randn(3, 4)).double().square().mean().backward()


def by_kind(budget):
    return {"params": budget.params_bytes, "grads": budget.grads_bytes, "optim": budget.optim_bytes}


# --- bytes


def held_and_predicted(rank, num_ranks, plan, precision):
    """By model: bytes after backward, after a step and after the gradients are dropped; and what was predicted."""
    found = {}
    for name, make in MODELS.items():
        model = onefold.shard(build(make), NAMED_PLANS[plan], precision=PRECISIONS[precision])
        optimizer = onefold.AdamW(model, lr=1e-3)
        backward(model, rank, 0)
        held = [by_kind(onefold.measured(model, optimizer))]
        optimizer.step()
        held.append(by_kind(onefold.measured(model, optimizer)))
        optimizer.zero_grad()
        held.append(by_kind(onefold.measured(model, optimizer)))
        found[name] = held, by_kind(onefold.predicted(model, optimizer))
    return found


@pairwise(plan=PLANS, num_ranks=(1, 2, 3, 4), precision=list(PRECISIONS))
def test_a_rank_holds_what_was_predicted(ranks, plan, num_ranks, precision):
    results = ranks(num_ranks).run(held_and_predicted, plan, precision)
    for found in results:
        for name, (held, predicted) in found.items():
            assert (name, held[:-1]) == (name, [predicted] * 2)
            assert (name, held[-1]) == (name, {**predicted, "grads": dict.fromkeys(Tier, 0)})
            assert (name, predicted) == (name, results[0][name][1])


PAPER = {
    # params, grads and optimizer state of a padded parameter in bytes; W stands for a part of one in as many ranks
    "zero_0": lambda w: (2, 2, 10),
    "zero_1": lambda w: (2, 2, 10 / w),
    "zero_2": lambda w: (2, 2 / w, 10 / w),
    "zero_3": lambda w: (2 / w, 2 / w, 10 / w),
}


def bytes_of_one_unit(rank, num_ranks, plan):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], units=(), precision=PRECISIONS["bf16"])
    optimizer = onefold.AdamW(model)
    backward(model, rank, 0)
    optimizer.step()
    kinds = by_kind(onefold.measured(model, optimizer)).values()
    return tuple(kind[Tier.DEVICE] for kind in kinds), padded(model, num_ranks)


def padded(model, num_ranks):
    """Elements of a model that is one unit: each parameter, and each shard, padded to 16."""
    used = sum(-(-param.numel() // 16) * 16 for param in model.parameters())
    return -(-used // (16 * num_ranks)) * 16 * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@every_plan
def test_a_rank_holds_what_the_paper_says(ranks, plan, num_ranks):
    """ZeRO, section 5, with 10 bytes of optimizer state for bf16 and Adam: the split master saves 2 of its 12."""
    for held, numel in ranks(num_ranks).run(bytes_of_one_unit, plan):
        assert held == tuple(each * numel for each in PAPER[plan](num_ranks))


# --- the wire


def per_step(model, optimizer, comm, rank, first, last):
    """(gathered, reduced) elements of each of some steps."""
    found = []
    for step in range(first, last):
        before = comm.gather_numel, comm.reduce_numel
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        found.append((comm.gather_numel - before[0], comm.reduce_numel - before[1]))
    return found


def steady(rank, num_ranks, plan, make, options):
    model, comm = counted(build(make), NAMED_PLANS[plan], **options)
    optimizer = onefold.AdamW(model)
    counts = per_step(model, optimizer, comm, rank, 0, 5)[2:]
    budget = onefold.predicted(model, optimizer)
    units = model._onefold_session.runtime.units
    psi = sum(flat.layout.numel for unit in units for flat in unit.flats)
    return counts, (budget.gather_numel, budget.reduce_numel), psi


MULTIPLES = {"zero_0": (0, 2), "zero_1": (1, 1), "zero_2": (1, 1), "zero_3": (2, 1)}
"""Gathered and reduced elements of a step, in times Psi (ZeRO, section 7)."""
SPREAD = {
    "blocks": (Stack, {}),
    "one unit": (Stack, {"units": ()}),
    "many units": (Stack, {"units": ("blocks.*.*",)}),
    "nothing ahead": (Stack, {"prefetch_bytes": 0}),
    "all ahead": (Stack, {"prefetch_bytes": 2**30}),
    "tied": (Tied, {}),
    "bf16": (Stack, {"precision": Precision(params="bf16")}),
}


@pairwise(plan=PLANS, spread=list(SPREAD), num_ranks=(2, 3))
def test_a_step_moves_what_was_predicted(ranks, plan, spread, num_ranks):
    for counts, predicted, psi in ranks(num_ranks).run(steady, plan, *SPREAD[spread]):
        assert predicted == tuple(times * psi for times in MULTIPLES[plan])
        # Where nothing is split an all-reduce is made of a scatter and a gather. The norm goes with the step's message.
        assert counts == [(psi, psi) if plan == "zero_0" else predicted] * 3


def only_trained_moves(rank, num_ranks, plan):
    counts, predicted, psi = steady(rank, num_ranks, plan, frozen, {})
    return counts, predicted, psi


@pytest.mark.parametrize("plan", ["zero_0", "zero_1", "zero_2"])
def test_frozen_parameters_are_neither_reduced_nor_refreshed(ranks, plan):
    for counts, predicted, psi in ranks(2).run(only_trained_moves, plan):
        assert sum(predicted) < 2 * psi
        assert [sum(each) for each in counts] == [sum(predicted)] * 3


def with_an_embedding(rank, num_ranks):
    model, comm = counted(build(Tokens), onefold.ZERO_3, units=("embed", "blocks.*"))
    optimizer = onefold.AdamW(model)
    counts = per_step(model, optimizer, comm, rank, 0, 4)[2:]
    return counts, onefold.predicted(model, optimizer).gather_numel, padded(model.embed, num_ranks)


class Tokens(Tied):
    """An embedding that is a unit of its own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)
        self.blocks[2].up = nn.Linear(WIDTH, 2 * WIDTH)


def test_an_embedding_is_not_gathered_for_backward(ranks):
    """Its backward reads no weights, so a step gathers less than the budget's upper bound by one embedding."""
    for counts, predicted, embedding in ranks(2).run(with_an_embedding):
        assert [gathered for gathered, _ in counts] == [predicted - embedding] * 2


def accumulated(rank, num_ranks, plan, count, is_accumulated):
    """Reduced elements of a step of several micro-batches, in times those of a step of one."""
    model, comm = counted(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model)
    single = per_step(model, optimizer, comm, rank, 0, 3)[2][1]
    before = comm.reduce_numel
    for micro in range(count):
        if is_accumulated and micro < count - 1:
            with onefold.accumulate(model):
                backward(model, rank, micro)
        else:
            backward(model, rank, micro)
    optimizer.step()
    return (comm.reduce_numel - before) / single


@pytest.mark.parametrize(("is_accumulated", "want"), [(True, 1), (False, 3)])
@every_plan
def test_accumulating_reduces_once_a_step(ranks, plan, is_accumulated, want):
    assert ranks(2).run(accumulated, plan, 3, is_accumulated) == [want, want]


def whole_gradients(rank, num_ranks, plan):
    """Bytes of gradients inside and after accumulation, in times those of whole gradients."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model)
    measure = partial(onefold.measured, model, optimizer)
    whole = sum(flat.buffer.nbytes for unit in model._onefold_session.runtime.units for flat in unit.flats)
    with onefold.accumulate(model):
        backward(model, rank, 0)
        inside = measure().grads_bytes[Tier.DEVICE]
    backward(model, rank, 1)
    optimizer.step()
    return inside / whole, measure().grads_bytes[Tier.DEVICE] / whole


@every_plan
def test_accumulating_keeps_gradients_whole_until_they_are_reduced(ranks, plan):
    after = 0.5 if NAMED_PLANS[plan].grads.partitioned else 1
    assert ranks(2).run(whole_gradients, plan) == [(1, after)] * 2
