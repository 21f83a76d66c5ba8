"""Promise: every kind of optimizer, parameter and buffer comes back from a checkpoint, at other ranks, under other
plans, in other units; so do random states, and the place of each rank's data loader."""

import random

import numpy
import pytest
import torch
from torch import nn

import onefold
from checks import weights
from plans import NAMED_PLANS


class Odd(nn.Module):
    """Parameters: one 0-dim, one empty, one whose memory is transposed, one of integers, two tied; statistics."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(8, 5).t())
        self.index = nn.Parameter(torch.arange(7, -1, -1), requires_grad=False)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("forgotten", torch.zeros(2), persistent=False)

    def forward(self, x):
        x = self.norm(x @ self.turned)[:, self.index]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale + self.nothing.sum()


def elementwise(name, **options):
    return lambda model: onefold.Elementwise(model, getattr(torch.optim, name), lr=0.01, **options)


OPTIMIZERS = {
    "momentum": lambda model: onefold.SGD(model, lr=0.01, momentum=0.9, nesterov=True),
    "sgd": lambda model: onefold.SGD(model, lr=0.01),
    "lion": lambda model: onefold.Lion(model, lr=0.001),
    "adagrad": lambda model: onefold.Adagrad(model, initial_accumulator_value=0.1, eps=1e-3),
    "adamw": lambda model: onefold.AdamW(model, lr=torch.tensor(0.01), eps=1e-3),
    "rmsprop": elementwise("RMSprop", momentum=0.9, centered=True, eps=1e-3),
    "nadam": elementwise("NAdam", eps=1e-3),
    "torch adagrad": elementwise("Adagrad", eps=1e-3, initial_accumulator_value=0.1),
    "asgd": elementwise("ASGD"),
    "adadelta": elementwise("Adadelta", eps=1e-3),
    "torch sgd": elementwise("SGD", momentum=0.9),
    "amsgrad": elementwise("AdamW", amsgrad=True, eps=1e-3),
}


def made(optimizer, plan, seed=0, **options):
    torch.manual_seed(seed)
    model = onefold.shard(Odd(), NAMED_PLANS[plan], **options)
    return model, OPTIMIZERS[optimizer](model)


def train(model, optimizer, start, stop):
    """The same data on every rank, so that sums and statistics are the same for any number of ranks."""
    for step in range(start, stop):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_each(rank, num_ranks, directory):
    """Saves with every optimizer before the first step and after two; returns the weights then, and after four."""
    states = {}
    for name in OPTIMIZERS:
        model, optimizer = made(name, "zero_3")
        onefold.save(directory / f"{name} 0", model, optimizer)
        train(model, optimizer, 0, 2)
        onefold.save(directory / f"{name} 2", model, optimizer)
        saved = weights(model)
        train(model, optimizer, 2, 4)
        states[name] = (saved, weights(model))
    return states


def worst(got, want):
    assert got.keys() == want.keys()
    return max(
        float((tensor.double() - want[name].double()).abs().max())
        for name, tensor in got.items()
        if len(tensor.shape) == 0 or tensor.numel()
    )


def load_each(rank, num_ranks, directory, plan, states):
    wrong = []
    for name, (saved, later) in states.items():
        model, optimizer = made(name, plan, seed=1)
        train(model, optimizer, 5, 6)  # what is there has to go, wherever the checkpoint has less
        onefold.load(directory / f"{name} 2", model, optimizer)
        found = weights(model)
        if not all(torch.equal(tensor, saved[key]) for key, tensor in found.items() if key != "forgotten"):
            wrong.append(f"{name}: loaded other values")
        train(model, optimizer, 2, 4)
        if worst(weights(model), later) > 1e-5:
            wrong.append(f"{name}: two steps later off by {worst(weights(model), later)}")
        onefold.load(directory / f"{name} 0", model, optimizer)
        train(model, optimizer, 0, 4)
        if worst(weights(model), later) > 1e-5:
            wrong.append(f"{name}: from the start off by {worst(weights(model), later)}")
        onefold.save(directory / f"{plan} {name}", model, optimizer)  # and what was loaded saves again
    return wrong


@pytest.mark.parametrize(("save_ranks", "load_ranks", "plan"), [(2, 1, "offload"), (2, 3, "zero_3"), (1, 2, "zero_1")])
def test_every_optimizer_goes_on_at_other_ranks(ranks, tmp_path, save_ranks, load_ranks, plan):
    states = ranks(save_ranks).run(save_each, tmp_path)[0]
    for wrong in ranks(load_ranks).run(load_each, tmp_path, plan, states):
        assert not wrong, "\n".join(wrong)


UNITS = {
    "found": {},
    "one": {"units": []},
    "two": {"units": ["blocks.1"]},
    "half on the device": {"fraction": 0.5},
}


def save_in(rank, num_ranks, directory, name):
    model, optimizer = made("adamw", "offload", **UNITS[name])
    train(model, optimizer, 0, 2)
    onefold.save(directory / name, model, optimizer)
    saved = weights(model)
    train(model, optimizer, 2, 4)
    return saved, weights(model)


def load_in(rank, num_ranks, directory, name, saved, later):
    found = []
    for options in UNITS.values():
        model, optimizer = made("adamw", "offload", seed=1, **options)
        onefold.load(directory / name, model, optimizer)
        is_same = all(torch.equal(tensor, saved[key]) for key, tensor in weights(model).items())
        train(model, optimizer, 2, 4)
        found.append((is_same, worst(weights(model), later) < 1e-5))
    return found


@pytest.mark.parametrize("name", UNITS)
def test_units_and_mixes_do_not_show_in_a_checkpoint(ranks, tmp_path, name):
    saved, later = ranks(2).run(save_in, tmp_path, name)[0]
    for load_ranks in (1, 2):
        for found in ranks(load_ranks).run(load_in, tmp_path, name, saved, later):
            assert found == [(True, True)] * len(UNITS)


def draws():
    return [random.random(), float(numpy.random.rand()), float(torch.rand(())), random.gauss(0, 1)]


class Loader:
    """Keeps its place in values of every kind: nested, with tensors, arrays, tuples, sets and None."""

    def __init__(self, rank):
        self.state = {
            "_index": rank,
            "sampler": {"generator": torch.Generator().manual_seed(rank).get_state(), "order": numpy.arange(3) + rank},
            "workers": [(0, None), (1, {2: b"\x00\xff", "$": float("inf")})],
            "seen": {rank, rank + 1},
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def remember(rank, num_ranks, directory):
    """What random generators give after a save, after a load of it, and after one that leaves them alone."""
    model, optimizer = made("sgd", "zero_3")
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(10 + rank)
    random.gauss(0, 1)  # keeps a second number for later
    onefold.save(directory / "it", model, optimizer, loader=Loader(rank))
    first, second = draws(), draws()
    loader = Loader(7)
    onefold.load(directory / "it", model, optimizer, loader=loader)
    again = draws()
    onefold.load(directory / "it", model, optimizer, random_states=False)
    assert draws() == second
    want = Loader(rank).state
    assert torch.equal(loader.state["sampler"].pop("generator"), want["sampler"].pop("generator"))
    assert numpy.array_equal(loader.state["sampler"].pop("order"), want["sampler"].pop("order"))
    assert loader.state == want
    return first, again


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_random_numbers_and_loaders_of_each_rank_go_on(ranks, tmp_path, num_ranks):
    results = ranks(num_ranks).run(remember, tmp_path)
    for first, again in results:
        assert first == again
    assert len({tuple(first) for first, _ in results}) == num_ranks


EXTRAS = {
    "numbers": [1, -0.0, 1e-320, float("inf"), 2**80, True, None],
    "words": ["", "a\nb", "\u00fc", "\ud800"],
    "containers": {"t": (1, (2,)), "s": {1, 2}, "f": frozenset(), 3: "three", None: [], ("a", 1): {"$": "tuple"}},
    "sets": [{frozenset({1})}, {frozenset({2}): (torch.Size([]),)}],
    "bytes": [b"\x00\x01", bytearray(b"\xff")],
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
}


def carry(rank, num_ranks, directory):
    """Tensors and values of all kinds through `extra`."""
    model, optimizer = made("sgd", "zero_3")
    tensors = {
        "bf16": torch.randn(3).bfloat16(),
        "bool": torch.tensor([True, False]),
        "turned": torch.randn(4, 3).t(),
        "strided": torch.arange(10)[::3],
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 4, dtype=torch.int8),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "shared": torch.zeros(1).expand(70_000),
    }
    extra = {"tensors": tensors, "values": EXTRAS, "long": -(1 << 20_000)}
    onefold.save(directory / "it", model, optimizer, extra=extra, asynchronous=True)
    found = onefold.load(directory / "it", model, optimizer)
    assert found["tensors"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found["tensors"][name].dtype == tensor.dtype, name
        assert rank or torch.equal(found["tensors"][name], tensor), name
    assert found["long"] == extra["long"]
    return found["values"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_extra_carries_comes_back_as_it_was(ranks, tmp_path, num_ranks):
    for values in ranks(num_ranks).run(carry, tmp_path):
        assert repr(values) == repr(EXTRAS)


class Counted(nn.Linear):
    """Keeps a state that is no tensor, and one that is."""

    def __init__(self):
        super().__init__(3, 3)
        self.history = [(0, torch.zeros(2))]

    def get_extra_state(self):
        return {"history": self.history}

    def set_extra_state(self, state):
        self.history = state["history"]


NAMES = ("a b", "\u00e9/\u00fc", "q\"'", "$", "model", "\n", "lock", "_orig")


KINDS = (torch.float64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.bfloat16)


class Named(nn.Module):
    """Odd names, buffers of odd kinds, modules with state of their own and with parametrizations."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({name: nn.Linear(3, 3) for name in NAMES})
        self.counted = Counted()
        self.bent = nn.utils.parametrizations.spectral_norm(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
        self.wide = nn.Linear(3, 3).double()
        self.register_parameter("#", nn.Parameter(torch.ones(2)))
        for number, kind in enumerate(KINDS):
            self.register_buffer(f"${number}", torch.randn(3, 2).mul(3).to(kind).t())
        self.register_buffer("again", self._buffers["$0"])
        self.register_buffer("spread", torch.full((1,), float("nan")).expand(3))
        self.register_buffer("none", torch.empty(0, 2, dtype=torch.int32))
        self.register_buffer("left out", torch.randn(2), persistent=False)

    def forward(self, x):
        for inner in self.inner.values():
            x = torch.tanh(inner(x))
        return self.wide(self.bent(self.counted(x)).double()) * self._parameters["#"].sum()


def held(model):
    """The bytes of all tensors that a state dict has, and what `Counted` has."""
    with onefold.gathered(model):
        found = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    extra = next(found.pop(name) for name in list(found) if name.endswith("_extra_state"))
    return {name: raw(value) for name, value in found.items()} | {"extra": repr(extra)}


def raw(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def named(plan, seed, compiled):
    torch.manual_seed(seed)
    model = onefold.shard(torch.compile(Named(), backend="eager") if compiled else Named(), NAMED_PLANS[plan])
    return model, onefold.AdamW(model, lr=0.01)


def save_named(rank, num_ranks, path, compiled):
    model, optimizer = named("zero_3", 0, compiled)
    inner = model._modules.get("_orig_mod", model)
    inner(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    inner.counted.history.append((7, torch.ones(1)))
    onefold.save(path, model, optimizer)
    return held(model)


def load_named(rank, num_ranks, path, compiled):
    model, optimizer = named("zero_1", 1, compiled)
    onefold.load(path, model, optimizer)
    return held(model)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_names_buffers_and_states_of_modules_of_any_kind_come_back(ranks, tmp_path, compiled):
    path = tmp_path / "odd \n$x'\u00e9"
    saved = ranks(2).run(save_named, path, compiled)[0]
    (loaded,) = ranks(1).run(load_named, path, not compiled)
    assert loaded == saved
    assert "(7, tensor([1.]))" in loaded["extra"]


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


def in_mode(rank, num_ranks, directory, plan, mode):
    """Saves and loads inside a mode of torch's; what comes after goes on outside."""
    model, optimizer = made("amsgrad", plan)
    train(model, optimizer, 0, 2)
    for asynchronous in (False, True):
        with MODES[mode]():
            saving = onefold.save(directory / "it", model, optimizer, asynchronous=asynchronous)
        train(model, optimizer, 2, 3)
        saving.wait()
        want = weights(model)
        with MODES[mode]():
            onefold.load(directory / "it", model, optimizer)
        train(model, optimizer, 2, 3)
        if worst(weights(model), want):
            return f"off by {worst(weights(model), want)}"
        model, optimizer = made("amsgrad", plan, seed=1)
        with MODES[mode]():
            onefold.load(directory / "it", model, optimizer)
    return None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", ["zero_3", "offload"])
def test_saving_and_loading_work_inside_modes_without_gradients(ranks, tmp_path, plan, mode):
    assert ranks(1).run(in_mode, tmp_path, plan, mode) == [None]
