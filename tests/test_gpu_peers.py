"""Promise: on GPUs of one machine, copies of shards are what NCCL's gathers give, bit for bit, sums by copies are those
in rank order, and a step costs no more.

Four ranks are tried where there is but one GPU, too: copies give the same if ranks share it. NCCL would want one for
each, so gloo carries what is not copied, and gives sums in rank order to compare with.
"""

import os
import random
import statistics
import time
from functools import partial
from unittest import mock

import pytest
import torch

import onefold
import onefold.comm.mesh
from gpu_models import Tower, gpus
from inside import insides, noticed_views
from onefold.comm.comm import GlooComm, NcclComm
from onefold.comm.copies.copy_collectives import PeerComm
from onefold.comm.copies.shared_memory import SymmetricPool
from onefold.comm.mesh import connect
from onefold.comm.reductions import mean_of_rows
from onefold.memory.streams import lanes_for
from onefold.optim.kernels.fused import mean_on

WIDTH, DEPTH, ROWS = 4096, 12, 4096
MOST_GPUS = min(4, max(2, torch.cuda.device_count()))


def take_gpu(rank):
    """This rank's GPU, the current one from now on; some ranks have one together where there are more of them."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def trained_over(rank, num_ranks, wire, *how):
    """As `trained`; `wire` is the Comm that carries what is not copied."""
    take_gpu(rank)
    with mock.patch.object(onefold.comm.mesh, "NcclComm", wire):
        return trained(*how, rank)


def trained(plan, gather, keep_bytes, rank):
    """The weights after steps with clipping, evaluation, averages and writing; and whether gathers were copies."""
    torch.manual_seed(0)
    model = onefold.shard(
        Tower(256, 6).cuda(),
        plan,
        precision=onefold.Precision(params="bf16"),
        gather=gather,
        keep_bytes=keep_bytes,
    )
    optimizer = onefold.AdamW(model, lr=1e-2, max_grad_norm=0.1)
    average = onefold.EMA(model, decay=0.5)
    seen, draw = [], random.Random(rank)
    for step in range(30):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
        torch.cuda._sleep(draw.randrange(10**7))  # ranks are late by up to 5 ms
        model(x).float().square().mean().backward()
        with torch.no_grad():
            seen.append(model(x).float().cpu())
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        if not plan.params.partitioned:  # whole weights are the user's to write, as soon as they are there
            torch.cuda._sleep(draw.randrange(10**7))
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.999)
        if step % 5 == 4:
            with average.applied(), torch.no_grad():
                seen.append(model(x).float().cpu())
            with onefold.gathered(model, write=True), torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)
    with onefold.gathered(model):
        weights = [param.detach().float().cpu().clone() for param in model.parameters()]
    return [*seen, *weights], isinstance(insides(model).comm, PeerComm)


WAYS = pytest.mark.parametrize(
    ("plan", "keep_bytes"),
    [(onefold.ZERO_3, None), (onefold.ZERO_3, 10**9), (onefold.ZERO_2, None)],
    ids=["gathered twice", "kept", "whole"],
)


@gpus(2)
@WAYS
def test_copies_give_what_nccl_gives(ranks, plan, keep_bytes):
    assert_alike(ranks(2), NcclComm, plan, keep_bytes)  # two numbers have but one sum


@gpus(1)
@WAYS
def test_copies_of_four_ranks_give_what_gloo_gives(ranks, plan, keep_bytes):
    assert_alike(ranks(4), GlooComm, plan, keep_bytes)


def assert_alike(ranks, wire, plan, keep_bytes):
    want = ranks.run(trained_over, wire, plan, "collective", keep_bytes, timeout_s=180)
    got = ranks.run(trained_over, wire, plan, "copy", keep_bytes, timeout_s=180)
    for (tensors, is_copied), (wanted, was_copied) in zip(got, want, strict=True):
        assert is_copied
        assert not was_copied
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, wanted, strict=True))


def told_apart(rank, num_ranks):
    take_gpu(rank)
    with mock.patch.object(onefold.comm.mesh, "NcclComm", GlooComm):
        model = onefold.shard(Tower(256, 2).cuda(), onefold.ZERO_2, gather="copy")
    model(torch.ones(8, 256, device="cuda")).square().mean().backward()
    return noticed_views(model)


@gpus(1)
def test_views_of_whole_weights_are_noticed(ranks):
    """Weights of several units lie in one allocation, and gradients on their way in another."""
    for alone, held in ranks(4).run(told_apart, timeout_s=180):
        assert not any(alone)
        assert all(held)


def parts_of(rank, turn, dtype):
    """A gradient in five parts that end in the middle of shards and chunks."""
    generator = torch.Generator("cuda").manual_seed(1000 * turn + rank)
    numel = 3 * 2**26 // dtype.itemsize
    whole = torch.randn(numel, generator=generator, device="cuda", dtype=torch.float32).to(dtype)
    return whole.split([numel // 8, 3 * numel // 8 + 24, numel // 4 - 8, 1, numel // 4 - 17])


def summed(rank, num_ranks, dtype):
    """Turns whose sum was not the one in rank order."""
    device = take_gpu(rank)
    inner, draw, wrong = connect(device), random.Random(rank), []
    comm = PeerComm(inner, SymmetricPool(inner.peer_group, device), mean_on(device))
    shards = [torch.empty(3 * 2**26 // dtype.itemsize // num_ranks, dtype=dtype, device=device) for _ in range(3)]
    comm.expect_reductions(shards[0].nbytes)
    lanes = lanes_for(device)
    for turn in range(12):
        want = [mean_by_hand(num_ranks, rank, 3 * turn + place, dtype) for place in range(3)]
        parts = [parts_of(rank, 3 * turn + place, dtype) for place in range(3)]
        tickets = []
        for shard, each in zip(shards, parts, strict=True):
            torch.cuda._sleep(draw.randrange(10**7))  # ranks are late by up to 5 ms
            launch = partial(comm.reduce_scatter, shard, *each)
            tickets.append(lanes.reduce.run(launch, after=[lanes.mark()], keep=[shard, *each]))
        for ticket in tickets:
            ticket.wait()
        wrong += [turn for got, wanted in zip(shards, want, strict=True) if not torch.equal(got, wanted)]
    return wrong, comm.inbox_bytes


def mean_by_hand(num_ranks, rank, turn, dtype):
    rows = [torch.cat(parts_of(each, turn, dtype)).chunk(num_ranks)[rank] for each in range(num_ranks)]
    mean = torch.empty_like(rows[0])
    mean_of_rows(mean, torch.stack(rows))
    return mean


@gpus(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_by_copies_are_those_in_rank_order(ranks, dtype):
    for wrong, inbox_bytes in ranks(4).run(summed, dtype, timeout_s=180):
        assert wrong == []
        assert inbox_bytes <= 2**28


def step_seconds(rank, num_ranks, gather):
    torch.cuda.set_device(rank)
    with torch.device("cuda", rank):
        model = Tower(WIDTH, DEPTH).bfloat16()
    model = onefold.shard(model, onefold.ZERO_3, precision=onefold.Precision(params="bf16"), gather=gather)
    optimizer = onefold.AdamW(model, lr=1e-4)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[4:]), isinstance(insides(model).comm, PeerComm)


@gpus(2)
def test_the_choice_is_no_slower_than_either_way(ranks):
    seconds = {}
    for gather in ("collective", "copy", "auto"):
        found = ranks(MOST_GPUS).run(step_seconds, gather, timeout_s=180)
        seconds[gather] = max(each for each, _ in found)
    chosen = "copy" if found[0][1] else "collective"
    print(
        f"{MOST_GPUS} GPUs, a step: " + ", ".join(f"{way} {s * 1e3:.1f} ms" for way, s in seconds.items()),
        f"({chosen})",
    )
    assert seconds["auto"] < 1.03 * min(seconds["collective"], seconds["copy"])


def resting(rank, num_ranks):
    """Device bytes that a pool takes beyond what was asked of it."""
    torch.cuda.set_device(rank)
    model = onefold.shard(Tower(64, 2).cuda(), onefold.ZERO_3, gather="copy")
    pool = insides(model).comm._pool
    assert isinstance(pool, SymmetricPool)
    return pool.allocate(1000, torch.bfloat16)[0].shape


@gpus(2)
def test_a_pool_gives_what_was_asked_for(ranks):
    assert ranks(2).run(resting, timeout_s=120) == [torch.Size([1000])] * 2
