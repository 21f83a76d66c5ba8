"""Promise: torchdata's StatefulDataLoader goes on in the middle of an epoch: each rank gets the batches that it would
have got, and so do ranks of any number that all read the same ones."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, RandomSampler

import onefold
from checks import weights
from onefold.errors import CheckpointError
from plans import NAMED_PLANS

pytest.importorskip("torchdata", reason="torchdata is not installed: pip install torchdata")

ROWS, BATCH, BEFORE = 46, 3, 3


class Stream(IterableDataset):
    """Numbers of one rank's own, drawn one by one; its place is all that it remembers."""

    def __init__(self, rank):
        self.rank, self.at = rank, 0

    def __iter__(self):
        while self.at < ROWS:
            self.at += 1
            yield 1000 * self.rank + self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def dealt(rank, num_ranks, **options):
    """Shuffled rows, dealt to the ranks."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    rows = range(ROWS)
    sampler = StatefulDistributedSampler(rows, num_ranks, rank, shuffle=True, seed=3)
    return StatefulDataLoader(rows, BATCH, sampler=sampler, **options)


def drawn(rank, num_ranks):
    """Rows that each rank draws for itself, by a random generator of the loader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(rank)
    rows = range(ROWS)
    return StatefulDataLoader(rows, BATCH, sampler=RandomSampler(rows, generator=generator), generator=generator)


def streamed(rank, num_ranks, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Stream(rank), BATCH, **options)


def shared(rank, num_ranks):
    """The same rows on every rank."""
    return drawn(0, num_ranks)


LOADERS = {"dealt": dealt, "drawn": drawn, "streamed": streamed}
WITH_WORKERS = {"dealt": partial(dealt, num_workers=2), "streamed": partial(streamed, num_workers=1)}


@dataclass
class Fit:
    """A model that is fit to the rows of a loader."""

    model: nn.Module
    optimizer: onefold.AdamW

    def train(self, batches, most=ROWS):
        """The batches that it was fit to: so many, or all that there are."""
        seen = []
        for rows in batches:
            self.model(rows.float().view(-1, 1) / ROWS).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append(rows.tolist())
            if len(seen) == most:
                break
        return seen


def fit(plan, seed=0):
    torch.manual_seed(seed)
    model = onefold.shard(nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)), NAMED_PLANS[plan])
    return Fit(model, onefold.AdamW(model, lr=0.01))


def save_in_the_middle(rank, num_ranks, directory, make):
    """Saves in the middle of an epoch, both ways, and goes on to its end: the batches and weights that came of it."""
    run, loader = fit("zero_3"), make(rank, num_ranks)
    batches = iter(loader)
    run.train(batches, BEFORE)
    onefold.save(directory / "it", run.model, run.optimizer, loader=loader, extra=loader.state_dict())
    rest = run.train(batches)
    return rest, run.train(loader, 2), weights(run.model)  # and on into the next epoch


def go_on(rank, num_ranks, directory, make, plan):
    run, loader = fit(plan, seed=1), make(rank, num_ranks)
    onefold.load(directory / "it", run.model, run.optimizer, loader=loader)
    rest = run.train(loader)
    return rest, run.train(loader, 2), weights(run.model)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_each_rank_goes_on_with_the_batches_that_it_would_have_got(ranks, tmp_path, name, num_ranks):
    want = ranks(num_ranks).run(save_in_the_middle, tmp_path, LOADERS[name])
    for plan in ("zero_3", "zero_1"):
        found = ranks(num_ranks).run(go_on, tmp_path, LOADERS[name], plan)
        for (rest, after, end), (rest_then, after_then, end_then) in zip(want, found, strict=True):
            assert len(rest) >= 4
            assert (rest_then, after_then) == (rest, after)
            assert all(torch.equal(tensor, end[key]) for key, tensor in end_then.items())
    assert len({str(rest) for rest, _, _ in want}) == num_ranks


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's, with torch 2.13
@pytest.mark.parametrize("name", WITH_WORKERS)
def test_a_loader_with_worker_processes_goes_on_with_the_batches_that_it_would_have_got(tmp_path, name):
    # In this process: those of `ranks` are daemons, which may not start others.
    rest, after, end = save_in_the_middle(0, 1, tmp_path, WITH_WORKERS[name])
    rest_then, after_then, end_then = go_on(0, 1, tmp_path, WITH_WORKERS[name], "zero_1")
    assert len(rest) >= 4
    assert (rest_then, after_then) == (rest, after)
    assert all(torch.equal(tensor, end[key]) for key, tensor in end_then.items())


def go_on_elsewhere(rank, num_ranks, directory):
    """What ranks of another number are told, and the batches that they get through `extra`."""
    run, loader = fit("zero_3", seed=1), shared(rank, num_ranks)
    with pytest.raises(CheckpointError, match=f"saved by 2 ranks, and this is one of {num_ranks}.*without loader="):
        onefold.load(directory / "it", run.model, run.optimizer, loader=loader)
    loader.load_state_dict(onefold.load(directory / "it", run.model, run.optimizer))
    rest = run.train(loader)
    return rest, run.train(loader, 2), weights(run.model)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_of_another_number_that_read_the_same_batches_go_on_with_them(ranks, tmp_path, num_ranks):
    (rest, after, end), _ = ranks(2).run(save_in_the_middle, tmp_path, shared)
    for rest_then, after_then, end_then in ranks(num_ranks).run(go_on_elsewhere, tmp_path):
        assert (rest_then, after_then) == (rest, after)
        assert all(torch.allclose(tensor, end[key], atol=1e-6) for key, tensor in end_then.items())
