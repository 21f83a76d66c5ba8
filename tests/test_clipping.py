"""Promise: the norm of gradients, and the update that it clips, are the numbers that plain PyTorch computes.

Libraries failed here by counting: ranks, tied weights, padding - once too often or too seldom. A wrong factor does not
crash; it only trains worse.
"""

import pytest
import torch
from torch import nn

import onefold
from checks import same, tensors, weights
from models import WIDTH, Block, Stack, build
from onefold import Precision
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan, one_and_two_ranks
from ranks import Turn, average, squared


class Tied(nn.Module):
    """An embedding tied to the head, frozen parameters between, an idle one beside."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.table((x.abs() * 10).long().flatten() % 5)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, so shards end in padding."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 7), nn.Linear(7, 1)])
        self.scale = nn.Parameter(torch.tensor(1.7))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale


MODELS = {"tied": Tied, "uneven": Uneven, "stack": Stack}


def clipped_step(rank, num_ranks, plan, model, limit, precision):
    """Norms after two clipped steps, and those of plain PyTorch; the weights are compared here."""
    lr = 1.0 if limit == 0.01 else 0.05  # a large step only where clipping keeps it small
    replicas = [build(model) for _ in range(num_ranks)]
    sharded = onefold.shard(build(model), NAMED_PLANS[plan], precision=precision)
    optimizer = onefold.SGD(sharded, lr=lr, max_grad_norm=limit)
    norms, wanted = [], []
    for step in range(2):
        for number, replica in enumerate(replicas):
            squared(replica, Turn(number, step, sharded=False))
        average(replicas)
        for replica in replicas:
            norm = torch.nn.utils.clip_grad_norm_(replica.parameters(), float("inf") if limit is None else limit)
            torch.optim.SGD(replica.parameters(), lr=lr).step()
            replica.zero_grad()
        wanted.append(norm.item())
        squared(sharded, Turn(rank, step, sharded=True))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    same(weights(sharded), tensors(replicas[rank]))
    return norms, wanted


@pairwise(model=list(MODELS), limit=(0.01, 1e6, None), plan=PLANS, num_ranks=(1, 2, 3))
def test_the_norm_is_global_and_clips(ranks, model, limit, plan, num_ranks):
    results = ranks(num_ranks).run(clipped_step, plan, MODELS[model], limit, Precision())
    for norms, wanted in results:
        assert norms == results[0][0]  # the same number on every rank, to the last bit
        assert norms == pytest.approx(wanted, rel=1e-5)


@every_plan
@one_and_two_ranks
def test_the_norm_is_of_unscaled_gradients(ranks, plan, num_ranks):
    for norms, wanted in ranks(num_ranks).run(clipped_step, plan, Tied, 0.01, Precision(loss_scale=1024.0)):
        assert norms == pytest.approx(wanted, rel=1e-5)


def zero_gradients(rank, num_ranks, plan):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=1.0, max_grad_norm=1.0)
    (model(torch.ones(1, 4)) * 0).sum().backward()
    optimizer.step()
    same(weights(model), tensors(build(Stack)), 0)
    return optimizer.grad_norm


@every_plan
@one_and_two_ranks
def test_a_norm_of_zero_clips_nothing(ranks, plan, num_ranks):
    assert ranks(num_ranks).run(zero_gradients, plan) == [0.0] * num_ranks
