"""Promise: updated weights are sent to the other ranks in one order, whichever of them are ready where: nobody waits
for ever, and no rank gets another unit's.

Ranks are made to be ready for different updates: the worker of one waits while the other's is done.
"""

import contextlib
import gc
import threading

import pytest
import torch
import torch.distributed as dist

import onefold
from checks import same, weights
from inside import BrokenKernel, insides, kernel_on_the_host
from models import Stack, build
from onefold import Tier
from onefold.comm.pending_gathers import Refresh, Refreshes
from onefold.memory.streams import Ticket
from ranks import Turn

PLANS = {"offload": onefold.OFFLOAD, "half": onefold.OFFLOAD.keeping(0.5)}
every_plan = pytest.mark.parametrize("plan", PLANS)


def trained(rank, model, optimizer, steps):
    for step in steps:
        model(Turn(rank, step, sharded=True).randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def made(seed, plan):
    model = onefold.shard(build(Stack, seed), plan)
    return model, onefold.SGD(model, lr=0.1)


def holding(worker, num_first, event):
    """Let `worker` wait for `event` after some more updates. Returns what undoes that."""
    submit, num_jobs = worker.submit, iter(range(1000))

    def held(job):
        if next(num_jobs) == num_first:
            submit(event.wait)
        return submit(job)

    worker.submit = held
    return lambda: delattr(worker, "submit")


def two_models(rank, num_ranks, plan, is_dropped):
    """Weights of the second of two models. The first one is used in part while rank 1 has made few of its updates."""
    first, first_optimizer = made(0, plan)
    second, second_optimizer = (None, None) if is_dropped else made(5, plan)
    trained(rank, first, first_optimizer, [0])
    go = threading.Event()
    house = insides(first).houses.get(Tier.HOST)
    undo = holding(house.worker, 1, go) if house is not None and rank else lambda: None
    trained(rank, first, first_optimizer, [1])
    undo()
    if house is not None and not rank:
        house.worker.submit(lambda: None).wait()
    first.embed(torch.ones(1, 4))
    go.set()
    if is_dropped:
        first = first_optimizer = None
        gc.collect()
        second, second_optimizer = made(5, plan)
    trained(rank, second, second_optimizer, [2, 3])
    ends = weights(second)
    if first is not None:
        trained(rank, first, first_optimizer, [4])
        ends |= {f"first.{name}": value for name, value in weights(first).items()}
    return ends


def compared(rank, num_ranks, plan, is_dropped):
    same(
        two_models(rank, num_ranks, PLANS[plan], is_dropped), two_models(rank, num_ranks, onefold.ZERO_0, is_dropped), 0
    )


@every_plan
@pytest.mark.parametrize("is_dropped", [False, True], ids=["both live", "one goes"])
def test_models_over_the_same_ranks_do_not_get_each_others_weights(ranks, plan, is_dropped):
    ranks(2).run(compared, plan, is_dropped)


def broken(rank, num_ranks, plan, bad_rank):
    """How often the forward after a step fails until it does not."""
    with kernel_on_the_host(lambda *_: BrokenKernel()) if rank == bad_rank else contextlib.nullcontext():
        model, optimizer = made(0, PLANS[plan])
    trained(rank, model, optimizer, [0])
    for num_failed in range(100):
        try:
            model(torch.ones(3, 4))
        except ZeroDivisionError:
            continue
        with onefold.gathered(model):
            return num_failed
    return None


@every_plan
def test_an_update_that_fails_on_one_rank_is_raised_there_and_keeps_no_other_waiting(ranks, plan):
    num_failed = ranks(2).run(broken, plan, 0)
    assert num_failed[0] > 0
    assert num_failed[1] == 0


def alone(rank, num_ranks, plan, is_gathered):
    """What rank 0 computes and reads by itself after a step, while the others wait for it."""
    model, optimizer = made(0, plan)
    trained(rank, model, optimizer, [0, 1])
    found = {}
    with onefold.gathered(model) if is_gathered else contextlib.nullcontext():
        if rank == 0:
            with torch.no_grad():
                found = {"output": model(torch.ones(3, 4))} | {k: v.clone() for k, v in model.state_dict().items()}
        dist.barrier()
    trained(rank, model, optimizer, [2])
    return found


def alone_compared(rank, num_ranks, plan, is_gathered):
    same(alone(rank, num_ranks, plan, is_gathered), alone(rank, num_ranks, onefold.ZERO_0, is_gathered), 0)


@pytest.mark.parametrize("num_ranks", [2, 3])
@every_plan
def test_one_rank_alone_may_evaluate_and_save(ranks, plan, num_ranks):
    ranks(num_ranks).run(alone_compared, PLANS[plan], False)


@pytest.mark.parametrize("plan", [*PLANS.values(), onefold.OFFLOAD_3], ids=str)
def test_one_rank_alone_may_evaluate_and_save_inside_gathered(ranks, plan):
    ranks(2).run(alone_compared, plan, True)


def interrupted_once(log):
    """Waits that a KeyboardInterrupt ends the first time."""

    def finish():
        log.append("waited")
        if len(log) == 1:
            raise KeyboardInterrupt

    return finish


def test_a_ticket_whose_wait_was_interrupted_is_still_to_be_waited_for():
    log, kept = [], [object()]
    ticket = Ticket(interrupted_once(log), keep=kept)
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert ticket.is_pending
    ticket.wait()
    assert log == ["waited", "waited"]
    assert not ticket.is_pending


def test_an_update_whose_wait_was_interrupted_is_sent_in_its_turn():
    log, sent = [], []
    refreshes = Refreshes(lambda: True)
    for owner, update in (("first", Ticket(interrupted_once(log))), ("second", Ticket())):
        refreshes.add(Refresh(owner=owner, update=update, send=lambda owner=owner: sent.append(owner) or Ticket()))
    with pytest.raises(KeyboardInterrupt):
        refreshes.finish("second")
    assert sent == []
    refreshes.finish("second")
    assert sent == ["first", "second"]
