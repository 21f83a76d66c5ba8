"""Promise: groups and hyper-parameters that cannot be used are named, before anything is changed."""

from functools import partial

import pytest
import torch

import onefold
from models import Stack
from onefold.errors import OptimizerError


@pytest.mark.parametrize("groups", [lambda params: params, lambda _: [{"lr": 0.1}]], ids=["bare", "none"])
def test_groups_are_as_in_torch(groups):
    model = onefold.shard(Stack(), onefold.ZERO_1)
    with pytest.raises(OptimizerError, match=r"groups as torch.optim does, .* leave it out"):
        onefold.SGD(model, param_groups=groups(list(model.parameters())))


@pytest.mark.parametrize("plan", [onefold.ZERO_1, onefold.OFFLOAD], ids=["zero_1", "offload"])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lr": None}, r"param_groups\[0\] has lr=None; .* needs a number"),
        ({"lr": torch.ones(2)}, r"has lr=tensor\(\[1., 1.\]\); .* needs a number"),
        ({"betas": 0.9}, r"has betas=0.9; .* needs 2 numbers"),
        ({"betas": ("0.9", 0.99)}, r"has betas=\('0.9', 0.99\); .* needs 2 numbers"),
    ],
    ids=["none", "two numbers", "one of two", "text"],
)
@pytest.mark.parametrize("make", [onefold.AdamW, partial(onefold.Elementwise, cls=torch.optim.RAdam)])
def test_hyper_parameters_stay_numbers(make, changed, words, plan):
    """The step says which one, and changes nothing; once it is put right, training goes on."""
    model = onefold.shard(Stack(), plan)
    optimizer = make(model, lr=0.1)
    before = dict(optimizer.param_groups[0])
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.param_groups[0].update(changed)
    with pytest.raises(OptimizerError, match=words):
        optimizer.step()
    assert optimizer.num_updates == 0
    optimizer.param_groups[0].pop("lr")
    with pytest.raises(OptimizerError, match=r"param_groups\[0\] has lost 'lr'"):
        optimizer.step()
    optimizer.param_groups[0].update(before)
    optimizer.step()
    assert optimizer.num_updates == 1
