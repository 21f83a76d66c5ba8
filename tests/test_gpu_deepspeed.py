"""Promise: DeepSpeed's engine takes models from the host to the GPU and trains there as on the CPU, at every stage; so
do models made in parts."""

import os
from unittest import mock

import pytest
import torch

import deepspeed_models
import onefold.deepspeed as deepspeed
from checks import equal
from deepspeed_loops import CPU, STEPS, TWO, WARM, Net, Run, settings
from deepspeed_steps import engine_of
from gpu_models import gpus

CONFIGS = {
    **{f"zero{stage}": settings(stage, **TWO, **WARM) for stage in range(4)},
    "zero2-offload": settings(2, CPU),
    "zero3-offload": settings(3, CPU, gradient_clipping=0.05),
    "zero3-bf16": settings(3, bf16={"enabled": True}),
    "zero2-fp16": settings(2, fp16={"enabled": True, "initial_scale_power": 8}),
    "zero1-autocast": settings(1, torch_autocast={"enabled": True}),
}
BOUNDS = {"bf16": 5e-2, "fp16": 5e-3, "autocast": 5e-2}
"""Of 16-bit losses, beside the CPU's of the same configuration; fp32's is 1e-3."""


def losses(rank, num_ranks, config, device):
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, DS_ACCELERATOR=device):
        engine = engine_of(config, Net())
    assert engine.device.type == device
    run, found = Run(engine, rank, num_ranks), []
    for micro_step in range(STEPS * engine.gradient_accumulation_steps()):
        loss = engine(*(part.to(engine.device) for part in run.batch(micro_step)))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def agree(ranks, num_ranks, name):
    bound = next((bound for word, bound in BOUNDS.items() if word in name), 1e-3)
    want = ranks(num_ranks).run(losses, CONFIGS[name], "cpu", timeout_s=120)[0]
    got = ranks(num_ranks).run(losses, CONFIGS[name], "cuda", timeout_s=120)[0]
    assert got == pytest.approx(want, rel=bound, abs=bound)


@gpus(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_gpu_agrees_with_the_cpu(ranks, name):
    agree(ranks, 1, name)


@gpus(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_two_gpus_agree_with_two_cpus(ranks, name):
    agree(ranks, 2, name)


def make_in_parts(rank, num_ranks, device, remote_device):
    torch.cuda.set_device(rank)
    with torch.device(device):
        model = deepspeed_models.made(deepspeed_models.Net, 3, remote_device=remote_device)
    config = deepspeed_models.SETTINGS | {"zero_optimization": {"stage": 3}}
    assert {param.device.type for param in model.parameters()} == {device}
    before = deepspeed_models.values_of(model)
    engine = deepspeed.initialize(model=model, config=config)[0]
    after = deepspeed_models.values_of(engine.module)
    assert engine.device.type == "cuda"
    assert all(torch.equal(value.cuda(), after[name]) for name, value in before.items())
    loss = engine(torch.arange(10, device=engine.device).view(2, 5)).square().mean()
    engine.backward(loss)
    engine.step()
    return {name: value.cpu() for name, value in before.items()}


@gpus(2)
@pytest.mark.parametrize("remote_device", [None, "cpu"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_models_are_made_in_parts_for_gpus(ranks, device, remote_device):
    found = ranks(2).run(make_in_parts, device, remote_device, timeout_s=120)
    for values in found:
        assert equal(values, found[0])
        if device == "cpu":
            assert equal(values, dict(deepspeed_models.plain().named_parameters()))
