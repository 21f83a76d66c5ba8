"""Promise: the host kernels do a rule's arithmetic bit for bit, in every form of weights and format of gradients, with
any number of threads and at any alignment; and they see every infinite or NaN number.

What they are held to is the path that update.py walks on any device: load, widen, multiply, `rule.update`, store. One
operation in it is not what IEEE 754 says: torch.sqrt on x86 CPUs is MKL's, which is one unit off in the last place for
about one number in six (decision 0006). The kernels round roots correctly, so the rule is run with correct roots too.
"""

import math
import os
import platform
import subprocess
import sys

import pytest
import torch

from host_kernels import (
    BF16,
    FORMS,
    FP16,
    FP32,
    GRADS,
    NUM_STEPS,
    RULES,
    SIZES,
    Shard,
    assert_equals_the_rule,
    draw,
    every_kernel,
    kernels,
    library,
    run_matrix,
    same_numbers,
)
from onefold.optim import rules
from onefold.optim.kernels.host import (
    NativeKernel,
    Run,
    Step,
    TorchKernel,
)
from onefold.plan.precision import join, split
from pairs import pairwise

TILES = 3 * 2**15 + 17  # spans four tiles, the last one short


@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equals_the_rule_bit_for_bit(rule, form, grad_dtype):
    for kernel in kernels():
        for numel in SIZES:
            run_matrix(kernel, rule, form, grad_dtype, numel)


@pytest.mark.skipif(platform.machine() == "aarch64", reason="every ARM processor fuses")
def test_the_base_level_equals_torch_without_fused_operations():
    command = [sys.executable, "-c", "import host_kernels; host_kernels.run_matrix_where_torch_does_not_fuse()"]
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["torch", "native", "(base)"], result.stderr


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_torchs_own_roots_change_no_more_than_the_last_places(rule):
    expected, found = Shard(rule, "split", 1023), Shard(rule, "split", 1023)
    for number in range(1, NUM_STEPS + 1):
        expected.step_as_update_does(draw(1023, number, BF16), number)
        found.step(kernels()[-1], draw(1023, number, BF16), number)
    for name, value in expected.values().items():
        rtol = 2**-8 if value.dtype == BF16 else 1e-6  # a bf16 weight may round the other way
        torch.testing.assert_close(found.values()[name], value, rtol=rtol, atol=1e-8)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_levels_agree_to_rounding(rule):
    shards = [(Shard(rule, "split", 1023), kernel) for kernel in every_kernel()]
    for shard, kernel in shards:
        for number in range(1, NUM_STEPS + 1):
            shard.step(kernel, draw(1023, number, BF16), number)
        expected = shards[0][0].values()["exact"]
        torch.testing.assert_close(shard.values()["exact"], expected, rtol=1e-5, atol=1e-6)


@pairwise(rule=RULES, form=list(FORMS), grad_dtype=GRADS)
def test_gradients_that_are_infinite_or_nan_do_what_the_rule_does(rule, form, grad_dtype):
    strange = torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 1e-38, 1.0, 3e38], dtype=FP32)
    grads = [strange.repeat(9).to(grad_dtype), draw(81, 1, grad_dtype)]
    for kernel in kernels():
        assert_equals_the_rule(kernel, rule, form, grads)


def patterns(*lows):
    """fp32 of every upper half with each of the lower halves, NaNs too."""
    bits = torch.cat([(torch.arange(2**16) << 16) | low for low in lows])
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(FP32)


ROUNDING = patterns(0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


@pytest.mark.parametrize("form", FORMS)
def test_every_weight_is_kept_and_rounded_as_torch_does(form):
    still = rules.SGD(lr=0.0)
    for kernel in kernels():
        shard = Shard(still, form, ROUNDING.numel(), weights=ROUNDING)
        before = {name: part.clone() for name, part in shard.values().items()}
        shard.step(kernel, torch.zeros(ROUNDING.numel()), 1)
        for name, part in shard.values().items():
            numbers = ~part.isnan()
            assert same_numbers(part, before[name]), name
            assert torch.equal(part[numbers].signbit(), before[name][numbers].signbit()), name


def test_a_split_weight_is_what_split_gives():
    finite = ROUNDING[ROUNDING.isfinite()]
    weight, low = split(finite)
    for kernel in kernels():
        shard = Shard(rules.SGD(lr=0.0), "split", finite.numel(), weights=finite)
        shard.step(kernel, torch.zeros(finite.numel()), 1)
        assert torch.equal(shard.parts()["weight"], weight)
        assert torch.equal(shard.parts()["exact"], low)


def test_a_zero_written_over_any_split_weight_stays_zero():
    rule = rules.SGD(lr=0.0)
    for kernel in every_kernel():
        weight, low = torch.zeros(2**16, dtype=BF16), torch.arange(2**16).to(torch.int16)
        weight[::2].neg_()
        wanted = split(join(weight, low))
        run = Run(weight=weight, exact=low, grad=torch.zeros(2**16), state={})
        kernel.update(run, Step(rule=rule, hyper=rule.defaults(), number=1))
        assert torch.equal(weight, torch.zeros_like(weight)), kernel.name
        assert torch.equal(low, wanted[1]), kernel.name


def test_a_split_nan_stays_one_whatever_its_low_bits():
    rule = rules.SGD(lr=0.0)
    for kernel in every_kernel():
        weight, low = torch.full((2**16,), math.nan, dtype=BF16), torch.arange(2**16).to(torch.int16)
        for number in (1, 2):
            run = Run(weight=weight, exact=low, grad=torch.zeros(2**16), state={})
            kernel.update(run, Step(rule=rule, hyper=rule.defaults(), number=number))
            assert weight.isnan().all()
            assert join(weight, low).isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_16_bit_gradient_is_widened_exactly(dtype):
    grads = torch.arange(2**16).to(torch.int16).view(dtype)
    for kernel in kernels():
        shard = Shard(rules.SGD(lr=1.0, maximize=True), "own", grads.numel(), weights=torch.zeros(grads.numel()))
        shard.step(kernel, grads, 1, factors=())
        assert same_numbers(shard.parts()["weight"], grads.float())


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_threads_change_no_bit(rule):
    shards = {threads: Shard(rule, "split", TILES, start=1) for threads in (1, 2, 3)}
    for threads, shard in shards.items():
        kernel = NativeKernel(library(), num_threads=threads)
        for number in (1, 2):
            shard.step(kernel, draw(TILES, number, BF16), number)
    for name, part in shards[1].parts().items():
        assert all(torch.equal(part, shards[threads].parts()[name]) for threads in (2, 3)), name


@pytest.mark.parametrize("dtype", GRADS, ids=str)
@pytest.mark.parametrize("numel", [0, *SIZES, TILES])
def test_sums_of_squares_are_right_and_the_same_on_every_level_and_thread(dtype, numel):
    values = draw(numel + 1, 3, dtype)[1:]
    expected = float(values.double().square().sum())
    native = {kernel for threads in (1, 2, 3) for kernel in every_kernel(threads)[1:]}
    sums = {kernel.sum_of_squares(values) for kernel in native}
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(expected, rel=1e-12)
    assert TorchKernel().sum_of_squares(values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "values",
    [ROUNDING, *(torch.arange(2**16).to(torch.int16).view(dtype) for dtype in (BF16, FP16))],
    ids=["fp32", "bf16", "fp16"],
)
def test_every_infinite_or_nan_pattern_is_counted(values):
    for kernel in every_kernel():
        assert kernel.count_nonfinite(values) == int((~values.isfinite()).sum()) > 0
        assert kernel.count_nonfinite(values[values.isfinite()]) == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("dtype", GRADS, ids=str)
@pytest.mark.parametrize("place", [0, 1, 63, 2**15 - 1, 2**15, TILES - 1])
def test_one_bad_number_is_found_wherever_it_is(place, dtype, bad):
    values = torch.zeros(TILES, dtype=dtype)
    values[place] = bad
    for kernel in every_kernel():
        assert kernel.count_nonfinite(values) == 1
        assert not math.isfinite(kernel.sum_of_squares(values))
