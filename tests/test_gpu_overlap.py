"""Promise: gathers run beside computation. Compared with the same work without prefetch, never with a clock alone."""

import statistics
import time

import torch

import onefold
from gpu_models import Tower, gpus

WIDTH, DEPTH, ROWS = 4096, 12, 4096


def step_seconds(rank, num_ranks, prefetch_bytes):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    with device:
        model = Tower(WIDTH, DEPTH).bfloat16()
    model = onefold.shard(
        model, onefold.ZERO_3, precision=onefold.Precision(params="bf16"), prefetch_bytes=prefetch_bytes
    )
    optimizer = onefold.AdamW(model, lr=1e-4)
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(x).float().square().mean().backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad()
    return statistics.median(times[4:])


@gpus(2)
def test_gathers_overlap_computation(ranks):
    serial = max(ranks(2).run(step_seconds, 0, timeout_s=120))
    overlapped = max(ranks(2).run(step_seconds, None, timeout_s=120))
    print(f"forward and backward: {serial * 1e3:.1f} ms without prefetch, {overlapped * 1e3:.1f} ms with")
    assert overlapped < 0.95 * serial
