"""Promise: on GPUs `load_pretrained` and `export` are exact, wherever state rests."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import onefold
from gpu_models import Tower, gpus

PLANS = {
    "zero_0": onefold.ZERO_0,
    "zero_1": onefold.ZERO_1,
    "zero_3": onefold.ZERO_3,
    "offload": onefold.OFFLOAD,
    "offload_3": onefold.OFFLOAD_3,
}


def round_trip(rank, num_ranks, plan, device, directory):
    """Load, step by nothing, export; returns the weights that computation sees."""
    with torch.device(device):
        model = Tower(64, 3)
    model = onefold.shard(model, plan, precision=onefold.Precision(params="bf16"))
    model(torch.randn(4, 64, device=device)).float().square().mean().backward()
    onefold.load_pretrained(model, directory)
    optimizer = onefold.SGD(model, lr=0.0)
    optimizer.step()
    onefold.export(model, directory / "out", dtype="fp32")
    optimizer.zero_grad()
    model(torch.randn(4, 64, device=device))
    with onefold.gathered(model):
        return {name: param.detach().cpu().clone() for name, param in model.named_parameters()}


def on_gpu(rank, num_ranks, plan, directory):
    torch.cuda.set_device(rank)
    return round_trip(rank, num_ranks, plan, torch.device("cuda", rank), directory)


def check(results, directory, want):
    for seen in results:
        assert all(torch.allclose(seen[key].float(), want[key], rtol=0.01) for key in want)
    got = load_file(directory / "out" / "model.safetensors")
    assert all(torch.equal(got[key], want[key]) for key in want)


@gpus(1)
@pytest.mark.parametrize("name", list(PLANS))
def test_what_one_gpu_loads_is_what_it_exports(tmp_path, name):
    want = Tower(64, 3).state_dict()
    save_file(want, tmp_path / "model.safetensors")
    check([on_gpu(0, 1, PLANS[name], tmp_path)], tmp_path, want)


@gpus(2)
@pytest.mark.parametrize("name", list(PLANS))
def test_what_two_gpus_load_is_what_they_export(ranks, tmp_path, name):
    want = Tower(64, 3).state_dict()
    save_file(want, tmp_path / "model.safetensors")
    check(ranks(2).run(on_gpu, PLANS[name], tmp_path, timeout_s=120), tmp_path, want)
