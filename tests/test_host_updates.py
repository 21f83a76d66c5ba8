"""Promise: a step returns while the host still updates, nobody ever sees an old weight, and whatever goes wrong on the
worker's thread is an error on the main one.
"""

import threading
import time

import pytest
import torch

import onefold
from checks import same, tensors, weights
from host_updates import (
    PLANS,
    STRESSED,
    Held,
    every_plan,
    prepared,
    through_a_weight,
    through_backward,
    through_forward,
    through_gathered,
    updated,
)
from inside import BrokenKernel, TorchKernel, finish_updates, insides, opened_when_waited_for
from models import Stack, build
from onefold import Precision
from pairs import pairwise
from ranks import Turn


def through_a_weight_alone(model, plain):
    """Under OFFLOAD parameters are whole: code that reads one outside of any pass waits for it."""
    same({"w": 1.0 * model.blocks[1].up.weight.detach()}, {"w": 1.0 * plain.blocks[1].up.weight.detach()})


WAYS = {way.__name__: way for way in (through_forward, through_gathered, through_a_weight, through_backward)}


def returned(rank, num_ranks, plan, way):
    kernel = Held()
    model, optimizer = prepared(plan, kernel)
    optimizer.step()
    told_before = list(kernel.was_told)
    with opened_when_waited_for(kernel.go.set):
        way(model, updated())
    optimizer.zero_grad()
    return told_before, kernel.was_told


@pairwise(plan=list(PLANS), num_ranks=(1, 2), way=list(WAYS))
def test_a_step_returns_first_and_no_old_weight_is_seen(ranks, way, num_ranks, plan):
    for before, told in ranks(num_ranks).run(returned, plan, WAYS[way]):
        assert before == []
        assert told
        assert all(told)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_whole_parameter_read_by_itself_is_new(ranks, num_ranks):
    for before, told in ranks(num_ranks).run(returned, "offload", through_a_weight_alone):
        assert before == []
        assert all(told)


def broken(rank, num_ranks, plan):
    model, optimizer = prepared(plan, BrokenKernel())
    optimizer.step()
    try:
        model(torch.ones(3, 4))
    except ZeroDivisionError as error:
        return str(error)
    return None


@every_plan
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_goes_wrong_on_the_worker_is_raised_at_the_next_use(ranks, num_ranks, plan):
    assert ranks(num_ranks).run(broken, plan) == ["the worker's own"] * num_ranks


@pytest.mark.parametrize("make", [float, torch.tensor], ids=["number", "tensor"])
def test_what_is_changed_in_place_after_a_step_is_of_the_next_one(make):
    """As a schedule does that keeps a list of betas, or a tensor of each."""
    ends = []
    for is_changed in (False, True):
        model = onefold.shard(build(Stack), onefold.OFFLOAD)
        optimizer = onefold.AdamW(model)
        optimizer.param_groups[0]["betas"] = betas = [make(0.9), make(0.99)]
        model(torch.ones(3, 4)).square().mean().backward()
        held = threading.Event()
        insides(model).houses[onefold.Tier.HOST].worker.submit(held.wait)
        optimizer.step()
        if is_changed:
            betas[0] *= 0.5
        held.set()
        ends.append(tensors(model))
    same(ends[1], ends[0], 0)


class Slow(TorchKernel):
    """Takes a random time."""

    def __init__(self, generator):
        self._generator = generator

    def update(self, run, step):
        dawdle(self._generator)
        super().update(run, step)


def dawdle(generator):
    time.sleep(float(torch.rand((), generator=generator)) * 0.002)


def stressed(rank, num_ranks, case, is_slow):
    """Two hundred steps, with random delays at every seam: fetch, store, update, gather, refresh."""
    generator = torch.Generator().manual_seed(rank)
    plan, options = STRESSED[case]
    model, optimizer = prepared(plan, Slow(generator) if is_slow else TorchKernel(), **options)
    if is_slow:
        session = insides(model)
        late(session.comm, ("all_gather", "reduce_scatter", "refresh"), generator)
        for house in session.houses.values():
            late(house, ("fetch", "deliver", "store"), generator)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for step in range(200):
        model(Turn(rank, step, sharded=True).randn(3, 4)).square().mean().backward()
        optimizer.step()
        schedule.step()
        if step % 5 != 4:
            optimizer.zero_grad()
    return weights(model)


def late(seam, names, generator):
    def wrapped(call):
        def later(*arguments):
            dawdle(generator)
            return call(*arguments)

        return later

    for name in names:
        setattr(seam, name, wrapped(getattr(seam, name)))


@pytest.mark.parametrize("case", STRESSED)
def test_random_delays_change_no_bit(ranks, case):
    want = ranks(2).run(stressed, case, False)
    for got, wanted in zip(ranks(2).run(stressed, case, True), want, strict=True):
        same(got, wanted, 0)


def resumed(rank, num_ranks, plan):
    """State read right after a step is the state after it."""
    model = onefold.shard(build(Stack), PLANS[plan], precision=Precision(params="bf16"))
    optimizer = onefold.AdamW(model, lr=0.1)
    ends = []
    for is_waiting in (True, False):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        if is_waiting:
            finish_updates(model)
        ends.append([tensor.clone() for update in optimizer.state_dict()["updates"] for tensor in update["master"]])
        optimizer.zero_grad()
    return all(not torch.equal(a, b) for a, b in zip(*ends, strict=True))


@every_plan
def test_state_is_read_after_the_update(ranks, plan):
    assert ranks(2).run(resumed, plan) == [True, True]
