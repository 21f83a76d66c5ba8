"""Promise: a mesh of two axes, replicate and shard, trains as any other ranks do.

Every plan on every mesh of 2 and 4 ranks against plain PyTorch in one process; what is equal to the bit; what ranks
decide together.
"""

import contextlib

import pytest
import torch
from torch import nn

import onefold
from checks import equal, grads, same, tensors, weights
from mesh_models import CPU, PATIENCE_S, PLANS, grid, sharded
from models import WIDTH, Block, Stack, build
from onefold import Precision
from onefold.comm import mesh
from onefold.errors import OnefoldError
from onefold.memory.streams import Ticket
from ranks import Case, Turn, average, optimizer_for, plain

MESHES = [(2, 2), (4, 1), (1, 4), (2, 1), (1, 2)]
ON_DEVICE = ("zero_0", "zero_1", "zero_2", "zero_3", "kept")
ON_HOST = ("offload", "offload_3")
every_mesh = pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))


# --- training


class Routed(nn.Module):
    """Blocks of which a forward may leave some out, and a statistic."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, order=(0, 1, 2, 3)):
        x = self.norm(self.embed(x))
        for index in order:
            x = self.blocks[index](x)
        return self.head(x)


def work(model, turn):
    """Gradients are added up on a rank, and reduced twice in a step."""
    with turn.accumulate(model):
        (model(turn.randn(3, 4)).pow(2).mean() / 3).backward()
    for _ in range(2):
        (model(turn.randn(3, 4)).pow(2).mean() / 3).backward()


def branches(model, turn):
    """In step 1 the last rank leaves out a block."""
    order = (0, 2, 3) if turn.rank == 3 and turn.step == 1 else (0, 1, 2, 3)
    model(turn.randn(3, 4), order=order).pow(2).mean().backward()


def against_plain(rank, num_ranks, shape, how, plans):
    """Raises where gradients or weights are not those of plain PyTorch in one process."""
    case = Case(model=Routed, work=how, optimizer="adamw")
    history, end = plain(case, rank, num_ranks)
    for plan in plans:
        model = sharded(build(Routed), plan, shape)
        optimizer = optimizer_for(case, model, sharded=True)
        for step, (wanted, _) in enumerate(history):
            how(model, Turn(rank, step, sharded=True))
            same(grads(model), wanted)
            optimizer.step()
            optimizer.zero_grad()
        same(weights(model), end)


@every_mesh
def test_training_is_that_of_one_process(ranks, shape):
    ranks(shape[0] * shape[1]).run(against_plain, shape, work, list(PLANS), timeout_s=PATIENCE_S)


@pytest.mark.parametrize("plan", ["zero_0", "zero_2", "zero_3", "offload_3"])
def test_ranks_of_a_replica_and_replicas_may_run_different_branches(ranks, plan):
    ranks(4).run(against_plain, (2, 2), branches, [plan], timeout_s=PATIENCE_S)


# --- norm and clipping


def clipped(rank, num_ranks, shape):
    """Norms of clipped training and end weights, of plain PyTorch and by plan."""
    replicas = [build(Stack) for _ in range(num_ranks)]
    plain = [torch.optim.AdamW(replica.parameters(), lr=1e-2, eps=1e-3) for replica in replicas]
    wanted, found = [], {}
    for step in range(3):
        for number, replica in enumerate(replicas):
            replica.zero_grad()
            replica(Turn(number, step, sharded=False).randn(3, 4)).pow(2).mean().backward()
        average(replicas)
        wanted += {float(nn.utils.clip_grad_norm_(replica.parameters(), 0.05)) for replica in replicas}
        for optimizer in plain:
            optimizer.step()
    for plan in PLANS:
        model, norms = sharded(build(Stack), plan, shape), []
        optimizer = onefold.AdamW(model, lr=1e-2, eps=1e-3, max_grad_norm=0.05)
        for step in range(3):
            model(Turn(rank, step, sharded=True).randn(3, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        found[plan] = norms, weights(model)
    return wanted, tensors(replicas[0]), found


@every_mesh
def test_the_norm_counts_each_shard_once_and_is_the_same_everywhere(ranks, shape):
    outcomes = ranks(shape[0] * shape[1]).run(clipped, shape, timeout_s=PATIENCE_S)
    for wanted, end, found in outcomes:
        for plan, (norms, got) in found.items():
            assert norms == outcomes[0][2][plan][0]
            assert norms == pytest.approx(wanted, rel=1e-5)
            same(got, end)


def totals(rank, num_ranks):
    comm = mesh.connect(CPU, grid((2, 2)))
    return float(comm.total(torch.tensor(2.0**rank, dtype=torch.float64)))


def test_what_replicas_sum_differently_is_replica_0s(ranks):
    assert ranks(4).run(totals) == [3.0] * 4


# --- bits

PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(params="bf16"),
    "bf16, all else fp32": Precision(params="bf16", master="fp32", reduce="fp32"),
    "fp16": Precision(params="fp16", loss_scale=onefold.DynamicLossScale(initial=2.0**8, window=2, hysteresis=1)),
}


def bits(rank, num_ranks, shape, precision, plans):
    """By plan: exact weights on rank 0, the norms and the loss scale, and everyone's weights, after three steps."""
    found = {}
    for plan in plans:
        model = sharded(build(Stack), plan, shape, precision=PRECISIONS[precision])
        optimizer = onefold.AdamW(model, lr=1e-2, max_grad_norm=0.05)
        norms = []
        for step in range(3):
            model(Turn(rank, step, sharded=True).randn(3, 4)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        exact = onefold.full_state_dict(model, dtype="fp32")
        found[plan] = exact, (norms, optimizer.loss_scale), weights(model)
    return found


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_on_one_mesh_plans_agree_to_the_bit_and_so_do_all_ranks(ranks, precision):
    outcomes = ranks(4).run(bits, (2, 2), precision, (*ON_DEVICE, *ON_HOST), timeout_s=PATIENCE_S)
    for plans in (ON_DEVICE, ON_HOST):
        want, numbers, seen = outcomes[0][plans[0]]
        assert want
        for exact, got_numbers, got in (found[plan] for found in outcomes for plan in plans):
            assert not exact or equal(exact, want)
            assert got_numbers == numbers
            assert equal(got, seen)


def summed(rank, num_ranks, shape, dtype):
    """The mean of what all ranks have, as a plan with parts and one without get it, and the norm's sum."""
    comm, numel = mesh.connect(CPU, grid(shape)), 64
    mine = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
    part = torch.empty(numel // comm.num_shards, dtype=dtype)
    Ticket(comm.reduce_scatter(part, mine.clone())).wait()
    whole = torch.empty(numel, dtype=dtype)
    Ticket(comm.all_gather(whole, part)).wait()
    return whole, float(comm.total(part.double().square().sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_an_axis_of_one_rank_changes_no_bit_of_a_mean(ranks, dtype):
    """(R, 1) sums squares in another order than R ranks that share. Two axes of two sum gradients in another, too."""
    by_shape = {shape: ranks(4).run(summed, shape, dtype) for shape in (None, (1, 4), (4, 1), (2, 2))}
    for found in by_shape.values():
        assert all(torch.equal(mean, found[0][0]) and total == found[0][1] for mean, total in found)
    want, square = by_shape[None][0]
    every = [torch.randn(64, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]
    torch.testing.assert_close(want.double(), torch.stack(every).double().mean(0), rtol=2e-2, atol=2e-2)
    assert torch.equal(by_shape[1, 4][0][0], want)
    assert by_shape[1, 4][0][1] == square
    assert torch.equal(by_shape[4, 1][0][0], want)
    assert by_shape[4, 1][0][1] == pytest.approx(square, rel=1e-14)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(by_shape[2, 2][0][0], want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_replicas_training_has_the_bits_of_one_axis(ranks, precision):
    found, want = (
        ranks(2).run(bits, shape, precision, ("zero_0", "zero_3", "offload"), timeout_s=PATIENCE_S)[0]
        for shape in ((1, 2), None)
    )
    for plan, (exact, numbers, _) in found.items():
        assert equal(exact, want[plan][0])
        assert numbers == want[plan][1]


# --- ranks decide together


def overflowing(rank, num_ranks, plan):
    """By step: whether it was skipped, and the loss scale; in step 1 rank 2 alone, of replica 1, overflows."""
    model = sharded(build(Stack), plan, (2, 2), precision=PRECISIONS["fp16"])
    optimizer = onefold.SGD(model, lr=0.1)
    told, seen = [], []
    for step in range(4):
        loss = model(Turn(rank, step, sharded=True).randn(3, 4)).float().pow(2).mean()
        (loss * (2.0**20 if step == 1 and rank == 2 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append((optimizer.skipped, optimizer.loss_scale))
        seen.append(weights(model))
    return told, equal(seen[0], seen[1]), equal(seen[1], seen[2]), seen[-1]


@pytest.mark.parametrize("plan", ["zero_0", "zero_1", "zero_3", "offload"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, plan):
    outcomes = ranks(4).run(overflowing, plan, timeout_s=PATIENCE_S)
    for told, is_kept, is_stuck, end in outcomes:
        assert told == [(False, 256.0), (True, 128.0), (False, 128.0), (False, 128.0)]
        assert is_kept
        assert not is_stuck
        assert equal(end, outcomes[0][3])


def failing(rank, num_ranks, plan):
    """What the step after a backward says that failed on the last rank alone."""
    model = sharded(build(Stack), plan, (2, 2))
    optimizer = onefold.SGD(model, lr=0.1)
    model(torch.ones(3, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == num_ranks - 1:
        model.blocks[0].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if rank == 3 else contextlib.nullcontext():
        model(torch.ones(3, 4)).pow(2).mean().backward()
    try:
        optimizer.step()
    except OnefoldError as error:
        return str(error)
    return None


@pytest.mark.parametrize("plan", ["zero_0", "zero_2", "zero_3"])
def test_a_backward_that_fails_on_one_rank_is_an_error_on_all(ranks, plan):
    for rank, message in enumerate(ranks(4).run(failing, plan, timeout_s=PATIENCE_S)):
        assert "failed on rank 3 alone" in message
        assert f"this is rank {rank}" in message
