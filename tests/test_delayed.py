"""Promise: a delayed update is the ZeRO-Offload paper's: exact for the first `delay_after` updates, then every forward
and backward uses the weights of the update before the last; whoever reads all state sees every update.
"""

import pytest
import torch

import onefold
from checks import same, tensors, weights
from models import Stack, build
from onefold import Precision, Tier
from onefold.errors import OptimizerError
from pairs import pairwise
from ranks import Turn

PLANS = {
    "offload": onefold.OFFLOAD,
    "gradients on the device": onefold.Plan(
        params=onefold.Placement(False), grads=onefold.Placement(True), optim=onefold.Placement(True, Tier.HOST)
    ),
    "weights in parts": onefold.Plan(
        params=onefold.Placement(True), grads=onefold.Placement(True), optim=onefold.Placement(True, Tier.HOST)
    ),
}
every_plan = pytest.mark.parametrize("plan", PLANS)


def loss_of(model, rank, step):
    return model(Turn(rank, step, sharded=True).randn(3, 4)).square().mean()


def mean_gradients(model, num_ranks, step):
    """What data-parallel ranks would average, by one process."""
    model.zero_grad()
    for rank in range(num_ranks):
        (loss_of(model, rank, step) / num_ranks).backward()


def reference(num_ranks, steps, delay_after):
    """One process: gradients are taken at the weights of the update before the last."""
    new, seen = build(Stack), build(Stack)
    optimizer = torch.optim.SGD(new.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        mean_gradients(seen, num_ranks, step)
        if step >= delay_after:
            seen.load_state_dict(new.state_dict())  # seen from now on: what the step before made
        for mine, theirs in zip(new.parameters(), seen.parameters(), strict=True):
            mine.grad = theirs.grad.clone()
        torch.nn.utils.clip_grad_norm_(new.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if step < delay_after:
            seen.load_state_dict(new.state_dict())
    return tensors(new)


def delayed(rank, num_ranks, plan, steps, delay_after):
    model = onefold.shard(build(Stack), PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1, momentum=0.9, max_grad_norm=0.5, delayed=True, delay_after=delay_after)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        loss_of(model, rank, step).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return weights(model)


@pairwise(plan=list(PLANS), num_ranks=(1, 2), delay_after=(0, 3, 6, 40))
def test_gradients_are_those_of_the_weights_before(ranks, delay_after, num_ranks, plan):
    want = reference(num_ranks, 7, delay_after)
    for got in ranks(num_ranks).run(delayed, plan, 7, delay_after):
        same(got, want, 1e-6)


def test_the_reference_itself_depends_on_the_delay():
    ends = [reference(1, 7, delay_after) for delay_after in (0, 3, 40)]
    for a, b in ((0, 1), (1, 2)):
        assert any(not torch.equal(ends[a][name], ends[b][name]) for name in ends[a])


def kept(rank, num_ranks, plan, is_delayed):
    """Gradients that are not cleared are added to while an update reads them."""
    model = onefold.shard(build(Stack), PLANS[plan], precision=Precision(params="bf16"))
    optimizer = onefold.SGD(model, lr=0.0, delayed=is_delayed, delay_after=0)
    for step in range(5):
        loss_of(model, rank, step).backward()
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()
    loss_of(model, rank, 5).backward()
    with onefold.gathered(model):
        return {name: param.grad.clone() for name, param in model.named_parameters()}


@every_plan
def test_gradients_may_be_kept(ranks, plan):
    for got, want in zip(ranks(2).run(kept, plan, True), ranks(2).run(kept, plan, False), strict=True):
        same(got, want, 0)


def resumed(rank, num_ranks, plan):
    """Reading all state ends the delay, in the run that goes on as in the run that starts from it."""
    ends = []
    for is_resumed in (False, True):
        model, optimizer = fresh(plan, 1)
        for step in range(6):
            if step == 3:
                with onefold.gathered(model):
                    saved = {name: value.clone() for name, value in model.state_dict().items()}
                state = optimizer.state_dict()
                if is_resumed:
                    model, optimizer = fresh(plan, 7)
                    model.load_state_dict(saved)
                    optimizer.load_state_dict(state)
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights(model))
    same(ends[1], ends[0], 0)


def fresh(plan, seed):
    model = onefold.shard(build(Stack, seed), PLANS[plan], precision=Precision(params="bf16"))
    return model, onefold.AdamW(model, lr=0.05, delayed=True, delay_after=2)


@every_plan
def test_a_run_can_be_saved_and_resumed(ranks, plan):
    ranks(2).run(resumed, plan)


@pytest.mark.parametrize("plan", [onefold.ZERO_2, onefold.OFFLOAD_3], ids=["zero_2", "offload_3"])
def test_a_plan_under_which_no_update_can_be_late_is_refused(plan):
    with pytest.raises(OptimizerError, match=r"delayed=True needs optimizer state that rests farther away"):
        onefold.AdamW(onefold.shard(Stack(), plan), delayed=True)


@pytest.mark.parametrize("delay_after", [-1, 2.5, "soon"])
def test_a_delay_that_is_no_number_of_updates_is_refused(delay_after):
    with pytest.raises(OptimizerError, match="delay_after"):
        onefold.AdamW(onefold.shard(Stack(), onefold.OFFLOAD), delayed=True, delay_after=delay_after)


def test_weights_written_under_a_late_update_are_an_error():
    model = onefold.shard(build(Stack), onefold.OFFLOAD)
    optimizer = onefold.SGD(model, lr=0.1, delayed=True, delay_after=0)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    model.blocks[0].up.weight.data.mul_(0.5)
    loss_of(model, 0, 1).backward()
    with pytest.raises(OptimizerError, match=r"blocks\.0.* were written while their delayed update"):
        optimizer.step()
    with onefold.gathered(model, write=True):
        model.blocks[0].up.weight.data.mul_(0.5)
        want = tensors(model)
    same(weights(model), want, 0)


def test_two_gradients_rest_on_the_host():
    model = onefold.shard(build(Stack), onefold.OFFLOAD)
    exact = onefold.predicted(model, onefold.AdamW(model)).grads_bytes[Tier.HOST]
    for _ in range(2):  # the second optimizer takes over what the first one took
        optimizer = onefold.AdamW(model, delayed=True)
        assert onefold.predicted(model, optimizer).grads_bytes[Tier.HOST] == 2 * exact
    assert onefold.measured(model, optimizer).tier_bytes == onefold.predicted(model, optimizer).tier_bytes
