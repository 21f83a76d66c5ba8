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
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from onefold.memory.buffer import CopyMaster, OwnMaster, SplitMaster
from onefold.optim import rules
from onefold.optim.kernels.host import (
    LEVELS,
    NativeKernel,
    Run,
    Step,
    TorchKernel,
    find_library,
    levels,
    load_library,
)
from onefold.plan.precision import join, split

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMS = {"own": FP32, "split": BF16, "copy of bf16": BF16, "copy of fp16": FP16}
GRADS = (FP32, BF16, FP16)
SIZES = (0, 1, 7, 63, 1023, 4097)
STARTS = (0, 1, 3)
NUM_STEPS = 3
FACTORS = (1 / 1000, 0.7310586)  # neither a power of two: then the order of multiplications shows
TILES = 3 * 2**15 + 17  # spans four tiles, the last one short
RULES = [
    rules.AdamW(lr=0.01, weight_decay=0.1),
    rules.AdamW(weight_decay=0.0, betas=(0.9, 0.95), eps=1e-6),
    rules.AdamW(lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True),
    rules.Adam(),
    rules.Adam(lr=0.01, weight_decay=0.1, betas=(0.3, 0.5), amsgrad=True),
    rules.SGD(lr=0.1),
    rules.SGD(lr=0.1, weight_decay=0.01, maximize=True),
    rules.SGD(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    rules.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    rules.Lion(lr=0.01, weight_decay=0.1),
    rules.Adagrad(lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5),
    rules.Adagrad(maximize=True),
]


class CorrectRoots(TorchFunctionMode):
    """Square roots by way of fp64, which leaves them correctly rounded in fp32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in (torch.sqrt, torch.Tensor.sqrt):
            return func(*args, **kwargs)
        root = args[0].double().sqrt().to(args[0].dtype)
        return kwargs["out"].copy_(root) if "out" in kwargs else root


def fuses(level):
    """Whether a level multiplies and adds with one rounding, as torch does wherever its own kernels can."""
    return level != "base" or platform.machine() == "aarch64"


TORCH_FUSES = torch.backends.cpu.get_cpu_capability() != "DEFAULT" or platform.machine() == "aarch64"


def library():
    path = find_library()
    assert path is not None, "these tests are about the compiled kernels: install the package (make env)"
    return load_library(path)


def every_kernel(num_threads=2):
    native = library()
    return [TorchKernel(), *(NativeKernel(native, num_threads=num_threads, level=level) for level in levels(native))]


def kernels():
    """Every kernel that must equal torch as it runs here."""
    exact = [f"native ({level})" for level in LEVELS if fuses(level) == TORCH_FUSES]
    found = [kernel for kernel in every_kernel(num_threads=1) if kernel.name in ("torch", *exact)]
    assert len(found) > 1
    return found


def draw(numel, seed, dtype=FP32):
    """Magnitudes over four orders and some exact zeros."""
    generator = torch.Generator().manual_seed(1000 * numel + seed)
    values = torch.randn(numel, generator=generator) * 10 ** (4 * torch.rand(numel, generator=generator) - 3)
    values[4::5] = 0
    return values.to(dtype)


class Shard:
    """A run inside longer buffers, so that it starts anywhere and its neighbours can be watched."""

    def __init__(self, rule, form, numel, start=0, weights=None):
        self.part = slice(start, start + numel)
        self.rule, self.form = rule, form
        whole = numel + start + 5
        exact = draw(whole, 0)
        if weights is not None:
            exact[self.part] = weights
        weight = exact.to(FORMS[form])
        self.buffers = {"weight": weight}
        if form == "split":
            self.buffers["weight"], self.buffers["exact"] = split(exact)
        elif form != "own":
            self.buffers["exact"] = exact.clone()
        for name in rule.state_names(rule.defaults()):
            self.buffers[name] = torch.full((whole,), 7.0)
            rule.init_state(name, self.buffers[name][self.part], rule.defaults())

    def parts(self):
        return {name: buffer[self.part] for name, buffer in self.buffers.items()}

    def state(self):
        return {name: part for name, part in self.parts().items() if name not in ("weight", "exact")}

    def step(self, kernel, grad, number, factors=FACTORS):
        parts = self.parts()
        run = Run(weight=parts["weight"], exact=parts.get("exact"), grad=grad, state=self.state())
        kernel.update(run, Step(rule=self.rule, hyper=self.rule.defaults(), number=number, factors=factors))

    @torch.no_grad()
    def step_as_update_does(self, grad, number, factors=FACTORS):
        parts = self.parts()
        kind = {"own": OwnMaster, "split": SplitMaster}.get(self.form, CopyMaster)
        master = kind(*(parts[name] for name in ("weight", "exact") if name in parts))
        exact, wide = master.load(), grad.to(FP32, copy=True)
        for factor in factors:
            wide.mul_(factor)
        self.rule.update(exact, wide, self.state(), self.rule.defaults(), number)
        master.store(exact)

    def values(self):
        """Everything as numbers that can be compared: the exact weight instead of its low bits."""
        parts = self.parts()
        if self.form == "split":
            parts["exact"] = join(parts["weight"], parts["exact"])
        return parts


def same(a, b):
    """Equal but for the payloads of NaNs."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])


def assert_equals_the_rule(kernel, rule, form, grads, start=0, weights=None):
    numel = grads[0].numel()
    expected, found = (Shard(rule, form, numel, start, weights) for _ in range(2))
    before = {name: buffer.clone() for name, buffer in found.buffers.items()}
    for number, grad in enumerate(grads, start=1):
        kept = grad.clone()
        with CorrectRoots():
            expected.step_as_update_does(grad, number)
            found.step(kernel, grad, number)
        assert same(grad, kept), "the gradient was written to"
    for name, value in expected.values().items():
        assert same(found.values()[name], value), f"{name}, {kernel.name}, {numel} elements from {start}"
    for name, buffer in found.buffers.items():
        for outside in (slice(0, start), slice(start + numel, None)):
            assert torch.equal(buffer[outside], before[name][outside]), f"{name} was written to outside of the run"
    assert not torch.equal(found.buffers["weight"], before["weight"]) or numel < 10


def run_matrix(kernel, rule, form, grad_dtype, numel):
    grads = [draw(numel + 5, seed, grad_dtype) for seed in range(1, NUM_STEPS + 1)]
    for start in STARTS:
        assert_equals_the_rule(kernel, rule, form, [grad[start : start + numel] for grad in grads], start)


@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equals_the_rule_bit_for_bit(rule, form, grad_dtype):
    for kernel in kernels():
        for numel in SIZES:
            run_matrix(kernel, rule, form, grad_dtype, numel)


def run_matrix_where_torch_does_not_fuse():
    """Called in a process of its own: torch decides how it computes when it starts."""
    assert not TORCH_FUSES
    for kernel in kernels():
        for rule in RULES:
            for form in FORMS:
                run_matrix(kernel, rule, form, BF16, 63)
    print(*(kernel.name for kernel in kernels()))


@pytest.mark.skipif(platform.machine() == "aarch64", reason="every ARM processor fuses")
def test_the_base_level_equals_torch_without_fused_operations():
    here = Path(__file__)
    command = [sys.executable, "-c", f"import {here.stem} as t; t.run_matrix_where_torch_does_not_fuse()"]
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path])}
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


@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES, ids=str)
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
            assert same(part, before[name]), name
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
        assert same(shard.parts()["weight"], grads.float())


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
