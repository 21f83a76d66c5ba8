"""Promise: the fused update does a rule's arithmetic in every form of weights and format of gradients, at any
alignment, and wherever an element lies in a run its bits are the same.

What it is held to is the path that update.py walks on any device: load, widen, multiply, `rule.update`, store - on a
CPU, whose roundings test_native.py knows. These tests run on a GPU, or on a CPU in Triton's interpreter:
`TRITON_INTERPRET=1 python -m pytest -m gpu tests/test_gpu_fused.py`. The interpreter multiplies and adds with two
roundings and cuts bf16 off: it is lent a fused multiply-add and torch's rounding.
"""

import importlib
import importlib.util
import itertools
import logging
import subprocess
import sys

import pytest
import torch

import onefold
from gpu_models import train
from host_kernels import BF16, FORMS, FP32, GRADS, RULES, TORCH_FUSES, CorrectRoots, Shard, draw, same_numbers
from onefold.comm.reductions import mean_of_rows
from onefold.errors import OptimizerError
from onefold.optim import rules
from onefold.optim.kernels import fused
from onefold.optim.kernels.host import Run, Step
from onefold.plan.precision import join

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where it interprets

HAS_TRITON = importlib.util.find_spec("triton") is not None
SIZES = (1, 7, 1023, 1024, 2065)  # a block has 1024 elements
STARTS = (1, 4)
NUM_STEPS = 3
COPIES = [form for form in FORMS if form.startswith("copy")]
ULP = 2.0**-23


def fma(builder, x, y, z):
    """As exact as a fused operation, but for the rarest double roundings."""
    import numpy

    wide = x.data.astype(numpy.longdouble) * y.data + z.data
    return type(z)(wide.astype(z.data.dtype), z.dtype.scalar)


def round_off(builder, values, dtype):
    dtypes = {"bf16": BF16, "fp16": torch.float16}
    rounded = torch.from_numpy(values.data).to(dtypes[dtype.scalar.name])
    bits = rounded if rounded.dtype == torch.float16 else rounded.view(torch.uint16)
    return type(values)(bits.numpy(), dtype.scalar)


@pytest.fixture
def device(monkeypatch):
    """A GPU, or the CPU where Triton interprets."""
    if torch.cuda.is_available() and HAS_TRITON:
        return torch.device("cuda", torch.cuda.current_device())
    if not HAS_TRITON:
        pytest.skip("needs triton, which is not installed")
    from triton import knobs
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_trunc", round_off)
    return torch.device("cpu")


@pytest.fixture
def kernel(device):
    return fused.FusedKernel(device.type)


class Here(Shard):
    """The shard of test_native.py, on a device."""

    def __init__(self, device, *arguments):
        super().__init__(*arguments)
        self.buffers = {name: buffer.to(device) for name, buffer in self.buffers.items()}
        self.device = device

    def step(self, kernel, grad, number, **words):
        here = torch.cat([torch.zeros(self.part.start, dtype=grad.dtype), grad]).to(self.device)[self.part.start :]
        super().step(kernel, here, number, **words)
        assert same_numbers(here.cpu(), grad), "the gradient was written to"

    def values(self):
        return {name: value.cpu() for name, value in super().values().items()}


def both(device, kernel, rule, form, grads, start=0, write=None):
    """The shard as update.py makes it with torch's operations on a CPU, and as the kernel does."""
    expected, found = (Here(where, rule, form, grads[0].numel(), start) for where in (torch.device("cpu"), device))
    before = {name: buffer.clone() for name, buffer in found.buffers.items()}
    for number, grad in enumerate(grads, start=1):
        if write is not None:
            write(expected, number)
            write(found, number)
        with CorrectRoots():
            expected.step_as_update_does(grad, number)
        found.step(kernel, grad, number)
    for name, buffer in found.buffers.items():
        for outside in (slice(0, start), slice(found.part.stop, None)):
            assert torch.equal(buffer[outside], before[name][outside]), f"{name} was written to outside of the run"
    return expected, found


def assert_close(expected, found, what):
    """To a few units in the last place of fp32; a 16-bit weight may then round the other way."""
    for name, want in expected.values().items():
        rtol = max(torch.finfo(want.dtype).eps, 4 * ULP)
        # Where an update nearly cancels a weight, what is left has the error of what was there.
        got, atol = found.values()[name], 4 * ULP * float(want.abs().max())
        assert torch.allclose(got, want, rtol=rtol, atol=atol), f"{name}, {what}"


def assert_same(expected, found, what):
    for name, want in expected.values().items():
        assert same_numbers(found.values()[name], want), f"{name}, {what}"


@pytest.mark.gpu
@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equals_the_rule_to_rounding(device, kernel, rule, form, grad_dtype):
    starts = STARTS if grad_dtype == BF16 else ()  # each alignment is compiled for itself
    for numel, start in [*((numel, 0) for numel in SIZES), *((2065, start) for start in starts)]:
        grads = [draw(numel, seed, grad_dtype) for seed in range(1, NUM_STEPS + 1)]
        shards = both(device, kernel, rule, form, grads, start)
        assert_close(*shards, f"{numel} elements from {start}")


@pytest.mark.gpu
@pytest.mark.skipif(not TORCH_FUSES, reason="torch on this CPU rounds after each multiplication")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_has_the_bits_of_the_rule_on_a_cpu(device, kernel, rule, form):
    grads = [draw(2065, seed, BF16) for seed in range(1, NUM_STEPS + 1)]
    assert_same(*both(device, kernel, rule, form, grads, 1), kernel.name)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_that_are_infinite_or_nan_do_what_the_rule_does(device, kernel, rule, form):
    strange = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-38, 1.0, 3e38])
    expected, found = both(device, kernel, rule, form, [strange.repeat(9), draw(72, 1)])
    for name, want in expected.values().items():
        got = found.values()[name]
        assert torch.equal(got.isnan(), want.isnan()), name
        assert torch.equal(got.isinf(), want.isinf()), name


@pytest.mark.gpu
@pytest.mark.parametrize("form", COPIES)
def test_a_weight_that_the_user_wrote_wins_over_its_copy(device, kernel, form):
    def write(shard, number):
        shard.parts()["weight"][number::7] = 0.25 * number

    rule, grads = rules.AdamW(lr=0.01, weight_decay=0.1), [draw(1500, seed, BF16) for seed in range(1, NUM_STEPS + 1)]
    written, found = both(device, kernel, rule, form, grads, write=write)
    assert_close(written, found, "written weights")
    unwritten, _ = both(device, kernel, rule, form, grads)
    assert (found.values()["exact"] != unwritten.values()["exact"]).sum() > 600


@pytest.mark.gpu
def test_low_bits_and_weight_are_what_split_gives(device, kernel):
    shard = Here(device, rules.SGD(lr=0.0), "split", 4096)
    before = {name: part.cpu() for name, part in shard.parts().items()}
    for number in (1, 2):
        shard.step(kernel, torch.zeros(4096), number)
    after = {name: part.cpu() for name, part in shard.parts().items()}
    assert torch.equal(join(after["weight"], after["exact"]), join(before["weight"], before["exact"]))
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.gpu
def test_a_zero_written_over_any_split_weight_stays_zero(device, kernel):
    weight, low = torch.zeros(2**16, dtype=BF16), torch.arange(2**16).to(torch.int16)
    weight[::2].neg_()
    weight, low = weight.to(device), low.to(device)
    rule = rules.SGD(lr=0.0)
    run = Run(weight=weight, exact=low, grad=torch.zeros(2**16, device=device), state={})
    kernel.update(run, Step(rule=rule, hyper=rule.defaults(), number=1))
    assert torch.equal(weight, torch.zeros_like(weight))


@pytest.mark.gpu
def test_a_nan_stays_one(device, kernel):
    weight, low = torch.full((2**16,), float("nan"), dtype=BF16), torch.arange(2**16).to(torch.int16)
    weight, low = weight.to(device), low.to(device)  # a low half of ones would carry past the NaNs
    state = {name: torch.zeros(2**16, device=device) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    state["max_exp_avg_sq"].fill_(float("nan"))
    rule = rules.Adam(amsgrad=True)
    for number in (1, 2):
        run = Run(weight=weight, exact=low, grad=torch.zeros(2**16, device=device), state=state)
        kernel.update(run, Step(rule=rule, hyper=rule.defaults(), number=number))
        assert weight.isnan().all()
        assert join(weight, low).isnan().all()
        assert state["max_exp_avg_sq"].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_how_a_shard_is_cut_into_runs_changes_no_bit(device, kernel, rule, form):
    numel, cuts = 3000, (0, 1, 8, 1031, 1032, 2500, 3000)
    whole, cut = (Here(device, rule, form, numel) for _ in range(2))
    for number in (1, 2):
        grad = draw(numel, number, BF16).to(device)
        step = Step(rule=rule, hyper=rule.defaults(), number=number, factors=(0.3,))
        for shard, edges in ((whole, (0, numel)), (cut, cuts)):
            parts = shard.parts()
            for start, stop in itertools.pairwise(edges):
                run = {name: part[start:stop] for name, part in parts.items()}
                weight, exact = run.pop("weight"), run.pop("exact", None)
                kernel.update(Run(weight=weight, exact=exact, grad=grad[start:stop], state=run), step)
    assert all(same_numbers(cut.values()[name], value) for name, value in whole.values().items())


def run_on(device, **changes):
    tensors = {"weight": torch.ones(4, dtype=FP32), "grad": torch.ones(4)}
    tensors = {name: tensor.to(device) for name, tensor in {**tensors, **changes}.items()}
    return Run(exact=None, state={}, **tensors)


@pytest.mark.gpu
def test_what_does_not_fit_is_refused_by_name(device, kernel):
    rule, adam = rules.SGD(), rules.Adam()
    for run, refused, factors, said in (
        (run_on(device, grad=torch.ones(5)), rule, (), "grad: expected .* 4 elements"),
        (run_on(device, weight=torch.ones(4).double()), rule, (), "weight: expected .* float32; got .* float64"),
        (run_on("meta"), rule, (), "weight: expected .* on meta"),
        (run_on(device), adam, (), "adam needs the state tensor 'exp_avg'"),
        (run_on(device), rule, (0.5, 0.5, 0.5), "3 factors"),
    ):
        with pytest.raises(OptimizerError, match=said):
            kernel.update(run, Step(rule=refused, hyper=refused.defaults(), number=1, factors=factors))
    assert kernel.supports("sgd", FP32)
    assert not kernel.supports("sgd", torch.float64)
    assert not kernel.supports("my own", FP32)


@pytest.mark.gpu
def test_autograd_notices_an_update_and_an_empty_run_is_one(device, kernel):
    rule = rules.SGD()
    for numel in (4, 0):
        weight = torch.ones(numel, device=device)
        product = (weight * torch.ones(numel, device=device, requires_grad=True)).sum()
        run = Run(weight=weight, exact=None, grad=torch.ones(numel, device=device), state={})
        kernel.update(run, Step(rule=rule, hyper=rule.defaults(), number=1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


PRECISIONS = {
    "fp32": (onefold.Precision(), 1e-3),
    "bf16": (onefold.Precision(params="bf16"), 2**-7),
    "bf16-fp32-master": (onefold.Precision(params="bf16", master="fp32"), 2**-7),
    "fp16": (onefold.Precision(params="fp16", loss_scale="dynamic"), 2**-7),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "rounding"), PRECISIONS.values(), ids=PRECISIONS)
def test_plans_on_a_device_train_by_it_as_by_the_rule(monkeypatch, device, kernel, precision, rounding):
    optimizer = importlib.import_module("onefold.optim.optimizer")
    calls, update = [], kernel.update
    monkeypatch.setattr(kernel, "update", lambda run, step: (calls.append(run.weight.numel()), update(run, step)))
    monkeypatch.setattr(optimizer, "fused_kernel", lambda where: kernel if where.type == device.type else None)
    weights, _, matches = train(0, 1, onefold.ZERO_3, precision, device)
    assert matches
    assert len(calls) >= 5
    monkeypatch.setattr(optimizer, "fused_kernel", lambda where: None)
    for got, want in zip(weights, train(0, 1, onefold.ZERO_3, precision, device)[0], strict=True):
        torch.testing.assert_close(got, want, rtol=rounding, atol=rounding / 10)


@pytest.fixture
def chosen_anew():
    fused._kernel.cache_clear()
    yield
    fused._kernel.cache_clear()


class Failing:
    def __init__(self):
        raise RuntimeError("no C compiler")


@pytest.mark.parametrize(
    ("found", "said"),
    [(None, "Triton is not installed"), (object(), "RuntimeError: no C compiler")],
    ids=["not installed", "not working"],
)
def test_without_triton_torch_updates_and_the_log_says_so_once(monkeypatch, caplog, chosen_anew, found, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(fused, "FusedKernel", Failing)
    with caplog.at_level(logging.WARNING, logger="onefold"):
        assert [fused.fused_kernel(torch.device("cuda")) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert f"no fused kernel ({said})" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() and HAS_TRITON), reason="needs a GPU and triton")
def test_a_gpu_has_one_fused_kernel(chosen_anew):
    device = torch.device("cuda", torch.cuda.current_device())
    assert isinstance(fused.fused_kernel(device), fused.FusedKernel)
    assert fused.fused_kernel(device) is fused.fused_kernel(device)


def test_a_cpu_has_no_fused_kernel_and_no_word_is_said(caplog):
    assert fused.fused_kernel(torch.device("cpu")) is None
    assert caplog.records == []


def test_importing_onefold_imports_no_device_code():
    check = "import sys, onefold; print([name for name in sys.modules if name.endswith('triton_kernels')])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
def test_a_mean_of_rows_has_the_bits_of_torchs_operations(device, kernel, dtype, num_rows):
    for numel in (1, 2047, 2048, 5000):
        rows = torch.randn(num_rows, numel + 24, device=device).to(dtype)[:, :numel]
        got, want = (torch.empty(numel, dtype=dtype, device=device) for _ in range(2))
        kernel.mean(got, rows)
        mean_of_rows(want, rows)
        assert torch.equal(got, want)
