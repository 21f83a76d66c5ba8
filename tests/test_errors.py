"""Promise: what cannot work is refused where it is asked for, and the message says which, why and what to do instead.

`test_plan` and `test_dtypes` hold the errors of plans and precisions to this, `test_order` those of ranks that run
different things, `test_errors_state` those of state that is not whole.
"""

from functools import partial

import pytest
import torch
from torch import nn

import onefold
from checks import refused, same, weights
from models import WIDTH, Block, Stack, build
from onefold import Placement, Plan, Precision, Tier
from onefold.errors import (
    OptimizerError,
    PlanError,
    PrecisionError,
    ReducedGradientError,
    ShardError,
)
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan


def sharded(plan="zero_3"):
    return onefold.shard(build(Stack), NAMED_PLANS[plan])


# --- what shard is given


def with_sparse():
    model = Stack()
    model.table = nn.Parameter(torch.eye(3).to_sparse())
    return model


def with_complex():
    model = Stack()
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model


def with_lazy():
    return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))


def with_two_at_one_place():
    model = Stack()
    model.blocks[2].up.weight.data = model.blocks[0].up.weight.data
    return model


def with_a_transposed_view():
    model = Stack()
    model.blocks[2].down.weight = nn.Parameter(model.blocks[0].up.weight.data.t().contiguous())
    model.blocks[2].up.weight = nn.Parameter(model.blocks[2].down.weight.data.t())
    return model


def with_a_part_of_another():
    model = Stack()
    model.part = nn.Parameter(model.blocks[0].up.weight.data[2:5])
    return model


def twice():
    return onefold.shard(Stack(), onefold.ZERO_1)


def around_a_sharded_part():
    model = Stack()
    onefold.shard(model.blocks, onefold.ZERO_1)
    return model


def part_of_a_sharded_model():
    return onefold.shard(Stack(), onefold.ZERO_1).blocks[0]


def data_parallel():
    return nn.DataParallel(Stack())


UNFIT = {
    # a model, and what the message names: the parameter or class, and the way out
    "sparse": (with_sparse, ["'table'", "dense", "before onefold.shard"]),
    "complex": (with_complex, ["'phase'", "complex", "view_as_real"]),
    "lazy": (with_lazy, ["'1.weight'", "lazy", "one forward before"]),
    "two at one place": (with_two_at_one_place, ["'blocks.0.up.weight'", "'blocks.2.up.weight'", "same Parameter"]),
    "a transposed view": (with_a_transposed_view, ["'blocks.2.down.weight'", "'blocks.2.up.weight'", "same Parameter"]),
    "a part of another": (with_a_part_of_another, ["'part'", "'blocks.0.up.weight'", "same Parameter"]),
    "sharded twice": (twice, ["already sharded", "once", "whole model"]),
    "a part sharded": (around_a_sharded_part, ["already sharded", "once", "whole model"]),
    "part of a sharded one": (part_of_a_sharded_model, ["already sharded", "once", "whole model"]),
    "data parallel": (data_parallel, ["DataParallel", "model.module"]),
    "no parameters": (nn.ReLU, ["ReLU", "no parameters"]),
    "not a module": (lambda: [1], ["list", "torch.nn.Module"]),
}


@every_plan
@pytest.mark.parametrize("name", list(UNFIT))
def test_models_that_cannot_be_sharded(name, plan):
    make, words = UNFIT[name]
    with pytest.raises(ShardError) as raised:
        onefold.shard(make(), NAMED_PLANS[plan])
    assert all(word in str(raised.value) for word in words), raised.value


ARGUMENTS = {
    "plan by name": ({"plan": "zero_3"}, PlanError, ["ZERO_3", "'zero_3'"]),
    "plan missing": ({"plan": None}, PlanError, ["ZERO_3", "None"]),
    "precision by name": ({"precision": "bf16"}, PrecisionError, ["Precision(", "'bf16'"]),
    "units": ({"units": ["layers.*"]}, ShardError, ["layers.*", "Block"]),
    "a class of units": ({"units": [nn.Conv2d]}, ShardError, ["Conv2d", "Block"]),
}


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_arguments_of_shard(name):
    arguments, kind, words = ARGUMENTS[name]
    with pytest.raises(kind) as raised:
        onefold.shard(Stack(), **{"plan": onefold.ZERO_3, **arguments})
    assert all(word in str(raised.value) for word in words), raised.value


LAWLESS = {
    "law 1": {"params": Placement(True), "grads": Placement(False), "optim": Placement(True)},
    "law 2": {"params": Placement(False), "grads": Placement(False), "optim": Placement(False, Tier.HOST)},
    "law 3": {"params": Placement(True, Tier.HOST), "grads": Placement(True), "optim": Placement(True)},
}


@pytest.mark.parametrize("law", list(LAWLESS))
def test_a_plan_that_breaks_a_law_names_it(law):
    with pytest.raises(PlanError, match=law):
        Plan(**LAWLESS[law])


def test_a_tier_that_is_not_built_is_refused():
    with pytest.raises(PlanError, match=r"DEVICE and on HOST.*OFFLOAD_3"):
        onefold.shard(Stack(), onefold.INFINITY)


@pytest.mark.parametrize(
    "words", [{"params": "fp8"}, {"reduce": "int8"}, {"loss_scale": 0}, {"master": "none"}], ids=str
)
def test_a_precision_that_does_not_exist_is_refused(words):
    with pytest.raises(PrecisionError, match=next(iter(words))):
        Precision(**words)


# --- ranks that differ from the start


def another_shape(rank):
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + rank)), onefold.ZERO_3


def another_name(rank):
    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module(f"extra{rank}", nn.Linear(4, 4))
    return model, onefold.ZERO_3


def another_dtype(rank):
    return nn.Linear(4, 4, dtype=torch.float64 if rank else torch.float32), onefold.ZERO_3


def more_parameters(rank):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + rank))), onefold.ZERO_3


def another_frozen(rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(rank == 0)
    return model, onefold.ZERO_3


def another_plan(rank):
    return nn.Linear(4, 4), onefold.ZERO_3 if rank else onefold.ZERO_2


DIFFERENT = {
    another_shape: "1.weight",
    another_name: "extra",
    another_dtype: "float64",
    more_parameters: "a unit '2'",
    another_frozen: "1.weight",
    another_plan: "Plan",
}


def shard_differently(rank, num_ranks, make):
    model, plan = make(rank)
    return refused(lambda: onefold.shard(model, plan), ShardError)


@pytest.mark.parametrize("make", list(DIFFERENT), ids=lambda make: make.__name__)
def test_models_that_differ_between_ranks_are_refused_on_every_rank(ranks, make):
    for message in ranks(2).run(shard_differently, make):
        assert message is not None
        assert "rank 0" in message
        assert "rank 1" in message
        assert DIFFERENT[make] in message


# --- optimizers


def test_an_optimizer_needs_a_sharded_model():
    for make in (onefold.AdamW, onefold.SGD, partial(onefold.Elementwise, cls=torch.optim.Adamax)):
        with pytest.raises(OptimizerError, match=r"onefold.shard\(model, plan\) first"):
            make(Stack())


UNFIT_OPTIMIZERS = {
    "clipping to nothing": (lambda model: onefold.AdamW(model, max_grad_norm=0.0), ["max_grad_norm=0.0", "None"]),
    "negative rate": (lambda model: onefold.AdamW(model, lr=-1.0), ["lr", "-1.0"]),
    "no such parameter": (lambda model: onefold.AdamW(model, no_decay=["*.beta"]), ["'*.beta'", "embed.weight"]),
    "foreign parameter": (
        lambda model: onefold.SGD(model, param_groups=[{"params": [nn.Parameter(torch.ones(2))]}]),
        ["not a parameter of the sharded model"],
    ),
    "norms of whole parameters": (
        lambda model: onefold.Elementwise(model, torch.optim.Adafactor),
        ["Adafactor", "Lion"],
    ),
    "a closure": (lambda model: onefold.Elementwise(model, torch.optim.LBFGS), ["LBFGS", "AdamW"]),
    "not a class": (lambda model: onefold.Elementwise(model, onefold.AdamW), ["AdamW"]),
    "parameters": (
        lambda model: onefold.AdamW(model.parameters(), lr=1e-3),
        ["AdamW(model, ...)", "not its parameters", "param_groups="],
    ),
    "groups": (
        lambda model: onefold.Lion([{"params": list(model.parameters()), "lr": 1e-3}]),
        ["Lion(model, ...)", "a list", "param_groups="],
    ),
    "torch's kernels": (
        lambda model: onefold.AdamW(model, fused=True),
        ["AdamW does not take fused=", "fused already", "amsgrad", "max_grad_norm"],
    ),
    "no such argument": (lambda model: onefold.SGD(model, momentun=0.9), ["SGD", "momentun=", "momentum, dampening"]),
    "a late group": (
        lambda model: onefold.SGD(model).add_param_group({"params": []}),
        ["fixed", "param_groups="],
    ),
}


@pytest.mark.parametrize("name", list(UNFIT_OPTIMIZERS))
def test_optimizers_that_cannot_work(name):
    make, words = UNFIT_OPTIMIZERS[name]
    with pytest.raises(OptimizerError) as raised:
        make(onefold.shard(Stack(), onefold.ZERO_1))
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_model_that_is_frozen_whole_has_no_optimizer():
    model = onefold.shard(Stack().requires_grad_(False), onefold.ZERO_1)
    with pytest.raises(OptimizerError, match="frozen"):
        onefold.AdamW(model)


def torch_optimizer(rank, num_ranks, plan, is_before, foreach):
    """A `torch.optim` optimizer that steps on a sharded model, and whether a weight moved."""
    model = build(Stack)
    make = partial(torch.optim.AdamW, lr=0.1, foreach=foreach)
    if is_before:
        optimizer = make(model.parameters())
    model = onefold.shard(model, NAMED_PLANS[plan])
    if not is_before:
        optimizer = make(model.parameters())
    before = weights(model)
    model(torch.ones(3, 4)).square().mean().backward()
    message = refused(optimizer.step, ReducedGradientError)
    same(weights(model), before, 0)
    return message


@pairwise(plan=PLANS, num_ranks=(1, 2), is_before=(True, False), foreach=(True, False))
def test_an_optimizer_of_torch_is_refused_when_it_steps(ranks, plan, num_ranks, is_before, foreach):
    for message in ranks(num_ranks).run(torch_optimizer, plan, is_before, foreach):
        assert message is not None
        assert "onefold.AdamW(model, ...)" in message
        assert "embed.weight" in message


def from_another_rank(rank, num_ranks):
    optimizer = onefold.AdamW(sharded())
    saved = optimizer.state_dict()
    other = onefold.AdamW(sharded("zero_2")).state_dict()
    return refused(lambda: optimizer.load_state_dict(other), OptimizerError), saved["layout"]


def test_optimizer_state_of_another_plan_is_refused(ranks):
    for rank, (message, layout) in enumerate(ranks(2).run(from_another_rank)):
        assert f"shard {rank} of 2" in layout
        assert layout in message


# --- changes of the model after shard


def unfreeze(rank, num_ranks, plan):
    model = build(Stack)
    model.blocks[1].up.requires_grad_(False)
    model = onefold.shard(model, NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1)
    model.blocks[1].up.requires_grad_(True)

    def step():
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()

    return refused(step)


@every_plan
def test_a_parameter_that_thaws_after_shard_is_an_error(ranks, plan):
    for rank, message in enumerate(ranks(2).run(unfreeze, plan)):
        assert message is not None
        assert "'blocks.1.up." in message
        assert f"rank {rank}" in message
        assert "frozen when onefold.shard was called" in message


class Spare(Block):
    """A block with a place for a parameter, and nothing in it."""

    def __init__(self):
        super().__init__()
        self.register_parameter("spare_weight", None)


class Equal(nn.Linear):
    __hash__ = nn.Linear.__hash__

    def __eq__(self, other):
        return True


MOVES = {
    "to": lambda model: model.to(torch.float64),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "data": lambda model: setattr(model.head.weight, "data", torch.zeros(2, WIDTH)),
    "a part": lambda model: model.blocks[1].to(torch.float64),
    "a module added": lambda model: model.blocks[0].add_module("adapter", nn.Linear(WIDTH, WIDTH)),
    "a parameter where there was none": lambda model: setattr(
        model.blocks[0], "spare_weight", nn.Parameter(torch.ones(2))
    ),
    "other parameters": lambda model: object.__setattr__(
        model.head, "_parameters", dict(nn.Linear(WIDTH, 2)._parameters)
    ),
    "other modules": lambda model: object.__setattr__(model, "_modules", {**model._modules, "x": nn.Linear(2, 2)}),
    "a module that equals all others": lambda model: model.blocks[1]._modules.update(up=Equal(WIDTH, 2 * WIDTH)),
    "a module replaced": lambda model: setattr(model, "head", nn.Linear(WIDTH, 2)),
    "replaced": lambda model: setattr(model.head, "weight", nn.Parameter(torch.zeros(2, WIDTH))),
    "assigned": lambda model: model.load_state_dict(build(Stack).state_dict(), assign=True),
}


def move(rank, num_ranks, plan, name):
    model = onefold.shard(build(partial(Stack, block=Spare)), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1)

    def step():
        MOVES[name](model)
        model(torch.ones(3, 4, dtype=next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()

    return refused(step)


@pytest.mark.parametrize("name", list(MOVES))
@every_plan
def test_moving_or_casting_after_shard_is_an_error(ranks, plan, name):
    for message in ranks(2).run(move, plan, name):
        assert message is not None
        assert "weight'" in message or "bias'" in message
        assert "onefold" in message


def adapt(rank, num_ranks, plan):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    model.blocks[0].adapter = nn.Linear(WIDTH, WIDTH)
    return refused(lambda: onefold.SGD(model, lr=0.1), OptimizerError)


@every_plan
def test_a_parameter_added_after_shard_is_an_error(ranks, plan):
    for message in ranks(2).run(adapt, plan):
        assert message is not None
        assert "'blocks.0.adapter.weight'" in message
        assert "then shard" in message
