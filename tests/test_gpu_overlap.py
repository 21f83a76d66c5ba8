"""Promise: gathers run beside computation, and a step returns before updated weights have come from other ranks.
Compared with the same work without overlap, never with a clock alone.
"""

import statistics
import time

import pytest
import torch

import onefold
from gpu_models import Tower, gpus, late
from inside import insides

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


def waits(rank, num_ranks, gather):
    """Seconds until the computation's stream is through a step, and through the forward after it, where each gather of
    updated weights begins late."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    model = onefold.shard(Tower(256, 8).to(device), onefold.ZERO_2, gather=gather)
    optimizer = onefold.SGD(model, lr=1e-3)
    x = torch.randn(16, 256, device=device)
    late(insides(model).lanes.gather)
    for _ in range(3):  # the first ones compile
        model(x).square().mean().backward()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        optimizer.step()
        torch.cuda.current_stream().synchronize()
        stepped = time.perf_counter() - begun
        model(x)
        torch.cuda.current_stream().synchronize()
        seen = time.perf_counter() - begun
    return stepped, seen


@gpus(2)
@pytest.mark.parametrize("gather", ["collective", "copy"])
def test_a_step_does_not_wait_for_weights_of_other_ranks(ranks, gather):
    for stepped, seen in ranks(2).run(waits, gather, timeout_s=120):
        assert stepped < 0.5 * seen
