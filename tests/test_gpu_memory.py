"""Promise: under ZERO_3 the peak is the Budget plus a window of whole units, not the model."""

import gc

import torch

import onefold
from gpu_models import Tower, gpus
from inside import insides
from onefold.comm.copies.copy_collectives import PeerComm

WIDTH, DEPTH = 2048, 40
UNIT_GRADIENTS = 2
"""Whole gradients alive beside the parameters of the window: one unit's as autograd made them, and their flat copy, or
those of the unit before while they are reduced."""


def peak(rank, num_ranks, prefetch_units):
    torch.cuda.set_device(rank)
    with torch.device("meta"):
        model = Tower(WIDTH, DEPTH).bfloat16()
    gc.collect()  # the last model is a cycle, and what is left of it must not count as ours
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    device = torch.device("cuda", rank)
    unit_bytes = sum(param.numel() for param in model.blocks[0].parameters()) * 2
    with device:
        model = onefold.shard(
            model,
            onefold.ZERO_3,
            precision=onefold.Precision(params="bf16"),
            prefetch_bytes=prefetch_units * unit_bytes + 4096,
        )
    optimizer = onefold.AdamW(model, lr=1e-4, max_grad_norm=1.0)
    x = torch.randn(8, WIDTH, device=device, dtype=torch.bfloat16)
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        model(x).float().square().mean().backward()
        if step == 2:
            torch.cuda.synchronize()
            comm = insides(model).comm
            shared = comm.shared_bytes if isinstance(comm, PeerComm) else 0  # the driver's, which torch does not count
            seen = torch.cuda.max_memory_allocated() - before + shared
        optimizer.step()
        optimizer.zero_grad()
    predicted = onefold.predicted(model, optimizer).device_bytes
    inbox = comm.inbox_bytes if isinstance(comm, PeerComm) else 0
    window = (1 + prefetch_units + UNIT_GRADIENTS) * unit_bytes + inbox
    return seen, predicted, window


def check(results):
    for seen, predicted, window in results:
        print(f"peak {seen / 2**20:.1f} MiB, Budget {predicted / 2**20:.1f} MiB, window {window / 2**20:.1f} MiB")
        assert abs(seen - predicted - window) <= 0.05 * (predicted + window)


@gpus(1)
def test_one_gpu_peak_is_budget_and_window():
    for prefetch_units in (0, 1, 3):
        check([peak(0, 1, prefetch_units)])


@gpus(2)
def test_two_gpus_peak_is_budget_and_window(ranks):
    for prefetch_units in (0, 1, 3):
        check(ranks(2).run(peak, prefetch_units, timeout_s=120))
