"""Owns how kernels are held to the arithmetic of rules: runs of every form, and the path that update.py walks.

That path is load, widen, multiply, `rule.update`, store, with square roots that are rounded correctly: torch's on x86
CPUs are not (decision 0006).
"""

import platform

import torch
from torch.overrides import TorchFunctionMode

from onefold.memory.buffer import CopyMaster, OwnMaster, SplitMaster
from onefold.optim import rules
from onefold.optim.kernels.host import LEVELS, NativeKernel, Run, Step, TorchKernel, find_library, levels, load_library
from onefold.plan.precision import join, split

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMS = {"own": FP32, "split": BF16, "copy of bf16": BF16, "copy of fp16": FP16}
GRADS = (FP32, BF16, FP16)
SIZES = (0, 1, 7, 63, 1023, 4097)
STARTS = (0, 1, 3)
NUM_STEPS = 3
FACTORS = (1 / 1000, 0.7310586)  # neither a power of two: then the order of multiplications shows
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


def same_numbers(a, b):
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
        assert same_numbers(grad, kept), "the gradient was written to"
    for name, value in expected.values().items():
        assert same_numbers(found.values()[name], value), f"{name}, {kernel.name}, {numel} elements from {start}"
    for name, buffer in found.buffers.items():
        for outside in (slice(0, start), slice(start + numel, None)):
            assert torch.equal(buffer[outside], before[name][outside]), f"{name} was written to outside of the run"
    assert not torch.equal(found.buffers["weight"], before["weight"]) or numel < 10


def run_matrix(kernel, rule, form, grad_dtype, numel):
    grads = [draw(numel + 5, seed, grad_dtype) for seed in range(1, NUM_STEPS + 1)]
    for start in STARTS:
        assert_equals_the_rule(kernel, rule, form, [grad[start : start + numel] for grad in grads], start)


def run_matrix_where_torch_does_not_fuse():
    """Called in a process of its own: torch decides how it computes when it starts."""
    assert not TORCH_FUSES
    for kernel in kernels():
        for rule in RULES:
            for form in FORMS:
                run_matrix(kernel, rule, form, BF16, 63)
    print(*(kernel.name for kernel in kernels()))
