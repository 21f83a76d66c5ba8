"""Promise: what a host kernel cannot do, it refuses by name; what it changes, torch notices.

Pointers carry no types: a wrong tensor that got through would be read as something else, or past its end.
"""

import pytest
import torch

from host_kernels import BF16, FP16, FP32, every_kernel, library
from onefold.errors import OptimizerError
from onefold.optim import rules
from onefold.optim.kernels.host import NativeKernel, Run, Step, TorchKernel


def run_of(**changes):
    tensors = {"weight": torch.zeros(4, dtype=BF16), "exact": torch.zeros(4, dtype=torch.int16), "grad": torch.ones(4)}
    return Run(**{**tensors, "state": {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": torch.zeros(4, dtype=FP16)}, "weight: expected .* 4 elements, bfloat16; got .* float16"),
        ({"weight": torch.zeros(2, 2, dtype=BF16)}, r"weight: expected .* 1-D .* got \(2, 2\)"),
        ({"exact": torch.zeros(4, dtype=torch.int32)}, "exact: expected .* int16 or float32; got .* int32"),
        ({"exact": torch.zeros(5, dtype=torch.int16)}, r"exact: .* 4 elements.* got \(5,\)"),
        ({"exact": torch.zeros(8, dtype=torch.int16)[::2]}, r"exact: expected a contiguous .* strides \(2,\)"),
        ({"exact": None}, "weight: expected .* float32.*; got .* bfloat16"),
        ({"grad": torch.ones(4, dtype=torch.float64)}, "grad: expected .* float16; got .* float64"),
        ({"grad": torch.ones(4, device="meta")}, "grad: expected .* CPU tensor .* on meta"),
        ({"state": {"exp_avg": torch.zeros(4)}}, "adam needs the state tensor 'exp_avg_sq'"),
        ({"state": {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(4)}}, "state 'exp_avg': expected"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(changes, said):
    rule = rules.Adam()
    for kernel in (TorchKernel(), NativeKernel(library())):
        with pytest.raises(OptimizerError, match=said):
            kernel.update(run_of(**changes), Step(rule=rule, hyper=rule.defaults(), number=1))


def test_autograd_notices_an_update():
    rule = rules.SGD()
    for kernel in every_kernel():
        weight, factor = torch.ones(4), torch.ones(4, requires_grad=True)
        product = (weight * factor).sum()
        kernel.update(run_of(weight=weight, exact=None), Step(rule=rule, hyper=rule.defaults(), number=1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_a_default_device_is_no_concern_of_the_kernels():
    rule, results = rules.Adam(), []
    for kernel in every_kernel():
        run = run_of()
        with torch.device("meta"):
            kernel.update(run, Step(rule=rule, hyper=rule.defaults(), number=1))
            results.append((kernel.count_nonfinite(run.grad), kernel.sum_of_squares(run.grad), run.weight.tolist()))
    assert len(set(map(str, results))) == 1


def test_a_rule_of_the_users_own_goes_to_torch():
    class Halve:
        name = "halve"

        def update(self, master, grad, state, hyper, step):
            master.mul_(0.5)

    step, native = Step(rule=Halve(), hyper={}, number=1), NativeKernel(library())
    run = run_of(weight=torch.full((4,), 3.0, dtype=torch.float64), exact=None, state={})
    assert not native.supports("halve", FP32)
    assert not native.supports("adamw", torch.float64)
    with pytest.raises(OptimizerError, match="'halve', only adagrad, adam, adamw, lion, sgd: use TorchKernel"):
        native.update(run, step)
    TorchKernel().update(run, step)
    assert run.weight.tolist() == [1.5] * 4


def test_too_many_factors_are_refused():
    step = Step(rule=rules.Adam(), hyper=rules.Adam().defaults(), number=1, factors=(0.5, 0.5, 0.5))
    with pytest.raises(OptimizerError, match="3 factors: a kernel takes at most 2"):
        NativeKernel(library()).update(run_of(), step)


@pytest.mark.parametrize(("choice", "said"), [({"level": "mmx"}, "level='mmx'"), ({"num_threads": 0}, "num_threads=0")])
def test_a_kernel_that_cannot_be_is_refused(choice, said):
    with pytest.raises(ValueError, match=said):
        NativeKernel(library(), **choice)
