"""Promise: frozen weights can be left out of a checkpoint, which then loads into a model that has them, if asked to."""

import re

import pytest
import torch
from torch import nn

import onefold
from checks import same, weights
from models import build
from onefold.errors import CheckpointError

PLANS = ("zero_0", "zero_2", "zero_3", "offload")
WIDTH = 64


class Adapted(nn.Module):
    """A frozen weight, and what is added to it. Its buffer and what it counts are saved with the trained weights."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.base(x) + self.up(self.down(x))


class Wider(Adapted):
    """Has one adapter more."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(WIDTH, 1)
        self.register_buffer("later", torch.full((), 5.0))


class Other(nn.Module):
    """Has nothing of it."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(2, 2)


def sharded(make, plan, seed):
    model = onefold.shard(build(make, seed), onefold.plan.table.NAMED_PLANS[plan])
    return model, onefold.AdamW(model, lr=0.05)


def step(model, optimizer, number):
    model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(rank, num_ranks, directory, plan):
    """Weights when they are saved, and a step later."""
    model, optimizer = sharded(Adapted, plan, 1)
    step(model, optimizer, 0)
    onefold.save(directory / plan, model, optimizer, frozen=False).wait()
    before = weights(model)
    step(model, optimizer, 1)
    return before, weights(model)


def load(rank, num_ranks, directory, saved_under, plan):
    """As `save`, of a model that has the same frozen weights and other adapters, and of one with others of both."""
    found = []
    for seed in (1, 2):
        model, optimizer = sharded(Adapted, plan, seed)
        with onefold.gathered([model.down.weight], write=True):
            model.down.weight.data.fill_(7)
        onefold.load(directory / saved_under, model, optimizer, strict=False)
        before = weights(model)
        step(model, optimizer, 1)
        found.append((before, weights(model)))
    return found


@pytest.mark.parametrize(
    ("saved_under", "save_ranks", "load_ranks"), [(plan, 2, 1) for plan in PLANS] + [("zero_3", 1, 2)]
)
def test_training_goes_on_where_the_frozen_weights_are_the_same(ranks, tmp_path, saved_under, save_ranks, load_ranks):
    saved, later = ranks(save_ranks).run(save, tmp_path, saved_under)[0]
    frozen = sum(value.nbytes for name, value in saved.items() if name.startswith("base"))
    assert sum(file.stat().st_size for file in (tmp_path / saved_under).glob("*.data")) < frozen
    for plan in PLANS:
        (before, after), (elsewhere, _) = ranks(load_ranks).run(load, tmp_path, saved_under, plan)[0]
        same(before, saved, 0.0)
        same(after, later, 1e-5)
        plain = dict(build(Adapted, 2).named_parameters())
        same(elsewhere, {**saved, **{name: plain[name].detach() for name in saved if name.startswith("base")}}, 0.0)


def refuse(rank, num_ranks, directory, make, strict):
    model, optimizer = sharded(make, "zero_3", 1)
    before = weights(model)
    try:
        onefold.load(directory / "zero_3", model, optimizer, strict=strict)
    except CheckpointError as error:
        same(weights(model), before, 0.0)
        return str(error)


REFUSALS = {
    "asked for all": (Adapted, True, "2 of its parameters are not in the checkpoint .* strict=False loads those"),
    "nothing in common": (Other, False, "have no parameter in common"),
    "an optimizer that does not fit": (Wider, False, "'more.weight' of group 0 was in no group"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_on_every_rank_before_anything_is_changed(ranks, tmp_path, case):
    make, strict, message = REFUSALS[case]
    ranks(2).run(save, tmp_path, "zero_3")
    for told in ranks(2).run(refuse, tmp_path, make, strict):
        assert told is not None
        assert re.search(message, told)


def save_some(rank, num_ranks, directory):
    model, optimizer = sharded(Adapted, "zero_3", 1)
    with pytest.raises(CheckpointError, match=r"frozen= was given on ranks \[1\] of 2 only"):
        onefold.save(directory / "some", model, optimizer, frozen=rank == 0).wait()


def test_all_ranks_leave_them_out_or_none(ranks, tmp_path):
    ranks(2).run(save_some, tmp_path)
    assert list(tmp_path.iterdir()) == []


def load_weights(rank, num_ranks, directory):
    model = onefold.shard(build(Wider, 2), onefold.ZERO_3)
    before = weights(model)
    onefold.load(directory / "zero_3", model, strict=False)
    return before, weights(model)


def test_weights_and_buffers_that_the_checkpoint_lacks_stay_as_they_are(ranks, tmp_path):
    saved, _ = ranks(2).run(save, tmp_path, "zero_3")[0]
    for before, after in ranks(2).run(load_weights, tmp_path):
        same(after, {**before, **{name: value for name, value in saved.items() if not name.startswith("base")}}, 0.0)
        assert after["later"] == 5
        assert after["seen"] == 1


def test_what_lacks_its_frozen_weights_is_not_exported(ranks, tmp_path):
    ranks(1).run(save, tmp_path, "zero_3")
    with pytest.raises(CheckpointError, match="no frozen weights"):
        onefold.export(tmp_path / "zero_3", tmp_path / "out")
