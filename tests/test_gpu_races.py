"""Promise: nothing is read before it is written. Slow producers, dirtied memory and side streams change no bits."""

import gc

import pytest
import torch

import onefold
from gpu_models import Tower, gpus, late
from inside import insides, units_of

STEPS = 20


def poison(device):
    """Fill recycled blocks of the allocator with NaN, so that a block given out too early is seen."""
    junk = [torch.full((numel,), float("nan"), device=device) for numel in (1 << 10, 1 << 16, 1 << 20)]
    del junk


def slow(module, args, output):
    """The GPU idles before what follows this module, and before its backward."""
    torch.cuda._sleep(1_000_000)
    output.register_hook(lambda grad: torch.cuda._sleep(1_000_000))


def weights_after(rank, num_ranks, plan, precision, prefetch_bytes, disturbed):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    model = Tower(128, 4).to(device)
    if disturbed:
        for module in model.modules():
            module.register_forward_hook(slow)
    model = onefold.shard(model, plan, precision=precision, prefetch_bytes=prefetch_bytes)
    optimizer = onefold.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    side = torch.cuda.Stream()
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(16, 128, generator=generator).to(device)
        stream = side if disturbed and step % 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if disturbed:
                poison(device)
        torch.cuda.current_stream().wait_stream(stream)
    with onefold.gathered(model):
        return [param.detach().float().cpu() for param in model.parameters()]


def gone_in_mid_step(plan):
    """Trains, drops everything while lanes are late, and returns what became of memory taken after that."""
    model = onefold.shard(Tower(256, 4).cuda(), plan, precision=onefold.Precision(params="bf16"))
    optimizer = onefold.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    x = torch.randn(16, 256, device="cuda")
    lanes = units_of(model)[0]._lanes
    for lane in (lanes.up, lanes.gather, lanes.reduce):
        late(lane)
    for step in range(3):
        model(x).float().square().mean().backward()
        if step < 2 or plan.optim.farthest == onefold.Tier.HOST:
            optimizer.step()
            optimizer.zero_grad()
    waiting = insides(model).runtime
    waiting.finish_updates()  # on the host; their copies to the device are late
    del model, optimizer, lanes, lane, waiting
    gc.collect()
    sizes = [1 << 10, 1 << 16, 1 << 18, 1 << 20]
    taken = [torch.full((numel,), 7.0, device="cuda") for numel in sizes for _ in range(9)]
    torch.cuda.synchronize()
    return taken


@gpus(1)
@pytest.mark.parametrize("plan", [onefold.ZERO_2, onefold.ZERO_3, onefold.OFFLOAD, onefold.OFFLOAD_3], ids=str)
def test_a_model_that_goes_in_mid_step_leaves_memory_alone(plan):
    for _ in range(5):
        assert all(bool((tensor == 7).all()) for tensor in gone_in_mid_step(plan))


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("plan", [onefold.ZERO_2, onefold.ZERO_3], ids=["zero_2", "zero_3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
class TestRaces:
    @gpus(1)
    def test_one_gpu(self, plan, precision):
        precision = onefold.Precision(params=precision)
        calm = weights_after(0, 1, plan, precision, 0, disturbed=False)
        assert equal(weights_after(0, 1, plan, precision, None, disturbed=True), calm)

    @gpus(2)
    def test_two_gpus(self, ranks, plan, precision):
        precision = onefold.Precision(params=precision)
        calm = ranks(2).run(weights_after, plan, precision, 0, False, timeout_s=120)
        disturbed = ranks(2).run(weights_after, plan, precision, None, True, timeout_s=120)
        for got, want in zip(disturbed, calm, strict=True):
            assert equal(got, want)
