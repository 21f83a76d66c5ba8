"""Promise: a plan that a machine has not the host memory for is refused on every rank before any is taken, and the
message says what was asked for, what there is, and what would fit."""

import logging
import re
from unittest.mock import patch

import pytest
import torch
from torch import nn

import onefold
from models import build
from onefold import Tier
from onefold.errors import HostMemoryError
from onefold.setup import host_memory_check
from plans import NAMED_PLANS

WIDTH, DEPTH = 64, 4
NUMEL = DEPTH * (WIDTH * WIDTH + WIDTH)
PLENTY = 2**40


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))

    def forward(self, x):
        return self.blocks(x)


class HalfFrozen(Deep):
    def __init__(self):
        super().__init__()
        self.blocks[: DEPTH // 2].requires_grad_(False)


def sharded(rank, num_ranks, plan, available, device=PLENTY, params=None, make=Deep):
    """What `shard` said, where a machine has so much for all ranks, their models included."""
    with (
        patch.object(host_memory_check, "available_bytes", lambda: available - num_ranks * PRESENT),
        patch.object(host_memory_check, "device_bytes", lambda _: (device, device)),
    ):
        try:
            onefold.shard(build(make), NAMED_PLANS[plan], precision=onefold.Precision(params=params))
        except HostMemoryError as error:
            return str(error)
    return None


PRESENT = 4 * NUMEL
"""Bytes of a model on the CPU, which is where its parameters are before they are moved."""


def asked(told):
    """(with Adam's state, without it, available) bytes."""
    numbers = re.search(r"keeps ([\d,]+) bytes.* state, ([\d,]+) without it, and ([\d,]+) ", told).groups()
    return tuple(int(number.replace(",", "")) for number in numbers)


BYTES = {  # of a parameter, over all ranks: gradients, twin (OFFLOAD) or parameters, masters; then moments
    ("offload", "fp32"): (4 + 4, 8),
    ("offload", "bf16"): (2 + 2 + 2, 8),
    ("offload_3", "fp32"): (4 + 4, 8),
    ("offload_3", "bf16"): (2 + 2 + 2, 8),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("plan", "params"), list(BYTES))
def test_what_is_asked_for_is_what_all_ranks_of_the_machine_take(ranks, plan, params, num_ranks):
    at_once, moments = (NUMEL * each for each in BYTES[plan, params])
    told = ranks(num_ranks).run(sharded, plan, at_once - 1, PLENTY, params)
    for text in told:
        assert text.startswith(plan.upper())
        with_adam, without, available = asked(text)
        assert available == at_once - 1
        assert at_once <= without <= at_once + 64 * num_ranks
        assert at_once + moments <= with_adam <= at_once + moments + 64 * num_ranks
    assert ranks(num_ranks).run(sharded, plan, at_once + 64 * num_ranks, PLENTY, params) == [None] * num_ranks


@pytest.mark.parametrize("make", [Deep, HalfFrozen])
def test_a_rank_takes_what_the_check_counts(make):
    model = onefold.shard(build(make), onefold.OFFLOAD)
    held = onefold.predicted(model, onefold.AdamW(model)).tier_bytes[Tier.HOST]
    told = sharded(0, 1, "offload", 0, make=make)
    assert 0 <= held - asked(told)[0] <= 64 * 4 * DEPTH  # padding


def test_what_fits_with_as_many_ranks_is_named(ranks):
    states = 16 * NUMEL
    for told in ranks(2).run(sharded, "offload", 0, states // 2 + NUMEL):
        assert told.endswith("What would fit with as many ranks, activations not counted: ZERO_3")


def test_where_nothing_fits_the_ranks_it_takes_are_named():
    assert "ZERO_3 would fit over 4 such ranks" in sharded(0, 1, "offload", 0, 16 * NUMEL // 4 + NUMEL)
    assert "No named plan fits over 1024 such ranks" in sharded(0, 1, "offload", 0, 8)


def test_where_only_adams_state_does_not_fit_a_warning_says_so(caplog):
    with caplog.at_level(logging.WARNING, "onefold"):
        assert sharded(0, 1, "offload", 8 * NUMEL + 64) is None
    (record,) = [each for each in caplog.records if "available there" in each.getMessage()]
    assert "OFFLOAD keeps" in record.getMessage()


def test_plans_that_keep_nothing_on_the_host_are_not_checked():
    assert sharded(0, 1, "zero_3", 0) is None


def test_a_model_on_meta_is_refused_before_it_is_made():
    with torch.device("meta"):
        model = nn.Linear(2**22, 2**22)
    with pytest.raises(HostMemoryError, match="OFFLOAD_3 keeps"):
        onefold.shard(model, onefold.OFFLOAD_3)
    assert model.weight.is_meta
