"""Promise: the built-in rules are torch.optim's arithmetic, bit for bit on CPU, however a shard is cut into runs."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.errors import OptimizerError
from onefold.optim import rules

NUM_STEPS = 40
CASES = [
    (rules.Adam, torch.optim.Adam, {}),
    (rules.Adam, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    (rules.Adam, torch.optim.Adam, {"weight_decay": 0.1, "maximize": True, "betas": (0.0, 0.5)}),
    (rules.AdamW, torch.optim.AdamW, {}),
    (rules.AdamW, torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (rules.AdamW, torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.9, 0.95)}),
    (rules.SGD, torch.optim.SGD, {}),
    (rules.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    (rules.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    (rules.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (rules.Adagrad, torch.optim.Adagrad, {}),
    (rules.Adagrad, torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}),
    (rules.Adagrad, torch.optim.Adagrad, {"maximize": True, "eps": 1e-6, "weight_decay": 0.01}),
]
LION_CASES = [{}, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.95, 0.98)}]
ALL_RULES = [(rule, kwargs) for rule, _, kwargs in CASES] + [(rules.Lion, kwargs) for kwargs in LION_CASES]
RULE_CLASSES = [rules.Adam, rules.AdamW, rules.SGD, rules.Lion, rules.Adagrad]


def names(value):
    return getattr(value, "__name__", None) or (str(value) if isinstance(value, (dict, tuple)) else None)


def draw(numel, dtype=torch.float32):
    """Weights and each step's gradients: magnitudes over six orders, and some exact zeros."""
    generator = torch.Generator().manual_seed(numel)

    def some():
        scale = 10 ** (6 * torch.rand(numel, generator=generator, dtype=dtype) - 3)
        return torch.randn(numel, generator=generator, dtype=dtype) * scale

    weights, grads = some(), [some() for _ in range(NUM_STEPS)]
    for grad in grads:
        grad[4::5] = 0
    return weights, grads


def lr_at(step, base):
    """A schedule, so that hyper-parameters are seen to be live."""
    return base * (1 + math.cos(step / 7)) / 2


def new_state(rule, hyper, like):
    state = {name: torch.full_like(like, math.nan) for name in rule.state_names(hyper)}
    for name, tensor in state.items():
        rule.init_state(name, tensor, hyper)
    return state


@torch.no_grad()
def train(rule, weights, grads, cuts=()):
    """The weights and the state after all steps, updated run by run between the cuts."""
    hyper = rule.defaults()
    base = hyper["lr"]
    master, state = weights.clone(), new_state(rule, hyper, weights)
    ends = [0, *sorted(cuts), len(weights)]
    for step, grad in enumerate(grads, start=1):
        hyper["lr"] = lr_at(step, base)
        buffer = grad.clone()
        for start, stop in pairwise(ends):
            run = {name: tensor[start:stop] for name, tensor in state.items()}
            rule.update(master[start:stop], buffer[start:stop], run, hyper, step)
    return master, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (5, 13), (3, 7, 11), (211, 331), (0,)], ids=str)
@pytest.mark.parametrize(("rule_class", "torch_class", "kwargs"), CASES, ids=names)
def test_equals_torch_optim_bit_for_bit(rule_class, torch_class, kwargs, shape, dtype):
    weights, grads = draw(math.prod(shape), dtype)
    param = torch.nn.Parameter(weights.clone().view(shape))
    optimizer = torch_class([param], foreach=False, **kwargs)
    base = optimizer.param_groups[0]["lr"]
    for step, grad in enumerate(grads, start=1):
        optimizer.param_groups[0]["lr"] = lr_at(step, base)
        param.grad = grad.clone().view(shape)
        optimizer.step()

    master, state = train(rule_class(**kwargs), weights, grads)

    assert torch.equal(master, param.detach().flatten())
    assert math.prod(shape) == 0 or not torch.equal(master, weights)
    for name, tensor in state.items():
        assert torch.equal(tensor, optimizer.state[param][name].flatten()), name


@pytest.mark.parametrize(("rule_class", "kwargs"), ALL_RULES, ids=names)
@settings(max_examples=15, deadline=None)
@given(numel=st.sampled_from([1, 37, 128, 515]), data=st.data())
def test_a_shard_may_be_cut_anywhere(rule_class, kwargs, numel, data):
    cuts = data.draw(st.lists(st.integers(0, numel), max_size=9))
    weights, grads = draw(numel)
    grads = grads[:6]

    whole, whole_state = train(rule_class(**kwargs), weights, grads)
    pieces, pieces_state = train(rule_class(**kwargs), weights, grads, cuts)

    assert torch.equal(whole, pieces)
    for name, tensor in whole_state.items():
        assert torch.equal(tensor, pieces_state[name]), name


@pytest.mark.parametrize("kwargs", LION_CASES, ids=str)
def test_lion_is_algorithm_2_of_its_paper(kwargs):
    rule = rules.Lion(**kwargs)
    weights, grads = draw(91, torch.float64)
    beta1, beta2 = rule.betas
    expected, momentum = weights.clone(), torch.zeros_like(weights)
    for step, grad in enumerate(grads, start=1):
        blend = beta1 * momentum + (1 - beta1) * grad
        expected = expected - lr_at(step, rule.lr) * (blend.sign() + rule.weight_decay * expected)
        momentum = beta2 * momentum + (1 - beta2) * grad

    master, state = train(rule, weights, grads)

    torch.testing.assert_close(master, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["exp_avg"], momentum, rtol=1e-12, atol=1e-12)


def test_lion_by_hand():
    rule = rules.Lion(lr=0.5, betas=(0.5, 0.75), weight_decay=0.25)
    master, momentum = torch.tensor([8.0, -8.0, 8.0]), torch.tensor([4.0, 4.0, 0.0])

    rule.update(master, torch.tensor([-2.0, -8.0, 0.0]), {"exp_avg": momentum}, rule.defaults(), step=2)

    # decay: times 1 - 0.5 * 0.25 = 0.875; blends: 1, -2, 0
    assert master.tolist() == [7.0 - 0.5, -7.0 + 0.5, 7.0]
    assert momentum.tolist() == [2.5, 1.0, 0.0]


@pytest.mark.parametrize("rule_class", RULE_CLASSES, ids=names)
def test_a_tensor_of_one_element_is_as_good_as_a_number(rule_class):
    weights, grads = draw(33)
    number, tensor = rule_class(lr=0.125), rule_class(lr=torch.tensor(0.125))
    assert tensor == number

    master, state, hyper = weights.clone(), new_state(number, number.defaults(), weights), number.defaults()
    for step, grad in enumerate(grads, start=1):
        hyper["lr"] = torch.tensor(lr_at(step, 0.125), dtype=torch.float64)
        number.update(master, grad.clone(), state, hyper, step)

    assert torch.equal(master, train(number, weights, grads)[0])


@pytest.mark.parametrize(("rule_class", "torch_class"), dict.fromkeys((rule, cls) for rule, cls, _ in CASES), ids=names)
def test_defaults_are_torch_optims(rule_class, torch_class):
    theirs = torch_class([torch.nn.Parameter(torch.zeros(1))]).defaults
    ours = rule_class().defaults()
    assert ours == {name: theirs[name] for name in ours}
    assert theirs.keys() - ours.keys() <= {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


def test_lion_has_its_papers_defaults():
    assert rules.Lion().defaults() == {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (rules.Adam(), ("exp_avg", "exp_avg_sq")),
        (rules.AdamW(amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        (rules.SGD(), ()),
        (rules.SGD(momentum=0.9), ("momentum_buffer",)),
        (rules.Lion(), ("exp_avg",)),
        (rules.Adagrad(), ("sum",)),
    ],
    ids=str,
)
def test_state_is_what_the_hyper_parameters_ask_for(rule, expected):
    assert rule.state_names(rule.defaults()) == expected


@pytest.mark.parametrize(
    ("rule_class", "name"), [(rules.SGD, "momentum_buffer"), (rules.Adam, "max_exp_avg_sq")], ids=names
)
def test_state_that_was_never_laid_out_is_named(rule_class, name):
    rule = rule_class()
    state = new_state(rule, rule.defaults(), torch.zeros(3))
    changed = {**rule.defaults(), "momentum": 0.9, "amsgrad": True}
    with pytest.raises(OptimizerError, match=f"{rule.name} needs the state tensor '{name}'"):
        rule.update(torch.zeros(3), torch.ones(3), state, changed, step=2)


@pytest.mark.parametrize(("rule_class", "kwargs"), ALL_RULES, ids=names)
def test_is_a_rule(rule_class, kwargs):
    rule = rule_class(**kwargs)
    assert isinstance(rule, rules.Rule)
    assert rule.name == rule_class.__name__.lower()
    assert rule.defaults().items() >= kwargs.items()


@pytest.mark.parametrize(
    ("rule_class", "torch_class", "kwargs", "said"),
    [
        (rules.Adam, torch.optim.Adam, {"lr": -0.5}, r"Adam\(lr=-0.5\)"),
        (rules.Adam, torch.optim.Adam, {"lr": math.nan}, r"Adam\(lr=nan\)"),
        (rules.Adam, torch.optim.Adam, {"eps": -1.0}, r"Adam\(eps=-1.0\)"),
        (rules.AdamW, torch.optim.AdamW, {"weight_decay": -0.1}, r"AdamW\(weight_decay=-0.1\)"),
        (rules.AdamW, torch.optim.AdamW, {"betas": (1.0, 0.9)}, r"AdamW\(betas=\(1.0, 0.9\)\)"),
        (rules.AdamW, torch.optim.AdamW, {"betas": (0.9, -0.1)}, r"AdamW\(betas=\(0.9, -0.1\)\)"),
        (rules.SGD, torch.optim.SGD, {"lr": -1.0}, r"SGD\(lr=-1.0\)"),
        (rules.SGD, torch.optim.SGD, {"momentum": -0.9}, r"SGD\(momentum=-0.9\)"),
        (rules.SGD, torch.optim.SGD, {"weight_decay": -0.9}, r"SGD\(weight_decay=-0.9\)"),
        (rules.SGD, torch.optim.SGD, {"nesterov": True}, "positive momentum and no dampening, not momentum=0.0"),
        (rules.SGD, torch.optim.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening=0.1"),
        (rules.Adagrad, torch.optim.Adagrad, {"lr_decay": -1.0}, r"Adagrad\(lr_decay=-1.0\)"),
        (rules.Adagrad, torch.optim.Adagrad, {"eps": -1.0}, r"Adagrad\(eps=-1.0\)"),
        (rules.Adagrad, torch.optim.Adagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value=-1.0"),
    ],
    ids=names,
)
def test_refuses_what_torch_refuses_and_names_it(rule_class, torch_class, kwargs, said):
    with pytest.raises(OptimizerError, match=said):
        rule_class(**kwargs)
    with pytest.raises(ValueError):  # noqa: PT011 - torch's wording is its own; what counts is that it refuses too
        torch_class([torch.nn.Parameter(torch.zeros(1))], **kwargs)


@pytest.mark.parametrize("betas", [(0.9, 1.0), (0.9,), (0.9, 0.99, 0.999)], ids=str)
def test_lion_refuses_bad_betas(betas):
    with pytest.raises(OptimizerError, match=r"Lion\(betas="):
        rules.Lion(betas=betas)


class NewStorages(TorchDispatchMode):
    """Collects the storages that operations create, apart from those of `known` tensors."""

    def __init__(self, known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.created = []  # held, so that an address is not used twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.known:
            self.known.add(result.untyped_storage().data_ptr())
            self.created.append(result)
        return result


@pytest.mark.parametrize(("rule_class", "kwargs"), ALL_RULES, ids=names)
def test_scratch_is_the_gradient(rule_class, kwargs):
    rule = rule_class(**kwargs)
    hyper, master, grad = rule.defaults(), torch.ones(50), torch.ones(50)
    state = new_state(rule, hyper, master)
    with torch.no_grad(), NewStorages([master, grad, *state.values()]) as seen:
        rule.update(master, grad, state, hyper, step=2)
    assert len(seen.created) == (1 if rule_class in (rules.Lion, rules.Adagrad) else 0)
