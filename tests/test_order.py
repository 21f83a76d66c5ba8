"""Promise: ranks that use units in different orders get an error that names the modules, on every rank, and never hang.

What is exact is not refused: a block that one rank skips, branches that change from step to step, a block used twice,
and any order at all where parameters rest whole. How much is gathered ahead changes no bit.
"""

from functools import partial

import pytest
import torch
from torch import nn

import onefold
from checks import weights
from inside import insides
from models import WIDTH, Routed, Stack, build
from onefold import Precision
from onefold.errors import OrderMismatchError
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan
from ranks import Case, Turn, train

PATIENCE_S = 240.0
"""A run that takes longer hangs: gloo itself would wait for minutes."""
WHOLE_PLANS = ("zero_0", "zero_1", "zero_2")


class Nested(nn.Module):
    """Two towers, each with blocks, entered one after the other."""

    def __init__(self):
        super().__init__()
        self.left = Stack(depth=2)
        self.right = Stack(depth=2)

    def forward(self, x, first="left"):
        second = "right" if first == "left" else "left"
        return getattr(self, first)(x) + getattr(self, second)(x)


def deep():
    return Routed(depth=9)


# --- orders that differ


def swapped(model, x, rank):
    return model(x, order=(0, 2, 1, 3) if rank else (0, 1, 2, 3))


def reversed_(model, x, rank):
    return model(x, order=(3, 2, 1, 0) if rank else (0, 1, 2, 3))


def last_swapped(model, x, rank):
    return model(x, order=(0, 1, 3, 2) if rank else (0, 1, 2, 3))


def towers(model, x, rank):
    return model(x, first="right" if rank else "left")


def plain(model, x):
    return model(x)


DIFFERENT = {
    # the model, a forward whose order depends on the rank, and modules that the message names
    "two blocks swapped": (Routed, swapped, ("blocks.1", "blocks.2")),
    "all blocks reversed": (Routed, reversed_, ("blocks.0", "blocks.3")),
    "the last two swapped": (Routed, last_swapped, ("blocks.2", "blocks.3")),
    "towers swapped": (Nested, towers, ("left.blocks.0", "right.blocks.0")),
}


def out_of_order(rank, num_ranks, name, plan, since, prefetch_bytes=None):
    """The error of this rank's training, in which ranks differ from step `since` on."""
    make, forward, _ = DIFFERENT[name]
    model = onefold.shard(build(make), NAMED_PLANS[plan], prefetch_bytes=prefetch_bytes)
    optimizer = onefold.SGD(model, lr=0.1)
    try:
        for step in range(since + 2):
            x = Turn(rank, step, sharded=True).randn(3, 4)
            output = forward(model, x, rank) if step >= since else plain(model, x)
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except OrderMismatchError as error:
        return str(error)
    return None


@pairwise(name=list(DIFFERENT), since=(0, 1, 3), num_ranks=(2, 3))
def test_different_orders_are_an_error_on_every_rank(ranks, name, since, num_ranks):
    """From the first step on, from the second (whose order is frozen), and in the midst of training."""
    messages = ranks(num_ranks).run(out_of_order, name, "zero_3", since, timeout_s=PATIENCE_S)
    for message in messages:
        assert message is not None
        assert "different orders" in message
        assert "ZERO_2" in message
        assert all(module in message for module in DIFFERENT[name][2])


@pytest.mark.parametrize("prefetch_bytes", [0, 2**30])
@pytest.mark.parametrize("since", [0, 3])
def test_different_orders_are_found_however_much_is_gathered_ahead(ranks, since, prefetch_bytes):
    messages = ranks(2).run(out_of_order, "two blocks swapped", "zero_3", since, prefetch_bytes, timeout_s=PATIENCE_S)
    assert all(message is not None and "blocks.1" in message for message in messages)


@pytest.mark.parametrize("plan", WHOLE_PLANS)
@pytest.mark.parametrize("since", [0, 1])
def test_whole_parameters_have_no_order(ranks, since, plan):
    results = ranks(2).run(out_of_order, "two blocks swapped", plan, since, timeout_s=PATIENCE_S)
    assert results == [None, None]


def work_swapped(model, turn):
    swapped(model, turn.randn(3, 4), turn.rank).square().mean().backward()


@pytest.mark.parametrize("plan", WHOLE_PLANS)
def test_whole_parameters_in_different_orders_train_right(ranks, plan):
    case = Case(model=Routed, work=work_swapped, steps=4)
    ranks(2).run(train, case, plan)


# --- different parts of the model, called by themselves


def other_parts(rank, num_ranks, plan, since):
    model = onefold.shard(build(Routed), NAMED_PLANS[plan])
    try:
        for step in range(since + 1):
            x = Turn(rank, step, sharded=True).randn(3, WIDTH)
            model.blocks[rank if step >= since else 0](x).square().mean().backward()
    except OrderMismatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize("since", [0, 2])
def test_different_parts_called_by_themselves_are_an_error(ranks, since):
    messages = ranks(2).run(other_parts, "zero_3", since, timeout_s=PATIENCE_S)
    for rank, message in enumerate(messages):
        assert message is not None
        assert f"blocks.{rank}" in message


# --- what is exact


def one_block_less(model, turn):
    order = (0, 1, 3) if turn.rank == 1 else (0, 1, 2, 3)
    model(turn.randn(3, 4), order=order).square().mean().backward()


def one_block_less_later(model, turn):
    order = (0, 1, 3) if turn.rank == 1 and turn.step >= 2 else (0, 1, 2, 3)
    model(turn.randn(3, 4), order=order).square().mean().backward()


def each_rank_its_block(model, turn):
    """As experts do: blocks 1 and 2 are alternatives, and no rank uses both."""
    model(turn.randn(3, 4), order=(0, 1 + turn.rank % 2, 3)).square().mean().backward()


def by_step(model, turn):
    orders = [(0, 1, 2, 3), (0, 2), (3, 1), (3, 2, 1, 0), (0, 1, 2, 3)]
    model(turn.randn(3, 4), order=orders[turn.step % 5]).square().mean().backward()


def twice(model, turn):
    model(turn.randn(3, 4), order=(0, 1, 1, 0, 2, 3)).square().mean().backward()


def twice_on_one_rank(model, turn):
    order = (0, 1, 2, 3, 3) if turn.rank else (0, 1, 2, 3)
    model(turn.randn(3, 4), order=order).square().mean().backward()


def nothing_on_one_rank(model, turn):
    model(turn.randn(3, 4), order=() if turn.rank else (0, 1, 2, 3)).square().mean().backward()


EXACT = [
    one_block_less,
    one_block_less_later,
    each_rank_its_block,
    by_step,
    twice,
    twice_on_one_rank,
    nothing_on_one_rank,
]


@pairwise(work=EXACT, prefetch_bytes=(None, 0, 2**30), num_ranks=(2, 3))
def test_orders_that_can_be_served_are_exact(ranks, work, num_ranks, prefetch_bytes):
    case = Case(model=Routed, work=work, steps=6, options={"prefetch_bytes": prefetch_bytes})
    ranks(num_ranks).run(train, case, "zero_3", timeout_s=PATIENCE_S)


@pytest.mark.parametrize("work", EXACT, ids=lambda work: work.__name__)
@pytest.mark.parametrize("plan", WHOLE_PLANS)
def test_such_orders_are_exact_where_parameters_rest_whole(ranks, work, plan):
    case = Case(model=Routed, work=work, steps=6)
    ranks(2).run(train, case, plan, timeout_s=PATIENCE_S)


def one_deep_block_less(model, turn):
    """There is much to do after the block that one rank skips, in forward and in backward."""
    order = [index for index in range(9) if (index, turn.rank) not in ((1, 0), (4, 1), (7, 1))]
    model(turn.randn(3, 4), order=order).square().mean().backward()


@pytest.mark.parametrize("num_ranks", [2, 3])
@every_plan
def test_a_block_skipped_in_a_deep_model_is_exact(ranks, plan, num_ranks):
    case = Case(model=deep, work=one_deep_block_less, steps=4)
    ranks(num_ranks).run(train, case, plan, timeout_s=PATIENCE_S)


def trained(rank, num_ranks, prefetch_bytes, dtype):
    model = onefold.shard(
        build(Routed), onefold.ZERO_3, precision=Precision(params=dtype), prefetch_bytes=prefetch_bytes
    )
    optimizer = onefold.AdamW(model, lr=1e-2, max_grad_norm=0.1)
    for step in range(4):
        turn = Turn(rank, step, sharded=True)
        model(turn.randn(3, 4), order=(0, 1, 2, 2, 3)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def trained_with(rank, num_ranks, every_bytes, dtype):
    """Which amounts gathered ahead change any bit, compared with none."""
    want = trained(rank, num_ranks, 0, dtype)
    return [
        prefetch_bytes
        for prefetch_bytes in every_bytes
        if any(
            not torch.equal(tensor, want[name])
            for name, tensor in trained(rank, num_ranks, prefetch_bytes, dtype).items()
        )
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_gathered_ahead_changes_no_bit(ranks, dtype, num_ranks):
    assert ranks(num_ranks).run(trained_with, (None, 1, 1500, 5000, 2**40), dtype) == [[]] * num_ranks


# --- different numbers of passes


def backwards_more(model, turn_of, rank, step):
    for micro in range(2 if rank else 1):
        model(turn_of(step + micro).randn(3, 4)).square().mean().backward()


def backwards_less(model, turn_of, rank, step):
    for micro in range(1 if rank else 2):
        model(turn_of(step + micro).randn(3, 4)).square().mean().backward()


def accumulates_more(model, turn_of, rank, step):
    """All run two backwards; one rank accumulates the first, the others reduce it."""
    if rank:
        with onefold.accumulate(model):
            model(turn_of(step).randn(3, 4)).square().mean().backward()
    else:
        model(turn_of(step).randn(3, 4)).square().mean().backward()
    model(turn_of(step + 1).randn(3, 4)).square().mean().backward()


def forgets_to_leave(model, turn_of, rank, step):
    """One rank accumulates its only backward, so that it never reduces."""
    if rank:
        with onefold.accumulate(model):
            model(turn_of(step).randn(3, 4)).square().mean().backward()
    else:
        model(turn_of(step).randn(3, 4)).square().mean().backward()


def uneven(rank, num_ranks, plan, work, since):
    model = onefold.shard(build(Routed), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1)

    def turn_of(step):
        return Turn(rank, step, sharded=True)

    try:
        for step in range(since + 2):
            if step < since:
                model(turn_of(step).randn(3, 4)).square().mean().backward()
            else:
                work(model, turn_of, rank, step)
            optimizer.step()
            optimizer.zero_grad()
    except OrderMismatchError as error:
        return str(error)
    return None


UNEVEN = [backwards_more, backwards_less, accumulates_more, forgets_to_leave]


@pairwise(plan=PLANS, work=UNEVEN, since=(0, 3))
def test_different_numbers_of_reductions_are_an_error(ranks, plan, work, since):
    messages = ranks(2).run(uneven, plan, work, since, timeout_s=PATIENCE_S)
    assert all(message is not None and "very rank must run" in message for message in messages), messages


def collectives_of_ones_own(rank, num_ranks, plan):
    """The loop reduces its loss between backward and step. One rank is so busy that it leaves backward with all its
    reductions under way: the other must not wait for what happens only in that rank's step."""
    model = onefold.shard(build(partial(Stack, depth=8)), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1)
    if rank == 0:
        insides(model).reducer._bound = lambda tickets, limit: None
    for step in range(3):
        loss = model(Turn(rank, step, sharded=True).randn(3, 4)).square().mean()
        torch.distributed.all_reduce(loss.detach())
        loss.backward()
        torch.distributed.all_reduce(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.grad_norm


@every_plan
def test_collectives_of_the_loop_itself_wait_for_nothing(ranks, plan):
    norms = ranks(2).run(collectives_of_ones_own, plan, timeout_s=PATIENCE_S)
    assert len(set(norms)) == 1


def tell(store, word, grad):
    store.set(word, "came")


def ahead(rank, num_ranks, plan):
    """Rank 1 begins its backward when rank 0's has gradients, of which none is of a whole unit yet."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1)
    store, last = torch.distributed.distributed_c10d._get_default_store(), model.blocks[-1]
    for step in range(3):
        loss = model(Turn(rank, step, sharded=True).randn(3, 4)).square().mean()
        word = f"{plan} {step}"
        hooks = [param.register_hook(partial(tell, store, word)) for param in last.parameters()]
        if rank == 1:
            store.wait([word])
        loss.backward()
        for hook in hooks:
            hook.remove()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.grad_norm


@pytest.mark.parametrize("plan", ["zero_0", "zero_1", "zero_2"])
def test_the_first_rank_goes_on_until_it_reduces(ranks, plan):
    norms = ranks(2).run(ahead, plan, timeout_s=PATIENCE_S)
    assert len(set(norms)) == 1
