"""Promise: inside `accumulate` backward only adds up; the first backward after it, or the step, reduces the sum.

With or without it, and however micro-batches are cut, the gradient is the mean over ranks of what each rank added up.
"""

import pytest
import torch
from torch import nn

import onefold
from checks import grads, same, weights
from models import Stack, build
from onefold import Precision
from onefold.engine.released import ReducedGradient
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan
from ranks import Turn

MICRO = 3


def backward(model, rank, micro, step=0):
    (model(Turn(rank, 10 * step + micro, sharded=True).randn(3, 4)).square().mean() / MICRO).backward()


# --- ways to make one step of three micro-batches


def accumulated(model, rank, step=0):
    with onefold.accumulate(model):
        for micro in range(MICRO - 1):
            backward(model, rank, micro, step)
    backward(model, rank, MICRO - 1, step)


def one_context_each(model, rank, step=0):
    for micro in range(MICRO - 1):
        with onefold.accumulate(model):
            backward(model, rank, micro, step)
    backward(model, rank, MICRO - 1, step)


def nested(model, rank, step=0):
    with onefold.accumulate(model):
        with onefold.accumulate(model):
            backward(model, rank, 0, step)
        backward(model, rank, 1, step)
    backward(model, rank, 2, step)


def all_inside(model, rank, step=0):
    with onefold.accumulate(model):
        for micro in range(MICRO):
            backward(model, rank, micro, step)


def reduced_each_time(model, rank, step=0):
    for micro in range(MICRO):
        backward(model, rank, micro, step)


def only_the_last_inside(model, rank, step=0):
    for micro in range(MICRO - 1):
        backward(model, rank, micro, step)
    with onefold.accumulate(model):
        backward(model, rank, MICRO - 1, step)


def around_forwards_only(model, rank, step=0):
    """What counts is where backward runs."""
    losses = []
    with onefold.accumulate(model):
        for micro in range(MICRO):
            losses.append(model(Turn(rank, 10 * step + micro, sharded=True).randn(3, 4)).square().mean() / MICRO)
    sum(losses).backward()


SUMMED = [accumulated, one_context_each, nested, all_inside]
"""These add up before they reduce, so they all give the same bits."""
OTHERS = [reduced_each_time, only_the_last_inside, around_forwards_only]


def by_hand(num_ranks):
    """The gradient of plain PyTorch: by rank added up in `.grad`, then summed in rank order and divided."""
    model, by_rank = build(Stack), []
    for rank in range(num_ranks):
        model.zero_grad()
        for micro in range(MICRO):
            backward(model, rank, micro)
        by_rank.append([param.grad for param in model.parameters()])
    names = [name for name, _ in model.named_parameters()]
    return {name: torch.stack(found).cumsum(0)[-1] / num_ranks for name, *found in zip(names, *by_rank, strict=True)}


def gradients(rank, num_ranks, plan, way):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    way(model, rank)
    found, want = grads(model), by_hand(num_ranks)
    equal = [name for name in want if torch.equal(found[name], want[name])]
    close = [name for name in want if torch.allclose(found[name], want[name], rtol=1e-5, atol=1e-7)]
    return len(want) - len(equal), len(want) - len(close)


@pairwise(way=SUMMED, plan=PLANS, num_ranks=(1, 2))
def test_the_sum_is_reduced_once_to_the_bit(ranks, way, plan, num_ranks):
    assert ranks(num_ranks).run(gradients, plan, way) == [(0, 0)] * num_ranks


@pairwise(way=OTHERS, plan=PLANS, num_ranks=(1, 2))
def test_other_ways_give_the_same_mean(ranks, way, plan, num_ranks):
    assert [wrong for _, wrong in ranks(num_ranks).run(gradients, plan, way)] == [0] * num_ranks


def trained(rank, num_ranks, plan, way):
    """Weights after three steps, and whether gradients were left over."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model, lr=1e-2, max_grad_norm=0.1)
    for step in range(3):
        way(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def all_ways(rank, num_ranks, plan):
    """Ways that add up whose weights differ from those of the first way under ZERO_0."""
    want = trained(rank, num_ranks, "zero_0", SUMMED[0])
    ends = {way.__name__: trained(rank, num_ranks, plan, way) for way in SUMMED}
    return [way for way, end in ends.items() if any(not torch.equal(end[name], want[name]) for name in want)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@every_plan
def test_ways_that_add_up_train_the_same_bits(ranks, plan, num_ranks):
    assert ranks(num_ranks).run(all_ways, plan) == [[]] * num_ranks


def seen_inside(rank, num_ranks, plan):
    """What `.grad` is inside, after the first backward outside, and after `zero_grad`."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model)

    def states():
        grads = [param.grad for param in model.parameters()]
        return {None if grad is None else isinstance(grad, ReducedGradient) for grad in grads}

    seen = [states()]
    with onefold.accumulate(model):
        backward(model, rank, 0)
        seen.append(states())
    backward(model, rank, 1)
    seen.append(states())
    optimizer.zero_grad()
    return [*seen, states()]


@every_plan
def test_a_gradient_is_never_read_as_none_between_backward_and_zero_grad(ranks, plan):
    assert ranks(2).run(seen_inside, plan) == [[{None}, {True}, {True}, {None}]] * 2


def dropped(rank, num_ranks, plan):
    """Gradients dropped inside do not count; those that came after do."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model)
    with onefold.accumulate(model):
        model(torch.full((3, 4), 1e3)).square().mean().backward()
        optimizer.zero_grad()
        backward(model, rank, 0)
        backward(model, rank, 1)
    backward(model, rank, 2)
    found, want = grads(model), by_hand(num_ranks)
    return [name for name in want if not torch.equal(found[name], want[name])]


@every_plan
def test_what_zero_grad_drops_inside_does_not_count(ranks, plan):
    assert ranks(2).run(dropped, plan) == [[], []]


def frozen_between(rank, num_ranks, plan):
    """A parameter that gets its gradient in the first micro-batch only still takes part in the sum."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    with onefold.accumulate(model):
        backward(model, rank, 0)
    model.blocks[1].requires_grad_(False)
    backward(model, rank, 1)
    model.blocks[1].requires_grad_(True)
    found = grads(model)
    return [name for name, grad in found.items() if grad is None or not grad.any()]


@every_plan
def test_a_gradient_of_the_first_micro_batch_stays(ranks, plan):
    assert ranks(2).run(frozen_between, plan) == [[], []]


def in_16_bits(rank, num_ranks, plan, reduce):
    """Adding 1 to 256 three times: lost in bf16, kept in fp32."""
    model = torch.nn.Linear(1, 1, bias=False)
    model = onefold.shard(model, NAMED_PLANS[plan], precision=Precision(params="bf16", reduce=reduce))
    optimizer = onefold.SGD(model, lr=0.0)
    with onefold.accumulate(model):
        for size in (256.0, 1.0, 1.0):
            model(torch.full((1, 1), size)).sum().backward()
    model(torch.full((1, 1), 1.0)).sum().backward()
    optimizer.step()
    return optimizer.grad_norm


@pytest.mark.parametrize(("reduce", "want"), [(None, 256.0), ("fp32", 259.0)])
@every_plan
def test_the_sum_is_kept_in_the_dtype_of_reduce(ranks, plan, reduce, want):
    assert ranks(2).run(in_16_bits, plan, reduce) == [want, want]


def test_accumulate_needs_a_sharded_model():
    with (
        pytest.raises(onefold.errors.OnefoldError, match="accumulate needs a model"),
        onefold.accumulate(Stack()),
    ):
        pass


# --- micro-batches and the batch


def micro_steps(rank, num_ranks, plan, counts):
    """The norm after each step of micro-gradients 1, 2, .. `count`, the same on all ranks, each divided by `count`."""
    model = onefold.shard(nn.Sequential(nn.Linear(4, 1, bias=False)), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.0)
    norms = []
    for count in counts:
        for k in range(count):
            loss = model(torch.full((1, 4), k + 1.0)).sum() / count
            if k < count - 1:
                with onefold.accumulate(model):
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return norms


@pairwise(counts=((4, 4, 4), (1, 4, 2), (3, 1, 1)), plan=PLANS, num_ranks=(1, 2, 3))
def test_every_step_counts_its_micro_batches_alike(ranks, counts, plan, num_ranks):
    means = [(count + 1) / 2 * 4**0.5 for count in counts]  # mean of 1..count in each of 4 weights
    for norms in ranks(num_ranks).run(micro_steps, plan, counts):
        assert norms == pytest.approx(means, rel=1e-6)


def split_batch(rank, num_ranks, plan, count):
    """Gradients, norm and losses of one batch of 4 rows a rank, cut into `count` micro-batches."""
    batch = torch.randn(num_ranks, 4, 4, generator=torch.Generator().manual_seed(7))
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1)
    losses = []
    for index, part in enumerate(batch[rank].chunk(count)):
        loss = model(part).pow(2).mean()
        before = loss.item()
        if index < count - 1:
            with onefold.accumulate(model):
                (loss / count).backward()
        else:
            (loss / count).backward()
        losses += [before, loss.item()]  # backward leaves the loss as it was
    reference = build(Stack)
    reference(batch.flatten(0, 1)).pow(2).mean().backward()
    same(grads(model), {name: parameter.grad for name, parameter in reference.named_parameters()})
    optimizer.step()
    whole = [parameter.grad for parameter in reference.parameters()]
    return optimizer.grad_norm, torch.nn.utils.get_total_norm(whole).item(), losses


@pairwise(count=(1, 2, 4), plan=PLANS, num_ranks=(1, 2))
def test_micro_batches_equal_the_batch(ranks, count, plan, num_ranks):
    for norm, wanted, losses in ranks(num_ranks).run(split_batch, plan, count):
        assert norm == pytest.approx(wanted, rel=1e-5)
        assert losses[::2] == losses[1::2]
