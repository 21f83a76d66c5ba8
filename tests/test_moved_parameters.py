"""Promise: nobody reads or saves old values of a parameter that was moved since `shard`. Every reader looks, as forward
does, and names the parameter and the way out; what only training could get wrong is refused where training begins."""

import pytest
import torch
from torch import nn

import onefold
from checks import same, weights
from models import Stack, build
from onefold.errors import ShardError
from plans import NAMED_PLANS, every_plan, one_and_two_ranks


def gathered(model, optimizer, folder):
    with onefold.gathered(model):
        model.head.weight.sum()


def written(model, optimizer, folder):
    with onefold.gathered(model, write=True):
        model.head.weight.sum()


READERS = {
    "full_state_dict": lambda model, optimizer, folder: onefold.full_state_dict(model),
    "export": lambda model, optimizer, folder: onefold.export(model, folder / "export"),
    "save": lambda model, optimizer, folder: onefold.save(folder / "save", model, optimizer),
    "optimizer.state_dict": lambda model, optimizer, folder: optimizer.state_dict(),
    "EMA": lambda model, optimizer, folder: onefold.EMA(model),
    "gathered": gathered,
    "written": written,
    "forward": lambda model, optimizer, folder: model(torch.ones(3, 4)),
    "step": lambda model, optimizer, folder: optimizer.step(),
}


def assigned(rank, num_ranks, plan, folder):
    """What each reader says of a parameter whose data was assigned."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1)
    model(torch.ones(3, 4)).square().mean().backward()
    with onefold.gathered(model):
        model.head.weight.data = torch.full_like(model.head.weight, 5.0)
    told = {}
    for name, read in READERS.items():
        with pytest.raises(ShardError) as raised:
            read(model, optimizer, folder)
        told[name] = str(raised.value)
    return told


@every_plan
@one_and_two_ranks
def test_every_reader_refuses_a_parameter_whose_data_was_assigned(ranks, tmp_path, plan, num_ranks):
    for rank, told in enumerate(ranks(num_ranks).run(assigned, plan, tmp_path)):
        for message in told.values():
            assert "'head.weight'" in message
            assert f"rank {rank}" in message
            assert "was moved or cast after onefold.shard" in message
            assert "assignment to .data" in message
    assert list(tmp_path.iterdir()) == []


class Adapted(nn.Module):
    """What a reference model and a policy share, and an adapter of each: one at a time trains."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.adapters = nn.ModuleDict({"policy": nn.Linear(4, 4), "reference": nn.Linear(4, 4).requires_grad_(False)})
        self.choose("policy")

    def choose(self, name):
        self.chosen = name
        for other, adapter in self.adapters.items():
            adapter.requires_grad_(other == name)

    def forward(self, x):
        return self.base(x) + self.adapters[self.chosen](x)


def compared(rank, num_ranks, plan):
    """A reference forward without gradients before each step of the policy; the same in plain PyTorch."""
    x, found = torch.ones(1, 4), []
    for shard, make in (
        (lambda model: onefold.shard(model, NAMED_PLANS[plan]), onefold.SGD),
        (lambda model: model, lambda model, lr: torch.optim.SGD(model.parameters(), lr)),
    ):
        model = shard(build(Adapted))
        optimizer = make(model, lr=0.1)
        for _ in range(2):
            model.choose("reference")
            with torch.no_grad():
                reference = model(x)
            model.choose("policy")
            (model(x) - reference).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model)
    sharded, plain = found
    same(weights(sharded), {name: param.detach() for name, param in plain.named_parameters()})
    sharded.choose("reference")
    with pytest.raises(ShardError, match=r"frozen when onefold\.shard was called"):
        sharded(x)


@every_plan
@one_and_two_ranks
def test_a_frozen_parameter_may_ask_for_gradients_where_none_are_recorded(ranks, plan, num_ranks):
    ranks(num_ranks).run(compared, plan)


def grown(rank, num_ranks, plan):
    """A module that came later may be there while nothing is recorded; it cannot be trained."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    model.late = nn.Linear(2, 2)
    with torch.no_grad():
        model(torch.ones(3, 4))
    with pytest.raises(ShardError, match=r"'late\.weight' came into the model after onefold\.shard"):
        model(torch.ones(3, 4))


@every_plan
def test_a_module_that_came_later_is_refused_where_training_begins(ranks, plan):
    ranks(2).run(grown, plan)
