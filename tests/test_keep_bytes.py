"""Promise: `keep_bytes=` saves the second gather of the units it has room for, and changes nothing else: no bit of a
result, no byte before a forward or after its backward.
"""

from functools import partial

import pytest
import torch

import onefold
from checks import same, weights
from inside import counted, insides, units_of
from models import Block, Checkpointed, Reentrant, Stack, build
from onefold.errors import ReleasedParameterError, ShardError
from onefold.plan.accounting import UnitBytes
from onefold.setup import free_memory
from onefold.setup.reshard_policy import bytes_to_keep, kept_units
from plans import NAMED_PLANS
from ranks import Turn

EVERYTHING = 2**30


def grown(model):
    """The units whose parameters are in memory."""
    return [unit.index for unit in units_of(model) if all(flat.buffer.is_grown for flat in unit.flats)]


# --- ways to train: each makes the gradients of one step, and tells what was in memory before a backward


def forward(model, turn):
    return model(turn.randn(3, 4)).square().mean()


def plainly(model, turn):
    loss = forward(model, turn)
    held = grown(model)
    loss.backward()
    return held


def accumulating(model, turn):
    with onefold.accumulate(model):
        plainly(model, turn)
    return plainly(model, turn)


def after_clearing(model, turn):
    """The loop that clears gradients between forward and backward."""
    loss = forward(model, turn)
    insides(model).reducer.finish()
    for parameter in model.parameters():
        parameter.grad = None
    held = grown(model)
    loss.backward()
    return held


def after_evaluating(model, turn):
    with torch.no_grad():
        forward(model, turn)
    assert grown(model) == []
    forward(model, turn)  # its backward never comes
    return plainly(model, turn)


def twice_forward(model, turn):
    loss = forward(model, turn) + forward(model, turn)
    held = grown(model)
    loss.backward()
    return held


def twice_backward(model, turn):
    loss = forward(model, turn)
    held = grown(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return held


def looked_at(model, turn):
    loss = forward(model, turn)
    held = grown(model)
    with onefold.gathered(model):
        model.head.weight.norm().item()
    loss.backward()
    return held


WAYS = {
    "plain": (plainly, Block),
    "checkpoints": (plainly, Checkpointed),
    "reentrant checkpoints": (plainly, Reentrant),
    "accumulated": (accumulating, Block),
    "cleared before backward": (after_clearing, Block),
    "evaluated": (after_evaluating, Block),
    "two forwards": (twice_forward, Block),
    "two backwards": (twice_backward, Block),
    "looked at": (looked_at, Block),
}


def train(rank, plan, way, keep_bytes, **options):
    """A model after four steps, the gathered elements of the last, and what was in memory before each backward."""
    work, block = WAYS[way]
    model, comm = counted(build(partial(Stack, block=block)), NAMED_PLANS[plan], keep_bytes=keep_bytes, **options)
    optimizer = onefold.AdamW(model, lr=1e-2, max_grad_norm=1.0)
    held, before = [], 0
    for step in range(4):
        before = comm.gather_numel
        held.append(work(model, Turn(rank, step, sharded=True)))
        assert grown(model) == []
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, comm.gather_numel - before, held


def room_for(num_ranks, count):
    """Bytes of the root and the last `count` blocks."""
    sizes = [unit.nbytes for unit in units_of(onefold.shard(build(Stack), onefold.ZERO_3))]
    return sizes[0] + sum(sizes[len(sizes) - count :])


def compare(rank, num_ranks, plan, way, count, options):
    keep_bytes = EVERYTHING if count is None else room_for(num_ranks, count)
    want, _, usual, _ = train(rank, plan, way, None, **options)
    model, optimizer, gathered, held = train(rank, plan, way, keep_bytes, **options)
    same(weights(model), weights(want), 0)
    budget = onefold.predicted(model, optimizer)
    kept = [0, *range(4 - (3 if count is None else count), 4)]
    assert held == [kept] * 4
    assert budget.kept_bytes == sum(units_of(model)[index].nbytes for index in kept) <= keep_bytes
    return kept, usual, gathered, budget.gather_numel, [sum(f.layout.numel for f in u.flats) for u in units_of(model)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, None], ids=lambda count: f"{'all' if count is None else count} blocks")
def test_kept_units_are_gathered_once_a_step(ranks, num_ranks, count):
    for kept, usual, gathered, predicted, numel in ranks(num_ranks).run(compare, "zero_3", "plain", count, {}):
        assert usual == 2 * sum(numel)
        assert gathered == predicted == usual - sum(numel[index] for index in kept)


@pytest.mark.parametrize("options", [{"prefetch_bytes": 0}, {"prefetch_bytes": EVERYTHING}])
def test_whatever_is_gathered_ahead(ranks, options):
    for kept, usual, gathered, _, numel in ranks(2).run(compare, "zero_3", "checkpoints", 1, options):
        assert gathered == usual - sum(numel[index] for index in kept)


@pytest.mark.parametrize(
    ("plan", "way"),
    [*(("zero_3", way) for way in WAYS if way != "plain"), ("offload_3", "checkpoints"), ("offload_3", "two forwards")],
)
def test_results_are_the_same_bit_for_bit(ranks, plan, way):
    for kept, usual, gathered, _, numel in ranks(2).run(compare, plan, way, 2, {}):
        once = sum(numel[index] for index in kept)
        if way in ("checkpoints", "reentrant checkpoints", "cleared before backward", "evaluated"):
            assert gathered == usual - once
        assert gathered <= usual + 2 * once


def whole_plans(rank, num_ranks):
    model = onefold.shard(build(Stack), onefold.ZERO_2, keep_bytes=EVERYTHING)
    return onefold.predicted(model, onefold.AdamW(model)).kept_bytes, len(grown(model))


def test_parameters_that_rest_whole_are_not_kept(ranks):
    assert ranks(2).run(whole_plans) == [(0, 4)] * 2


def test_a_kept_unit_is_as_released_to_its_owner():
    model = onefold.shard(build(Stack), onefold.ZERO_3, keep_bytes=EVERYTHING)
    forward(model, Turn(0, 0, sharded=True))
    assert grown(model) == [0, 1, 2, 3]
    with pytest.raises(ReleasedParameterError, match="not gathered"):
        _ = model.head.weight + 1
    onefold.AdamW(model).step()  # without a backward, a step gives the memory back
    assert grown(model) == []


def test_the_next_forward_starts_with_nothing_gathered():
    model = onefold.shard(build(Stack), onefold.ZERO_3, keep_bytes=EVERYTHING, prefetch_bytes=0)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(grown(model)))
    for step in range(2):
        forward(model, Turn(0, step, sharded=True))
    assert seen == [[0, 1]] * 2


def window(rank, num_ranks, keep_bytes, prefetch_bytes):
    """The most bytes of whole parameters in two steps, and the budget's bound."""
    model = onefold.shard(build(Stack), onefold.ZERO_3, keep_bytes=keep_bytes, prefetch_bytes=prefetch_bytes)
    optimizer, seen = onefold.AdamW(model), []

    def watched(gather):
        gather()
        seen.append(sum(unit.nbytes for unit in units_of(model) if unit.is_gathered))

    for unit in units_of(model):
        unit.gather = partial(watched, unit.gather)
    for step in range(2):
        plainly(model, Turn(rank, step, sharded=True))
        optimizer.step()
    return max(seen), onefold.predicted(model, optimizer).window_bytes(prefetch_bytes)


@pytest.mark.parametrize("prefetch_bytes", [0, 1500])
@pytest.mark.parametrize("keep_bytes", [0, 1600, 3000])
def test_the_window_holds_what_is_kept(ranks, keep_bytes, prefetch_bytes):
    for most, bound in ranks(2).run(window, keep_bytes, prefetch_bytes):
        assert most <= bound


# --- which units


@pytest.mark.parametrize(
    ("keep_bytes", "want"),
    [
        (0, set()),
        (9, {1}),  # only a small one fits
        (10, {0}),
        (15, {0, 1}),
        (30, {0, 3}),
        (50, {0, 3, 2}),
        (55, {0, 3, 2, 1}),
        (10**6, {0, 3, 2, 1}),
    ],
    ids=lambda value: str(value),
)
def test_the_last_units_are_kept_first(keep_bytes, want):
    assert kept_units(keep_bytes, (10, 5, 20, 20)) == want


def test_an_empty_unit_is_not_kept():
    assert kept_units(100, (0, 5)) == {1}


def decided(rank, num_ranks, plan):
    """What "auto" comes to on a GPU whose free memory differs from rank to rank, and on this CPU."""
    usual = free_memory.device_bytes
    free_memory.device_bytes = lambda device: (400, 1000 - 100 * rank)
    model = onefold.shard(build(Stack), onefold.ZERO_3)
    comm = insides(model).comm
    demand = partial(free_memory.Demand, units=[UnitBytes(params=20, grads=20, optim=60)] * 2, comm=comm)
    try:
        return [
            bytes_to_keep("auto", NAMED_PLANS[plan], demand(device=torch.device(device), present={device: present}))
            for device, present in (("cuda", 0), ("cuda", 50), ("cpu", 50))
        ]
    finally:
        free_memory.device_bytes = usual


@pytest.mark.parametrize(("plan", "states"), [("zero_3", 100), ("offload_3", 0), ("zero_2", None)])
def test_auto_takes_what_the_fullest_rank_has_left(ranks, plan, states):
    left = 900 - 400 // 4 - 9 * 20  # less activations and units at work
    want = [0, 0, 0] if states is None else [left - states, left + 50 - states, 0]
    assert ranks(2).run(decided, plan) == [want] * 2


def shard_apart(rank, num_ranks):
    with pytest.raises(ShardError, match="settings differ"):
        onefold.shard(build(Stack), onefold.ZERO_3, keep_bytes=rank)


def test_ranks_must_be_asked_for_the_same(ranks):
    ranks(2).run(shard_apart)


@pytest.mark.parametrize("choice", [-1, 1.5, "all", True, [1]])
def test_what_is_no_number_of_bytes_is_refused(choice):
    with pytest.raises(ShardError, match="keep_bytes"):
        onefold.shard(build(Stack), onefold.ZERO_3, keep_bytes=choice)
