"""Promise: ranks may do different work; where their collectives could then not be matched, every rank gets an error.

A hang is a failure: each run has a time limit, and the error names what to do.
"""

from functools import partial

import pytest
import torch
from torch import nn

import onefold
from checks import grads, same, tensors, weights
from models import WIDTH, Block, Stack, build
from onefold.errors import OrderMismatchError
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, WHOLE_PLANS, every_plan
from ranks import Case, Turn, average, optimizer_for, plain, squared, train

TIMEOUT_S = 240.0
SIX_PLANS = (*PLANS, "offload", "offload_3")

# --- parameters that only some ranks use


class Branched(nn.Module):
    """A block with a branch for a second modality."""

    def __init__(self):
        super().__init__()
        self.text = Block()
        self.image = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, image=False):
        return self.text(x) + self.image(x) if image else self.text(x)


class Modal(Stack):
    """Uses its branches on the ranks that have an image."""

    def __init__(self):
        super().__init__(block=Branched)
        self.extra = nn.Linear(4, WIDTH)
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x, image=False, token=False):
        start = self.embed(x)
        if image:
            start = start + self.extra(x)
        if token:
            start = start + self.table(torch.tensor([1, 1, 3]))
        for block in self.blocks:
            start = block(start, image)
        return self.head(start)


class Short(Stack):
    def forward(self, x, depth):
        x = self.embed(x)
        for block in self.blocks[:depth]:
            x = block(x)
        return self.head(x)


def image_on_first_rank(model, turn):
    model(turn.randn(3, 4), image=turn.rank == 0).pow(2).mean().backward()


def image_on_last_step(model, turn):
    model(turn.randn(3, 4), image=turn.rank == 1 and turn.step == 1).pow(2).mean().backward()


def token_on_second_rank(model, turn):
    model(turn.randn(3, 4), image=turn.rank == 0, token=turn.rank == 1).pow(2).mean().backward()


BRANCHES = {
    "image on the first rank": Case(model=Modal, work=image_on_first_rank, optimizer="adamw", steps=3),
    "image on the second rank, later": Case(model=Modal, work=image_on_last_step, optimizer="adamw", steps=3),
    "each rank its own": Case(model=Modal, work=token_on_second_rank, optimizer="adamw", steps=3),
}


@pairwise(name=list(BRANCHES), plan=PLANS, num_ranks=(2, 3))
def test_a_parameter_used_on_some_ranks_gets_the_mean(ranks, name, plan, num_ranks):
    """The sum over its users, divided by the number of ranks and not of users."""
    ranks(num_ranks).run(train, BRANCHES[name], plan, timeout_s=TIMEOUT_S)


def clear_model(model, optimizer):
    model.zero_grad()


def clear_each(model, optimizer):
    for param in model.parameters():
        param.grad = None


def clear_by_del(model, optimizer):
    for param in model.parameters():
        del param.grad


def clear_group(model, optimizer):
    optimizer.zero_grad()


def image_in_turns(model, turn):
    model(turn.randn(3, 4), image=turn.rank == turn.step % 2).pow(2).mean().backward()


def without_biases(model, sharded):
    """Some parameters of a flat buffer are trained, and others are not."""
    chosen = [param for name, param in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": chosen}]
    return onefold.SGD(model, lr=0.1, param_groups=groups) if sharded else torch.optim.SGD(groups, 0.1)


def cleared_between_steps(rank, num_ranks, plan, clear, optimizer):
    """Clear gradients after each step: no part of one may stay on a rank that had none."""
    case = Case(model=Modal, work=image_in_turns, optimizer=optimizer, steps=4)
    _, end = plain(case, rank, num_ranks)
    model = onefold.shard(build(Modal), NAMED_PLANS[plan])
    optimizer = optimizer_for(case, model, sharded=True)
    for step in range(case.steps):
        image_in_turns(model, Turn(rank, step, sharded=True))
        optimizer.step()
        clear(model, optimizer)
    same(weights(model), end)


@pairwise(plan=SIX_PLANS, clear=(clear_model, clear_each, clear_by_del, clear_group), optimizer=("sgd", without_biases))
def test_gradients_of_some_ranks_are_cleared_on_all(ranks, plan, clear, optimizer):
    ranks(2).run(cleared_between_steps, plan, clear, optimizer, timeout_s=TIMEOUT_S)


def cleared_without_step(rank, num_ranks, plan, accumulates):
    """A backward whose gradients are thrown away: the other ranks do not learn of them before the next one."""
    (_, (want, _)), _ = plain(Case(model=Modal, work=image_in_turns, optimizer=still), rank, num_ranks)
    model = onefold.shard(build(Modal), NAMED_PLANS[plan])
    for step in range(2):
        image_in_turns(model, Turn(rank, step, sharded=True))
        if step == 0:
            model.zero_grad()
            with onefold.accumulate(model) if accumulates else torch.enable_grad():
                image_in_turns(model, Turn(rank, step, sharded=True))
            clear_each(model, None)
    same(grads(model), want)


def still(model, sharded):
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pairwise(plan=SIX_PLANS, num_ranks=(2, 3), accumulates=(False, True))
def test_gradients_thrown_away_are_gone_on_all_ranks(ranks, plan, num_ranks, accumulates):
    ranks(num_ranks).run(cleared_without_step, plan, accumulates, timeout_s=TIMEOUT_S)


def stepped_after_throwing_away(rank, num_ranks, plan, clear, by_hand):
    """Gradients of one rank are thrown away, and the step's are only ones that the other rank has added up, or set."""
    replicas = [build(Modal) for _ in range(num_ranks)]
    model = onefold.shard(build(Modal), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1)
    image_in_turns(model, Turn(rank, 0, sharded=True))
    clear(model, optimizer)
    with onefold.accumulate(model):
        add_up(model, Turn(rank, 1, sharded=True), by_hand)
    optimizer.step()
    for number, replica in enumerate(replicas):
        add_up(replica, Turn(number, 1, sharded=False), by_hand)
    average(replicas)
    torch.optim.SGD(replicas[rank].parameters(), lr=0.1).step()
    same(weights(model), tensors(replicas[rank]))


def add_up(model, turn, by_hand):
    if not by_hand:
        image_in_turns(model, turn)
    elif turn.rank == 1:
        for param in model.parameters():
            param.grad = torch.ones(param.shape)


@pairwise(plan=SIX_PLANS, clear=(clear_model, clear_each), by_hand=(False, True))
def test_a_step_takes_what_came_after_gradients_were_thrown_away(ranks, plan, clear, by_hand):
    """Of what one rank threw away others know nothing yet, and their own new gradients are no parts of it."""
    ranks(2).run(stepped_after_throwing_away, plan, clear, by_hand, timeout_s=TIMEOUT_S)


# --- work that differs by whole blocks or whole passes


def fewer_blocks(model, turn):
    model(turn.randn(3, 4), depth=3 if turn.rank == 0 else 1).pow(2).mean().backward()


def more_micro_batches(model, turn):
    for _ in range(2 if turn.rank == 0 else 0):
        with turn.accumulate(model):
            squared(model, turn)
    squared(model, turn)


def no_backward_on_last_rank(model, turn):
    loss = model(turn.randn(3, 4)).pow(2).mean()
    if turn.rank == 0 or turn.step == 0:
        loss.backward()


POINTS = r"ranks are at different points of the step.*Every rank must run the same forwards, backwards and steps"
# No plan but ZERO_3 needs a collective in forward, and none at all needs one while it accumulates.
UNEVEN = {
    "fewer blocks": Case(model=partial(Short, depth=3), work=fewer_blocks),
    "more micro-batches": Case(model=Stack, work=more_micro_batches, refusal=POINTS, refused_under=["zero_3"]),
    "no backward": Case(model=Stack, work=no_backward_on_last_rank, refusal=POINTS),
}


@every_plan
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_work_is_exact_or_refused_on_every_rank(ranks, name, plan):
    ranks(2).run(train, UNEVEN[name], plan, timeout_s=TIMEOUT_S)


# --- forwards without gradients, as in evaluation and generation


def uneven_forwards(rank, num_ranks, plan, mode, whole):
    """Rank r does r + 1 forwards without gradients, then all train one step as ever."""
    case = Case(model=Stack, work=squared, steps=1)
    _, end = plain(case, rank, num_ranks)
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1)
    with onefold.gathered(model) if whole else torch.enable_grad(), mode():
        outputs = [model(torch.ones(1, 4)) for _ in range(rank + 1)]
    squared(model, Turn(rank, 0, sharded=True))
    optimizer.step()
    same(weights(model), end)
    return [output.tolist() for output in outputs]


@pairwise(plan=WHOLE_PLANS, mode=(torch.no_grad, torch.inference_mode), num_ranks=(2, 3))
def test_whole_parameters_forward_without_the_others(ranks, num_ranks, mode, plan):
    outputs = ranks(num_ranks).run(uneven_forwards, plan, mode, False, timeout_s=TIMEOUT_S)
    assert all(output == outputs[0][0] for rank in outputs for output in rank)


@every_plan
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gathered_parameters_forward_without_the_others(ranks, mode, plan):
    outputs = ranks(2).run(uneven_forwards, plan, mode, True, timeout_s=TIMEOUT_S)
    assert all(output == outputs[0][0] for rank in outputs for output in rank)


def refused_forwards(rank, num_ranks, mode):
    with pytest.raises(OrderMismatchError, match=POINTS):
        uneven_forwards(rank, num_ranks, "zero_3", mode, False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_partitioned_parameters_name_the_rank_that_goes_its_own_way(ranks, mode):
    ranks(2).run(refused_forwards, mode, timeout_s=TIMEOUT_S)
