"""Promise: small neighbouring blocks are gathered and reduced together, under every plan alike, and train the same."""

from functools import partial

import pytest
import torch
from torch import nn

import onefold
from checks import same, weights
from inside import insides, units_of
from models import Lean, Stack, build
from onefold.comm.wrappers import OverComm
from plans import NAMED_PLANS
from ranks import Case, squared, train

Deep = partial(Stack, depth=12, block=Lean)
JOINED = [f"blocks.{first} to blocks.{first + 1}" for first in range(0, 12, 2)]
EACH = [f"blocks.{number}" for number in range(12)]


def unit_names(plan, **options):
    model = onefold.shard(Deep(), NAMED_PLANS[plan], **options)
    return [unit.name for unit in units_of(model)][1:]


@pytest.mark.parametrize("plan", ["zero_0", "zero_2", "zero_3", "offload"])
def test_small_neighbours_are_one_unit(plan):
    assert unit_names(plan) == JOINED


@pytest.mark.parametrize(
    ("plan", "options"),
    [("zero_3", {"units": ["blocks.?", "blocks.1?"]}), ("zero_2", {"units": [Lean]})],
    ids=["named", "of a class"],
)
def test_units_that_are_chosen_stay_as_they_are(plan, options):
    assert unit_names(plan, **options) == EACH


def test_large_blocks_stay_by_themselves():
    blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model = onefold.shard(blocks, onefold.ZERO_2)
    assert len(units_of(model)) == 1 + 6


class Heard(OverComm):
    """Counts reductions."""

    num_reductions = 0

    def reduce_scatter(self, shard, *parts):
        self.num_reductions += 1
        return super().reduce_scatter(shard, *parts)


def reductions(rank, num_ranks, plan):
    model = onefold.shard(build(Deep), NAMED_PLANS[plan])
    session = insides(model)
    heard = Heard(session.comm)
    for states in session.reducer.all_states():
        states.gradients._comm = heard
    model(torch.ones(3, 4)).square().mean().backward()
    return heard.num_reductions


def test_fewer_reductions_are_made(ranks):
    assert ranks(2).run(reductions, "zero_2") == [1 + 6] * 2
    assert ranks(2).run(reductions, "zero_3") == [1 + 6] * 2


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("plan", ["zero_0", "zero_1", "zero_2", "zero_3", "offload"])
def test_they_train_as_plain_pytorch(ranks, plan, num_ranks):
    case = Case(model=Deep, work=squared, optimizer="adamw")
    ranks(num_ranks).run(train, case, plan)


def born(rank, num_ranks, plan):
    torch.manual_seed(5)
    with torch.device("meta"):
        model = Deep()
    return weights(onefold.shard(model, NAMED_PLANS[plan]))


def test_a_meta_model_is_born_alike_under_every_plan(ranks):
    (want,) = ranks(1).run(born, "zero_3")
    for plan in ("zero_0", "zero_2", "offload"):
        for got in ranks(2).run(born, plan):
            same(got, want, 0)
