"""Promise: weights that are still on their way from other ranks are waited for, however they are read or written.

A step returns before they are there. What asks a parameter for its values waits; for what does not ask - a view that
was taken before, an array, a method of a parameter's own class - the step itself does.
"""

import copy
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import onefold
from checks import same, tensors, weights
from inside import finish_updates, insides, noticed_views, opened_when_waited_for
from models import Stack, build
from plans import NAMED_PLANS
from ranks import Turn, average, squared

whole_plans = pytest.mark.parametrize("plan", ["zero_1", "zero_2", "offload"])
RATE = 0.5


class Doubled(nn.Parameter):
    """A parameter with a method of its own."""

    def twice(self):
        return self * 2


class Own(Stack):
    def __init__(self):
        super().__init__()
        self.scale = Doubled(torch.ones(8, 8))

    def forward(self, x):
        return super().forward(x) * self.scale.twice().mean()


def held_back(comm, event):
    """Let this rank send its part of weights only after `event`."""

    def wrapped(call):
        def later(whole, shard):
            if whole.numel() > 2 * 16:  # not a number for a sum
                event.wait(240)
            return call(whole, shard)

        return later

    comm.all_gather, comm.refresh = wrapped(comm.all_gather), wrapped(comm.refresh)


def weight(model):
    return model.blocks[1].up.weight


def named(parameters):
    return {str(number): parameter.detach().clone() for number, parameter in enumerate(parameters)}


def in_threads(model, _):
    read, threads = [], []
    for _ in range(4):
        threads.append(threading.Thread(target=lambda: read.append(named(model.parameters()))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(read) == len(threads)  # else one has raised
    return {f"{number} {name}": each[name] for number, each in enumerate(read) for name in each}


def through_views(model, views):
    for view in views:
        view.clamp_(-0.02, 0.02)
    return named(model.parameters())


def views_of(model):
    return [parameter.data for parameter in model.parameters()]


def nothing(model):
    """What most keep of a model before its step."""


# What is kept before the step, and how the weights are read after it.
WAYS = {
    "operation": (nothing, lambda model, _: {"": weight(model) * 1}),
    "new parameter": (nothing, lambda model, _: {"": nn.Parameter(weight(model), requires_grad=False)}),
    "new module": (nothing, lambda model, _: tensors(nn.Embedding.from_pretrained(weight(model)))),
    "copied parameter": (nothing, lambda model, _: {"": copy.deepcopy(weight(model))}),
    "method": (nothing, lambda model, _: {"": model.scale.twice()}),
    "threads": (nothing, in_threads),
    "view": (views_of, lambda model, views: named(views)),
    "written view": (views_of, through_views),
    "state dict": (lambda model: model.state_dict(), lambda model, state: {n: t.clone() for n, t in state.items()}),
    "array": (lambda m: weight(m).detach().numpy(), lambda model, array: {"": torch.from_numpy(array.copy())}),
}


def stepped(rank, num_ranks, plan, way):
    """One rank reads weights right after its step, of which the others have not sent theirs yet."""
    keep, read = WAYS[way]
    replicas = [build(Own) for _ in range(num_ranks)]
    for number, replica in enumerate(replicas):
        squared(replica, Turn(number, 0, sharded=False))
    average(replicas)
    kept = keep(replicas[rank])
    torch.optim.SGD(replicas[rank].parameters(), lr=RATE).step()
    wanted = read(replicas[rank], kept)

    model = onefold.shard(build(Own), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=RATE)
    squared(model, Turn(rank, 0, sharded=True))
    kept, store = keep(model), torch.distributed.distributed_c10d._get_default_store()
    if rank > 0:
        held_back(insides(model).comm, SimpleNamespace(wait=lambda seconds: store.wait(["go"])))
    with opened_when_waited_for(lambda: store.set("go", "")) if rank == 0 else nullcontext():
        optimizer.step()
        got = read(model, kept)
    same(got, wanted)
    same(weights(model), tensors(replicas[rank]))


@whole_plans
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_coming_are_waited_for(ranks, way, plan):
    ranks(2).run(stepped, plan, way)


def shown(rank, num_ranks, plan):
    model = onefold.shard(build(Own), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=RATE)
    squared(model, Turn(rank, 0, sharded=True))
    optimizer.step()
    early = repr(model.head.bias), f"{model.blocks[0].down.bias}", str(list(model.embed.parameters()))
    finish_updates(model)
    return early, (repr(model.head.bias), f"{model.blocks[0].down.bias}", str(list(model.embed.parameters())))


@whole_plans
def test_whole_weights_are_printed_with_their_values(ranks, plan):
    for early, late in ranks(2).run(shown, plan):
        assert early == late
        assert "released" not in "".join(early)


def left_early(rank, num_ranks, plan):
    """A rank comes back from its step while the others wait for it to, before they send."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model, lr=RATE)
    for step in range(3):
        loss = model(Turn(rank, step, sharded=True).randn(3, 4)).square().mean()
        loss.backward()  # and kept, as loops do to log it
        comm = insides(model).comm
        if step == 2 and rank > 0:
            held_back(comm, SimpleNamespace(wait=one_meeting(comm)))
        optimizer.step()
        if step == 2 and rank == 0:
            comm.exchange([0])
        optimizer.zero_grad()
    return float(sum(tensor.sum() for tensor in weights(model).values()))


def one_meeting(comm):
    """What waits until all ranks meet, the first time."""
    left = [comm.exchange]

    def wait(_):
        if left:
            left.pop()([0])

    return wait


@pytest.mark.parametrize("plan", ["zero_1", "zero_2"])
def test_a_step_does_not_wait_where_nobody_could_see_it(ranks, plan):
    first, second = ranks(2).run(left_early, plan)
    assert first == second


def watched(rank, num_ranks, plan):
    """A second thread reads, prints and copies weights all the time."""
    ends = []
    for is_watched in (False, True):
        model = onefold.shard(build(Stack), NAMED_PLANS[plan])
        optimizer = onefold.AdamW(model, lr=0.01)
        stop, failures = threading.Event(), []
        thread = threading.Thread(target=watch, args=(model, stop, failures))
        if is_watched:
            thread.start()
        for step in range(20):
            squared(model, Turn(rank, step, sharded=True))
            optimizer.step()
            optimizer.zero_grad()
        stop.set()
        if is_watched:
            thread.join()
        assert not failures
        ends.append(weights(model))
    same(*ends, 0)


def watch(model, stop, failures):
    while not stop.is_set():
        try:
            for parameter in model.parameters():
                parameter.norm().item()
            str(model.head.bias)
            copy.deepcopy(model.head.weight)
        except Exception as error:
            failures.append(error)


@whole_plans
def test_another_thread_may_read_weights_beside_training(ranks, plan):
    ranks(2).run(watched, plan)


def told_apart(rank, num_ranks, plan, gather):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], gather=gather)
    squared(model, Turn(rank, 0, sharded=True))
    return noticed_views(model)


@pytest.mark.parametrize("gather", ["collective", "copy"])
@pytest.mark.parametrize("plan", ["zero_1", "zero_2"])
def test_views_of_whole_weights_are_noticed(ranks, plan, gather):
    for alone, held in ranks(2).run(told_apart, plan, gather):
        assert not any(alone)
        assert all(held)
