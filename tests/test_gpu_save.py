"""Promise: on GPUs a save beside training holds the moment it was asked for: the first one, which locks its memory as
it goes, and the second, however late its copies begin. Memory that cannot be locked is an error, once.
"""

import pytest
import torch

import onefold
from gpu_models import Tower, gpus, late
from inside import insides
from onefold.errors import HostMemoryError
from onefold.memory.pinned import Pages
from plans import NAMED_PLANS


def save_and_train(rank, num_ranks, directory, plan):
    """Saves the same moment at once and beside training, twice."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    # On one rank it is, with its state, larger than what is locked at once.
    model = onefold.shard(Tower(1024, 3).to(device), NAMED_PLANS[plan], precision=onefold.Precision(params="bf16"))
    optimizer = onefold.AdamW(model, lr=1e-3)
    late(insides(model).lanes.down)

    def train():
        model(torch.randn(16, 1024, device=device)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        train()
        onefold.save(directory / f"at once {number}", model, optimizer)
        saving = onefold.save(directory / f"beside {number}", model, optimizer, asynchronous=True)
        for _ in range(2):
            train()
        saving.wait()
    return True


def check(ranks, num_ranks, directory, plan):
    assert ranks(num_ranks).run(save_and_train, directory, plan) == [True] * num_ranks
    for number in range(2):
        for rank in range(num_ranks):
            name = f"rank-{rank:05d}.data"
            one, other = (directory / f"{way} {number}" / name for way in ("at once", "beside"))
            assert one.read_bytes() == other.read_bytes()


@gpus(1)
@pytest.mark.parametrize("plan", ["zero_0", "zero_3", "offload"])
def test_one_gpu_saves_the_moment(ranks, tmp_path, plan):
    check(ranks, 1, tmp_path, plan)


@gpus(2)
@pytest.mark.parametrize("plan", ["zero_1", "zero_3"])
def test_two_gpus_save_the_moment(ranks, tmp_path, plan):
    check(ranks, 2, tmp_path, plan)


def lock_twice(rank, num_ranks):
    """Locks the same memory twice; returns what the GPU computes after that."""
    torch.cuda.set_device(rank)
    ones, pages = torch.ones(8, device="cuda"), Pages(2**22)
    pages.lock(0, 2**22)
    with pytest.raises(HostMemoryError, match="refused to lock"):
        pages.lock(0, 2**22)
    return ones.add(1).sum().item()


@gpus(1)
def test_memory_that_cannot_be_locked_leaves_no_error_to_what_comes_next(ranks):
    assert ranks(1).run(lock_twice) == [16]
