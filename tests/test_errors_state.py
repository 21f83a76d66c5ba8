"""Promise: state that is not whole is never read by mistake: parameters in shards, gradients that are reduced,
and state dicts either work to the bit or say what to do.
"""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import onefold
from checks import refused, same, tensors, weights
from models import WIDTH, Stack, build
from onefold import Precision
from onefold.errors import OptimizerError, ReducedGradientError, ReleasedParameterError, ShardError
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan, one_and_two_ranks


def trained(plan="zero_3"):
    """A sharded model with gradients that are reduced and not used yet."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    model(torch.ones(3, 4)).square().mean().backward()
    return model


# --- parameters that are not there


READS = {
    "+": lambda w: w + 1,
    "r+": lambda w: 1 + w,
    "@": lambda w: w @ torch.ones(w.shape[1]),
    "r@": lambda w: torch.ones(w.shape[0]) @ w,
    "==": lambda w: w == 0,
    "sum": lambda w: w.sum(),
    "norm": lambda w: w.norm(),
    "index": lambda w: w[0],
    "item": lambda w: w[0, 0].item(),
    "iterate": lambda w: list(w),
    "set item": lambda w: w.detach().__setitem__(0, 1.0),
    "data": lambda w: w.data.sum(),
    "detach": lambda w: w.detach().clone(),
    "t": lambda w: w.t().contiguous(),
    "view": lambda w: w.view(-1).sum(),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.detach().numpy(),
    "cpu": lambda w: w.cpu().sum(),
    "to": lambda w: w.to(torch.float64),
    "clone": lambda w: w.clone(),
    "stack": lambda w: torch.stack([w, w]),
    "cat": lambda w: torch.cat([w, w]),
    "linear": lambda w: functional.linear(torch.ones(1, w.shape[1]), w),
    "embedding": lambda w: functional.embedding(torch.tensor([0]), w),
    "isnan": lambda w: torch.isnan(w).any(),
    "equal": lambda w: torch.equal(w, torch.zeros(w.shape)),
    "zeros_": lambda w: nn.init.zeros_(w),
    "mul_": lambda w: _in_place(w, "mul_", 2.0),
    "copy_": lambda w: _in_place(w, "copy_", torch.zeros(w.shape)),
    "copy from": lambda w: torch.zeros(w.shape).copy_(w),
    "foreach": lambda w: torch._foreach_norm([w]),
    "deepcopy": lambda w: copy.deepcopy(w),
    "pickle": lambda w: pickle.dumps(w),
    "save": lambda w: torch.save(w, io.BytesIO()),
    "data_ptr": lambda w: w.data_ptr(),
    "storage": lambda w: w.untyped_storage(),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
}


def _in_place(w, name, *arguments):
    with torch.no_grad():
        getattr(w, name)(*arguments)


def read_everything(rank, num_ranks):
    model = trained()
    weight = model.blocks[1].up.weight
    return {name: refused(partial(read, weight), ReleasedParameterError) for name, read in READS.items()}


@one_and_two_ranks
def test_reading_a_parameter_that_rests_in_shards_is_an_error(ranks, num_ranks):
    for rank, messages in enumerate(ranks(num_ranks).run(read_everything)):
        assert [name for name, message in messages.items() if message is None] == []
        for message in messages.values():
            assert "'blocks.1.up.weight'" in message
            assert f"rank {rank}" in message
            assert "onefold.gathered(model)" in message


def look_at(rank, num_ranks):
    weight = trained().blocks[1].up.weight
    seen = repr(weight), str(weight), f"{weight}", weight.shape, weight.dtype, weight.numel(), weight.requires_grad
    return seen, isinstance(weight, nn.Parameter), {weight: 1}[weight], len(weight), weight.is_leaf


def test_metadata_of_a_parameter_can_be_read_anywhere(ranks):
    for rank, (seen, *rest) in enumerate(ranks(2).run(look_at)):
        for text in seen[:3]:
            assert "'blocks.1.up.weight'" in text
            assert f"rank {rank}" in text
        assert seen[3:] == ((2 * WIDTH, WIDTH), torch.float32, 2 * WIDTH * WIDTH, True)
        assert rest == [True, 1, 2 * WIDTH, True]


def whole_reads(rank, num_ranks, plan):
    weight = trained(plan).blocks[1].up.weight
    return weight.sum().item()


@pytest.mark.parametrize("plan", ["zero_0", "zero_1", "zero_2"])
def test_whole_parameters_can_be_read_anywhere(ranks, plan):
    want = build(Stack).blocks[1].up.weight.sum().item()
    assert ranks(2).run(whole_reads, plan) == [want, want]


# --- memory that others see too


def with_a_buffer_in_a_parameter():
    model = Stack()
    model.register_buffer("seen", model.blocks[1].up.weight.data.t())
    return model


def with_a_scripted_block():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1] = torch.jit.script(model[1])
    return model


def with_a_traced_block():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1] = torch.jit.trace(model[1], torch.ones(2, 4))
    return model


UNSEEN = {
    "a buffer": (with_a_buffer_in_a_parameter, ["'seen'", "'blocks.1.up.weight'", "clone"]),
    "scripted": (with_a_scripted_block, ["'1'", "TorchScript", "torch.compile"]),
    "traced": (with_a_traced_block, ["'1'", "TorchScript", "torch.compile"]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@every_plan
@pytest.mark.parametrize("name", UNSEEN)
def test_parameters_that_are_read_behind_the_models_back_are_refused(name, plan):
    make, words = UNSEEN[name]
    with pytest.raises(ShardError) as raised:
        onefold.shard(make(), NAMED_PLANS[plan])
    assert all(word in str(raised.value) for word in words), raised.value


# --- groups


def fewer_parameters(optimizer):
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def a_group_less(optimizer):
    del optimizer.param_groups[1]


def other_parameters(optimizer):
    first, second = optimizer.param_groups
    first["params"][0], second["params"][0] = second["params"][0], first["params"][0]


CHANGED_GROUPS = (fewer_parameters, a_group_less, other_parameters)


def step_with_changed_groups(rank, num_ranks, change, plan):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model, no_decay=["*.bias"])
    model(torch.ones(3, 4)).square().mean().backward()
    change(optimizer)
    return refused(optimizer.step, OptimizerError)


@every_plan
@pytest.mark.parametrize("change", CHANGED_GROUPS)
def test_groups_that_lose_or_swap_parameters_are_an_error(ranks, change, plan):
    for rank, message in enumerate(ranks(2).run(step_with_changed_groups, change, plan)):
        assert message is not None
        assert f"rank {rank}" in message
        assert "build a new optimizer" in message


# --- gradients that are not there


GRADIENT_READS = {
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip, one by one": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "clip values": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "norm": lambda model: model.head.weight.grad.norm(),
    "mul_": lambda model: model.head.weight.grad.mul_(2.0),
    "zero_": lambda model: model.head.weight.grad.zero_(),
    "clone": lambda model: model.head.weight.grad.clone(),
    "data": lambda model: model.head.weight.grad.data,
    "index": lambda model: model.head.weight.grad[0],
}


def read_gradients(rank, num_ranks, plan):
    model = trained(plan)
    messages = {name: refused(partial(read, model), ReducedGradientError) for name, read in GRADIENT_READS.items()}
    return messages, model.head.weight.grad.shape, repr(model.head.weight.grad)


@one_and_two_ranks
@every_plan
def test_reading_a_reduced_gradient_is_an_error(ranks, plan, num_ranks):
    for rank, (messages, shape, text) in enumerate(ranks(num_ranks).run(read_gradients, plan)):
        assert [name for name, message in messages.items() if message is None] == []
        assert all("max_grad_norm=" in message and ".weight" in message for message in messages.values())
        assert all(f"(rank {rank})" in message for message in messages.values())
        assert shape == (2, WIDTH)
        assert "head.weight" in text


# --- state dicts


def state_dict_refused(rank, num_ranks, is_part):
    model = trained()
    return refused(lambda: (model.blocks[0] if is_part else model).state_dict(), ReleasedParameterError)


@pytest.mark.parametrize("is_part", [False, True])
def test_a_state_dict_of_shards_is_an_error(ranks, is_part):
    for message in ranks(2).run(state_dict_refused, is_part):
        assert message is not None
        assert "onefold.gathered(model)" in message


def load(rank, num_ranks, plan, dtype):
    """A state dict that another model wrote goes through to shards and masters: the next update starts from it."""
    torch.manual_seed(1)
    source = Stack()
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], precision=Precision(params=dtype))
    optimizer = onefold.SGD(model, lr=0.0)
    model.load_state_dict(source.state_dict())
    loaded = weights(model)
    model(torch.ones(3, 4)).float().square().mean().backward()
    optimizer.step()
    same(weights(model), loaded, 0)
    same(loaded, {name: tensor.to(loaded[name].dtype) for name, tensor in tensors(source).items()}, 0)


@pairwise(dtype=("fp32", "bf16", "fp16"), plan=PLANS, num_ranks=(1, 2))
def test_load_state_dict_writes_through(ranks, plan, num_ranks, dtype):
    ranks(num_ranks).run(load, plan, dtype)


def load_wrong(rank, num_ranks, plan):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    state = Stack().state_dict()
    state["head.weight"] = torch.ones(3, 3)
    message = refused(lambda: model.load_state_dict(state), RuntimeError)
    model(torch.ones(3, 4)).square().mean().backward()  # and the model still works
    return message


@every_plan
def test_a_state_dict_that_does_not_fit_names_the_parameter(ranks, plan):
    assert all("head.weight" in message for message in ranks(2).run(load_wrong, plan))


@pytest.mark.parametrize("plan", [onefold.ZERO_1, onefold.ZERO_3, onefold.OFFLOAD], ids=str)
@pytest.mark.parametrize(
    ("make", "change"), [(onefold.SGD, {"momentum": 0.9}), (onefold.AdamW, {"amsgrad": True})], ids=["sgd", "adamw"]
)
def test_state_that_was_not_laid_out_is_missed_at_the_step(plan, make, change):
    model = onefold.shard(build(Stack), plan)
    optimizer = make(model)
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.param_groups[0].update(change)
    assert "set it when the optimizer is made" in refused(optimizer.step, OptimizerError)


# --- an optimizer's own state


OPTIMIZERS = {
    "sgd": onefold.SGD,
    "momentum": partial(onefold.SGD, momentum=0.9),
    "adam": onefold.Adam,
    "adamw": onefold.AdamW,
    "amsgrad": partial(onefold.AdamW, amsgrad=True),
    "no decay": partial(onefold.AdamW, no_decay=["*bias"]),
    "lion": onefold.Lion,
    "nadam": partial(onefold.Elementwise, cls=torch.optim.NAdam),
    "adamax": partial(onefold.Elementwise, cls=torch.optim.Adamax),
}


def stepped(name, plan):
    model = trained(plan)
    optimizer = OPTIMIZERS[name](model, lr=1e-2)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pairwise(name=list(OPTIMIZERS), other=list(OPTIMIZERS), plan=("zero_2", "offload"))
def test_state_of_another_optimizer_is_refused_before_anything_changes(name, other, plan):
    saved = stepped(other, plan)[1].state_dict()
    _, optimizer = stepped(name, plan)
    before = copy.deepcopy(optimizer.state_dict())
    if name == other:
        optimizer.load_state_dict(saved)
    else:
        with pytest.raises(OptimizerError, match=r"saved with|is of another optimizer"):
            optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize("plan", ["zero_2", "zero_3", "offload"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_was_loaded_stays_as_it_was_saved(name, plan):
    model, optimizer = stepped(name, plan)
    saved, start, ends = copy.deepcopy(optimizer.state_dict()), weights(model), []
    for _ in range(2):
        optimizer.load_state_dict(saved)
        with onefold.gathered(model, write=True):
            model.load_state_dict(start)
        for _ in range(2):
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights(model))
    same(*ends)


@pytest.mark.parametrize(
    "make", [copy.deepcopy, pickle.dumps, partial(torch.save, f=io.BytesIO())], ids=["copy", "pickle", "save"]
)
def test_a_copied_optimizer_is_an_error(make):
    with pytest.raises(OptimizerError, match="state_dict"):
        make(stepped("adamw", "zero_3")[1])


def with_an_object(rank, num_ranks):
    _, optimizer = stepped("adamw", "zero_2")
    optimizer.param_groups[0]["note"] = object()
    optimizer.step()
    return optimizer.num_updates


def test_objects_of_the_users_in_a_group_are_no_setting(ranks):
    assert ranks(2).run(with_an_object) == [2, 2]
