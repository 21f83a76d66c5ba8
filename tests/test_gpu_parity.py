"""Promise: on GPUs every plan trains as ZERO_0 does - bit for bit on one rank, to NCCL's rounding on several."""

import pytest
import torch

import onefold
from gpu_models import gpus, on_gpu, train

PLANS = [onefold.ZERO_1, onefold.ZERO_2, onefold.ZERO_3]
PRECISIONS = {
    "fp32": onefold.Precision(),
    "bf16": onefold.Precision(params="bf16"),
    "bf16-fp32-master": onefold.Precision(params="bf16", master="fp32"),
    "fp16": onefold.Precision(params="fp16", loss_scale="dynamic"),
}


@gpus(1)
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_one_gpu_gives_the_same_bits_under_every_plan(precision):
    expected, norms, matches = on_gpu(0, 1, onefold.ZERO_0, precision)
    assert matches
    for plan in PLANS:
        weights, same_norms, matches = on_gpu(0, 1, plan, precision)
        assert matches
        assert norms == same_norms
        assert all(torch.equal(got, want) for got, want in zip(weights, expected, strict=True))


@gpus(1)
def test_one_gpu_agrees_with_cpu_in_fp32():
    weights, _, _ = on_gpu(0, 1, onefold.ZERO_3, onefold.Precision())
    expected, _, _ = train(0, 1, onefold.ZERO_3, onefold.Precision(), torch.device("cpu"))
    for got, want in zip(weights, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@gpus(2)
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_two_gpus_agree_under_every_plan(ranks, precision):
    expected = ranks(2).run(on_gpu, onefold.ZERO_0, precision, timeout_s=120)
    for plan in PLANS:
        for (weights, _, matches), (wanted, _, _) in zip(
            ranks(2).run(on_gpu, plan, precision, timeout_s=120), expected, strict=True
        ):
            assert matches
            for got, want in zip(weights, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
