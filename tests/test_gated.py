"""Promise: a step returns while the host still updates, nobody ever sees an old weight, and whatever goes wrong on the
worker's thread is an error on the main one.
"""

import threading
import time

import pytest
import torch

import onefold
from onefold import Precision
from onefold.engine.session import session_of
from onefold.optim.kernels.host import TorchKernel
from ranks import Stack, Turn, build, same, tensors, weights

PLANS = {
    "offload": onefold.OFFLOAD,
    "offload_3": onefold.OFFLOAD_3,
    "zero_3 and host": onefold.Plan(
        params=onefold.Placement(True), grads=onefold.Placement(True), optim=onefold.Placement(True, onefold.Tier.HOST)
    ),
}
every_plan = pytest.mark.parametrize("plan", PLANS)
STRESSED = {
    **{name: (plan, {}) for name, plan in PLANS.items()},
    "half": (onefold.OFFLOAD.keeping(0.5), {}),
    "delayed": (onefold.OFFLOAD, {"delayed": True, "delay_after": 5}),
}


class Held(TorchKernel):
    """Updates nothing before it is told to."""

    def __init__(self):
        self.go = threading.Event()
        self.was_told = []

    def update(self, run, step):
        self.was_told.append(self.go.wait(240))
        super().update(run, step)


class Broken(TorchKernel):
    def update(self, run, step):
        raise ZeroDivisionError("the worker's own")


def prepared(plan, kernel, **options):
    """A model whose gradients are there, and its optimizer with `kernel` for the host."""
    model = onefold.shard(build(Stack), PLANS[plan] if isinstance(plan, str) else plan)
    module = __import__("onefold.optim.optimizer", fromlist=["host_kernel"])
    usual, module.host_kernel = module.host_kernel, lambda *_: kernel
    try:
        optimizer = onefold.SGD(model, lr=0.1, **options)
    finally:
        module.host_kernel = usual
    model(torch.ones(3, 4)).square().mean().backward()
    return model, optimizer


def updated():
    """The weights that plain PyTorch has after the same step."""
    model = build(Stack)
    model(torch.ones(3, 4)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model


def through_forward(model, plain):
    x = torch.full((2, 4), 0.5)
    same({"output": model(x).detach()}, {"output": plain(x).detach()})


def through_gathered(model, plain):
    same(weights(model), tensors(plain))


def through_a_weight(model, plain):
    with onefold.gathered(model.blocks[1]):
        same({"w": model.blocks[1].up.weight.detach().clone()}, {"w": plain.blocks[1].up.weight.detach()})


def through_a_weight_alone(model, plain):
    """Under OFFLOAD parameters are whole: code that reads one outside of any pass waits for it."""
    same({"w": 1.0 * model.blocks[1].up.weight.detach()}, {"w": 1.0 * plain.blocks[1].up.weight.detach()})


def through_backward(model, plain):
    for each in (model, plain):
        each.zero_grad()
        each(torch.ones(2, 4)).sum().backward()
    with onefold.gathered(model):
        same(
            {name: param.grad for name, param in model.named_parameters()},
            {name: param.grad for name, param in plain.named_parameters()},
        )


WAYS = {way.__name__: way for way in (through_forward, through_gathered, through_a_weight, through_backward)}


def returned(rank, num_ranks, plan, way):
    kernel = Held()
    model, optimizer = prepared(plan, kernel)
    optimizer.step()
    told_before = list(kernel.was_told)
    threading.Timer(0.3, kernel.go.set).start()
    way(model, updated())
    optimizer.zero_grad()
    return told_before, kernel.was_told


@every_plan
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
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
    model, optimizer = prepared(plan, Broken())
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
        session_of(model, "the test").houses[onefold.Tier.HOST].worker.submit(held.wait)
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
        session = session_of(model, "the test")
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
            session_of(model, "the test").runtime.finish_updates()
        ends.append([tensor.clone() for update in optimizer.state_dict()["updates"] for tensor in update["master"]])
        optimizer.zero_grad()
    return all(not torch.equal(a, b) for a, b in zip(*ends, strict=True))


@every_plan
def test_state_is_read_after_the_update(ranks, plan):
    assert ranks(2).run(resumed, plan) == [True, True]
