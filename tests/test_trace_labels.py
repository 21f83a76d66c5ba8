"""Promise: a profiler's trace of a step reads like the design: each verb with the unit it worked on, as often as it
did."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import onefold
from models import Stack, build
from plans import NAMED_PLANS, one_and_two_ranks

UNITS = ("(root)", "blocks.0", "blocks.1", "blocks.2")
MODULES = (*UNITS, "embed", "head")
VERBS = ("forward", "gather", "reduce", "update", "refresh")


def step(model, optimizer):
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    onefold.measured(model, optimizer)  # what the host still does belongs to the step


def labels(rank, num_ranks, plan, all_threads):
    """How often each label is in the trace of the third step."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model)
    for _ in range(2):
        step(model, optimizer)
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as trace:
        step(model, optimizer)
    return Counter(event.name for event in trace.events() if event.name.split(" ")[0] in VERBS)


def each(verb, names, times=1):
    return Counter({f"{verb} {name}": times for name in names})


WORK = each("forward", MODULES) + each("reduce", UNITS)


@one_and_two_ranks
def test_a_step_that_gathers(ranks, num_ranks):
    want = WORK + each("gather", UNITS, 2) + each("update", UNITS)
    assert ranks(num_ranks).run(labels, "zero_3", False) == [want] * num_ranks


@one_and_two_ranks
def test_a_step_that_updates_on_the_host(ranks, num_ranks):
    mine = WORK + each("refresh", UNITS if num_ranks > 1 else ())  # of the thread that trains
    assert ranks(num_ranks).run(labels, "offload", True) == [mine + each("update", UNITS)] * num_ranks
    assert ranks(num_ranks).run(labels, "offload", False) == [mine] * num_ranks


@pytest.mark.parametrize(("plan", "refreshed"), [("zero_0", ()), ("zero_2", UNITS)])
def test_a_step_on_whole_parameters(ranks, plan, refreshed):
    want = WORK + each("update", UNITS) + each("refresh", refreshed)
    assert ranks(2).run(labels, plan, False) == [want] * 2
