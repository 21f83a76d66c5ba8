"""Promise: parameter groups and learning-rate schedules work as on any torch optimizer, also around skipped steps.

Libraries failed here because they removed groups that a scheduler counted on, or did not say that a step was skipped.
"""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import onefold
from checks import same, tensors, weights
from models import Stack, backward, build, sharded
from onefold import DynamicLossScale, Precision
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan, one_and_two_ranks
from ranks import Case, Turn, average, squared, thinned, train

# --- groups


def half_frozen():
    model = Stack()
    model.blocks[0].requires_grad_(False)
    model.embed.bias.requires_grad_(False)
    return model


def named(model, *parts):
    return [parameter for name, parameter in model.named_parameters() if any(part in name for part in parts)]


def only_the_middle_trains(model):
    trained = named(model, "blocks.1", "blocks.2", "head", "embed.weight")
    return [
        {"params": named(model, "blocks.0", "embed.bias"), "lr": 9.0},
        {"params": trained, "lr": 0.5},
        {"params": [], "lr": 7.0},
    ]


def empty_first(model):
    rest = named(model, "embed", "blocks", "head.bias")
    return [{"params": [], "lr": 3.0}, {"params": named(model, "head.weight"), "lr": 0.2}, {"params": rest}]


def one_group_per_parameter(model):
    return [{"params": [p], "lr": 0.01 * (k + 1)} for k, (_, p) in enumerate(model.named_parameters())]


def within_blocks(model):
    """Weights and biases of each block in different groups, so that groups interleave within every shard."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.3, "lr": 0.02}]


GROUPS = {
    "only the middle trains": only_the_middle_trains,
    "empty first": empty_first,
    "one per parameter": one_group_per_parameter,
    "within blocks": within_blocks,
}


def grouped(model, sharded, groups, momentum=0.9):
    options = {"lr": 0.1, "momentum": momentum}
    if sharded:
        return onefold.SGD(model, param_groups=groups(model), **options)
    return torch.optim.SGD(groups(model), **options)


def by_epoch(optimizer):
    return LambdaLR(optimizer, lambda epoch: 0.1**epoch).step


def per_group(optimizer):
    factors = [partial(lambda k, epoch: 1 / (1 + k + epoch), k) for k in range(len(optimizer.param_groups))]
    return LambdaLR(optimizer, factors).step


def warm_up_then_cosine(optimizer):
    parts = [LinearLR(optimizer, 0.25, total_iters=2), CosineAnnealingLR(optimizer, 4)]
    return SequentialLR(optimizer, parts, milestones=[2]).step


def one_cycle(optimizer):
    """Cycles momentum too."""
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=6).step


def on_plateau(optimizer):
    return partial(ReduceLROnPlateau(optimizer, patience=0).step, 1.0)


def stepwise(optimizer):
    return StepLR(optimizer, 2, 0.5).step


SCHEDULES = (by_epoch, per_group, warm_up_then_cosine, one_cycle, on_plateau, stepwise)


@pairwise(groups=list(GROUPS), plan=PLANS, num_ranks=(1, 2))
def test_groups_keep_their_places_and_rates(ranks, groups, plan, num_ranks):
    optimizer = partial(grouped, groups=GROUPS[groups])
    case = Case(model=half_frozen, work=squared, optimizer=optimizer, schedule=per_group, steps=3)
    ranks(num_ranks).run(train, case, plan)


@every_plan
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_schedules_drive_the_groups(ranks, schedule, plan):
    optimizer = partial(grouped, groups=only_the_middle_trains)
    case = Case(model=half_frozen, work=squared, optimizer=optimizer, schedule=schedule, steps=4)
    ranks(2).run(train, case, plan)


def head_only(model):
    return [{"params": named(model, "head")}]


@every_plan
def test_a_parameter_in_no_group_stays(ranks, plan):
    optimizer = partial(grouped, groups=head_only)
    case = Case(model=Stack, work=squared, optimizer=optimizer, steps=1)
    ranks(2).run(train, case, plan)


def set_by_hand(optimizer):
    def change():
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] *= 0.5
            group["weight_decay"] = 0.1 * index

    return change


@every_plan
@one_and_two_ranks
def test_groups_changed_by_hand_are_live(ranks, plan, num_ranks):
    optimizer = partial(grouped, groups=within_blocks)
    case = Case(model=Stack, work=squared, optimizer=optimizer, schedule=set_by_hand, steps=3)
    ranks(num_ranks).run(train, case, plan)


def biases_and_norms(name, parameter):
    return parameter.dim() < 2


def without_decay(model, sharded, no_decay, exempt):
    options = {"lr": 1e-2, "weight_decay": 0.5, "eps": 1e-3}
    if sharded:
        return onefold.AdamW(model, no_decay=no_decay, **options)
    groups = [
        {"params": [p for n, p in model.named_parameters() if not exempt(n, p)]},
        {"params": [p for n, p in model.named_parameters() if exempt(n, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **options)


def biases(name, parameter):
    return name.endswith("bias")


def first_block(name, parameter):
    return name.startswith("blocks.0.") or name == "head.weight"


NO_DECAY = {
    "pattern": (("*.bias",), biases),
    "names and patterns": (("blocks.0.*", "head.weight"), first_block),
    "function": (biases_and_norms, biases_and_norms),
}


@every_plan
@pytest.mark.parametrize("name", NO_DECAY)
def test_no_decay_is_a_group_of_its_own(ranks, name, plan):
    no_decay, exempt = NO_DECAY[name]
    optimizer = partial(without_decay, no_decay=no_decay, exempt=exempt)
    # Rates are compared group by group, so this holds the order of the groups too: decayed first.
    ranks(2).run(train, Case(model=Stack, work=squared, optimizer=optimizer), plan)


# --- skipped steps

OVERFLOW = {
    "fp16": Precision(params="fp16", loss_scale=DynamicLossScale(initial=2.0**30, hysteresis=1)),
    "fp32": Precision(loss_scale=DynamicLossScale(initial=2.0**127, hysteresis=1)),
}


def until_a_good_step(rank, num_ranks, plan, precision):
    """Train through overflows to the first good step, then compare with plain PyTorch. Returns what was seen."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], precision=precision)
    optimizer = onefold.SGD(model, lr=1.0, momentum=0.9)
    schedule = LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    start, seen = weights(model), [(None, schedule.get_last_lr()[0], optimizer.loss_scale)]
    while len(seen) < 40 and seen[-1][0] is not False:
        (8 * model(Turn(rank, 0, sharded=True).randn(3, 4))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.skipped:
            same(weights(model), start, 0)
        else:
            schedule.step()
        seen.append((optimizer.skipped, schedule.get_last_lr()[0], optimizer.loss_scale))
    replicas = [build(Stack) for _ in range(num_ranks)]
    for number, replica in enumerate(replicas):
        (8 * replica(Turn(number, 0, sharded=False).randn(3, 4))).pow(2).mean().backward()
    average(replicas)
    torch.optim.SGD(replicas[rank].parameters(), lr=1.0).step()
    tolerance = 1e-5 if precision.params is None else 0.1
    same({n: w.float() for n, w in weights(model).items()}, tensors(replicas[rank]), tolerance)
    return seen


@pairwise(dtype=list(OVERFLOW), plan=PLANS, num_ranks=(1, 2))
def test_a_skipped_step_leaves_no_trace_but_the_scale(ranks, dtype, plan, num_ranks):
    results = ranks(num_ranks).run(until_a_good_step, plan, OVERFLOW[dtype])
    assert all(seen == results[0] for seen in results)
    skipped, rates, scales = zip(*results[0], strict=True)
    assert list(skipped) == [None, *[True] * (len(skipped) - 2), False]
    assert len(skipped) > 2
    assert list(rates) == [1.0] * (len(rates) - 1) + [0.5]
    assert list(scales[:-1]) == [scales[0] / 2**k for k in range(len(scales) - 1)]
    assert scales[-1] == scales[-2]  # a good step keeps it


def bad_on_one_rank(rank, num_ranks, plan, value, accumulated):
    """Weights before and after a step in which the last rank's loss is not finite; then a good step."""
    precision = Precision(loss_scale=DynamicLossScale(initial=4.0, hysteresis=1))
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], precision=precision)
    optimizer = onefold.AdamW(model, lr=0.1)
    factor = value if rank == num_ranks - 1 else 1.0
    if accumulated:
        with onefold.accumulate(model):
            (model(torch.ones(1, 4)) * factor).sum().backward()
        factor = 1.0
    (model(torch.ones(1, 4)) * factor).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    first = optimizer.skipped
    same(weights(model), tensors(build(Stack)), 0)
    squared(model, Turn(rank, 0, sharded=True))
    optimizer.step()
    finite = all(bool(tensor.isfinite().all()) for tensor in weights(model).values())
    return first, optimizer.skipped, finite, optimizer.loss_scale


@pairwise(
    value=(float("inf"), float("nan")),
    accumulated={"at the boundary": False, "in accumulate": True},
    plan=PLANS,
    num_ranks=(1, 2),
)
def test_one_bad_rank_makes_every_rank_skip(ranks, value, accumulated, plan, num_ranks):
    results = ranks(num_ranks).run(bad_on_one_rank, plan, value, accumulated)
    assert results == [(True, False, True, 2.0)] * num_ranks


def schedule_quietly(rank, num_ranks, plan):
    """torch's schedulers warn when they believe that the optimizer was never stepped."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = onefold.shard(build(Stack), NAMED_PLANS[plan])
        optimizer = onefold.AdamW(model, lr=1.0)
        schedule = StepLR(optimizer, 1, 0.5)
        squared(model, Turn(rank, 0, sharded=True))
        optimizer.step()
        schedule.step()
        return schedule.get_last_lr()


@every_plan
def test_schedulers_see_the_step(ranks, plan):
    assert ranks(2).run(schedule_quietly, plan) == [[0.5], [0.5]]


# --- two optimizers


def two_optimizers(rank, num_ranks, plan):
    """One for the blocks, one for the rest, which do not step and clear at the same times."""

    def pair(model, make):
        inner = list(model.blocks.parameters())
        outer = [*model.embed.parameters(), *model.head.parameters()]
        return make(model, inner, 0.1), make(model, outer, 0.02)

    def ours(model, params, lr):
        return onefold.SGD(model, lr=lr, param_groups=[{"params": params}], max_grad_norm=0.1)

    def torchs(model, params, lr):
        return torch.optim.SGD(params, lr=lr)

    model, plain = sharded(plan), build(Stack)
    both, others = pair(model, ours), pair(plain, torchs)
    for turn in range(4):
        backward(model)
        backward(plain)
        which = turn % 2
        norm = nn.utils.clip_grad_norm_([p for group in others[which].param_groups for p in group["params"]], 0.1)
        both[which].step()
        others[which].step()
        assert abs(both[which].grad_norm - norm.item()) < 1e-5
        both[which].zero_grad()
        others[which].zero_grad()
        if turn == 0:  # clipping changed plain's gradients only where the optimizer cleared them anyhow
            assert model.embed.weight.grad is not None
    same(weights(model), tensors(plain))


@thinned
def test_two_optimizers_keep_to_their_own(ranks, plan, num_ranks):
    ranks(num_ranks).run(two_optimizers, plan)
