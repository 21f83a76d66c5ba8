"""Promise: a checkpoint that does not fit what it is loaded into is refused on every rank, before anything is changed,
with what differs and by which name; so is what a checkpoint cannot hold."""

import re
from collections import namedtuple

import numpy
import pytest
import torch
from torch import nn

import onefold
from checkpoint_faults import Small
from checks import equal, weights
from onefold.errors import CheckpointError, OnefoldError
from plans import NAMED_PLANS


class Renamed(Small):
    def __init__(self):
        super().__init__()
        self.frist = self.first
        del self.first

    def forward(self, x):
        return self.second(torch.tanh(self.frist(x)))


class Fewer(Small):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(6, 6, bias=False)


class More(Small):
    def __init__(self):
        super().__init__()
        self.register_buffer("extra_seen", torch.zeros(2))


class Trained(Small):
    def __init__(self):
        super().__init__()
        self.still.requires_grad_(True)


def adamw(model):
    return onefold.AdamW(model, lr=0.01)


def in_groups(model):
    first = [param for name, param in model.named_parameters() if name.startswith(("first.weight", "second"))]
    rest = [param for name, param in model.named_parameters() if name == "first.bias"]
    return onefold.AdamW(model, lr=0.01, param_groups=[{"params": first, "lr": 0.5}, {"params": rest}])


def other_groups(model):
    params = [param for param in model.parameters() if param.requires_grad]
    return onefold.AdamW(model, lr=0.01, param_groups=[{"params": params[:2], "lr": 0.5}, {"params": params[2:]}])


def some(model):
    return onefold.AdamW(model, param_groups=[{"params": list(model.first.parameters())}])


def elementwise(name, **options):
    return lambda model: onefold.Elementwise(model, getattr(torch.optim, name), lr=0.01, **options)


MODELS = {
    "small": Small,
    "renamed": Renamed,
    "wider": lambda: Small(8),
    "fewer": Fewer,
    "more": More,
    "trained": Trained,
}
OPTIMIZERS = {
    "adamw": adamw,
    "momentum": lambda model: onefold.SGD(model, momentum=0.9),
    "sgd": lambda model: onefold.SGD(model),
    "lion": lambda model: onefold.Lion(model),
    "groups": in_groups,
    "other groups": other_groups,
    "some": some,
    "rmsprop": elementwise("RMSprop"),
    "adadelta": elementwise("Adadelta"),
    "torch adamw": elementwise("AdamW"),
    "nadam": elementwise("NAdam"),
    "none": lambda model: None,
}


def step(model, optimizer):
    model(torch.ones(2, 8 if model.second.in_features == 8 else 6)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def made(model, optimizer, seed=0):
    torch.manual_seed(seed)
    model = onefold.shard(MODELS[model](), NAMED_PLANS["zero_3"])
    return model, OPTIMIZERS[optimizer](model)


def refusal(rank, num_ranks, directory, saved, loaded, is_used):
    """What `load` says to a checkpoint that one model and optimizer saved and another pair is to take."""
    model, optimizer = made(*saved)
    step(model, optimizer)
    onefold.save(directory / "it", model, optimizer)
    model, optimizer = made(*loaded, seed=1)
    if is_used:
        step(model, optimizer)
    before = weights(model)
    try:
        onefold.load(directory / "it", model, optimizer)
    except CheckpointError as error:
        assert equal(weights(model), before), "the model was changed"
        step(model, optimizer)
        return str(error)
    step(model, optimizer)
    return "loaded"


MISFITS = {
    "renamed": (("small", "adamw"), ("renamed", "adamw"), r"frist\.bias.*did you mean 'first\.bias'\?"),
    "wider": (("small", "adamw"), ("wider", "adamw"), r"parameter 'first\.bias' has shape \(6,\) in.*\(8,\) in"),
    "fewer": (("small", "adamw"), ("fewer", "adamw"), r"0 of its parameters .* 1 of the checkpoint's.*second\.bias"),
    "missing": (("fewer", "adamw"), ("small", "adamw"), r"1 of its parameters .* 0 of the checkpoint's.*second\.bias"),
    "buffer": (("small", "adamw"), ("more", "adamw"), r"1 of its buffers .*extra_seen"),
    "newly trained": (("small", "adamw"), ("trained", "adamw"), "parameter groups: 'still' of group 0 was in no group"),
    "no optimizer": (("small", "none"), ("small", "adamw"), r"without an optimizer: load\(path, model\) takes"),
    "lion": (("small", "adamw"), ("small", "lion"), "lion keeps exp_avg .*has exp_avg, exp_avg_sq"),
    "stateless": (("small", "momentum"), ("small", "sgd"), "sgd keeps no state .*has momentum"),
    "new state": (("small", "sgd"), ("small", "momentum"), "sgd keeps momentum.* has none"),
    "other groups": (
        ("small", "groups"),
        ("small", "other groups"),
        "has other parameter groups: 'first.bias' of group 0 was in another",
    ),
    "not in a group": (
        ("small", "some"),
        ("small", "adamw"),
        "parameter groups: 'second.weight' of group 0 was in no group",
    ),
    "elementwise": (
        ("small", "adamw"),
        ("small", "rmsprop"),
        r"saved with adamw, and this optimizer is Elementwise\(RMSprop\)",
    ),
    "elementwise of the same state": (
        ("small", "rmsprop"),
        ("small", "adadelta"),
        r"saved with Elementwise\(RMSprop\).*\(Adadelta\)",
    ),
    "elementwise of more": (
        ("small", "torch adamw"),
        ("small", "nadam"),
        r"saved with Elementwise\(AdamW\).*\(NAdam\)",
    ),
    "elementwise instead": (
        ("small", "adamw"),
        ("small", "torch adamw"),
        r"saved with adamw, and this optimizer is Elementwise\(AdamW\)",
    ),
    "not elementwise": (
        ("small", "rmsprop"),
        ("small", "adamw"),
        "adamw keeps exp_avg, exp_avg_sq for .* has square_avg",
    ),
}


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_by_name(ranks, tmp_path, misfit, is_used):
    saved, loaded, told = MISFITS[misfit]
    for message in ranks(2).run(refusal, tmp_path, saved, loaded, is_used):
        assert re.search(told, message), message
        assert str(tmp_path / "it") in message


class Place:
    """A data loader, as far as a checkpoint cares."""

    def __init__(self, place):
        self.place = place

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def rest(rank, num_ranks, directory, is_saved):
    """What loading says about schedulers and loaders that do not fit; the first run saves."""
    model, optimizer = made("small", "adamw")
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(3)]
    if not is_saved:
        onefold.save(directory / "it", model, optimizer, scheduler=schedulers[:2], loader=Place(rank))
        onefold.save(directory / "bare", model, optimizer)
    said = []
    for name, options in (
        ("it", {"scheduler": schedulers}),
        ("it", {"scheduler": schedulers[0]}),
        ("bare", {"scheduler": schedulers[0]}),
        ("bare", {"loader": Place(0)}),
        ("it", {"loader": Place(7)}),
        ("it", {"loader": object()}),
    ):
        before = weights(model)
        try:
            onefold.load(directory / name, model, optimizer, **options)
            said.append(options["loader"].place)
        except CheckpointError as error:
            said.append(str(error))
            assert equal(weights(model), before)
    return said


def test_schedulers_and_loaders_that_do_not_fit_are_refused(ranks, tmp_path):
    for rank, said in enumerate(ranks(2).run(rest, tmp_path, False)):
        assert "it holds the state of 2 schedulers, not 3" in said[0]
        assert "it holds the state of 2 schedulers, not 1" in said[1]
        assert "bare holds the state of 0 schedulers, not 1" in said[2]
        assert "was saved by" in said[3] or "without the state of a data loader" in said[3]
        assert said[4] == rank
        assert "the loader does not take the state in" in said[5]
    (said,) = ranks(1).run(rest, tmp_path, True)
    assert "was saved by 2 ranks, and this is one of 1" in said[4]


def given_on_one(rank, num_ranks, directory):
    """What ranks say that were not given the same."""
    model, optimizer = made("small", "adamw")
    onefold.save(directory / "it", model, optimizer, asynchronous=rank == 1).wait()
    said, ema = [], onefold.EMA(model)
    for attempt in (
        lambda: onefold.save(directory / "new", model, optimizer if rank == 0 else None),
        lambda: onefold.save(directory / "new", model, ema=ema if rank == 1 else None),
        lambda: onefold.load(directory / "it", model, optimizer if rank == 0 else None),
    ):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        said.append(str(caught.value))
    onefold.load(directory / "it", model, optimizer)
    return said


def test_what_is_given_on_one_rank_only_is_told_on_all(ranks, tmp_path):
    for said in ranks(2).run(given_on_one, tmp_path):
        for message, (what, rank) in zip(said, (("optimizer", 0), ("ema", 1), ("optimizer", 0)), strict=True):
            assert f"{what}= was given on ranks [{rank}] of 2 only" in message
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


Pair = namedtuple("Pair", "one two")


def nested(depth):
    return [nested(depth - 1)] if depth else []


UNFIT = {
    "object": ({"a": [1, object()]}, r"extra\['a'\]\[1\] is a builtins\.object"),
    "function": ({"f": len}, r"extra\['f'\] is a builtins\.builtin_function"),
    "named tuple": (Pair(1, 2), r"extra is a \S*Pair"),
    "complex": ([1j], r"extra\[0\] is a builtins\.complex"),
    "sparse": ({"t": torch.eye(2).to_sparse()}, r"extra\['t'\] is a tensor with layout torch\.sparse"),
    "meta": ({"t": torch.empty(2, device="meta")}, r"extra\['t'\] is a tensor on meta"),
    "record": ({"r": numpy.zeros(2, dtype=[("a", "i4")])}, r"extra\['r'\] is a numpy\.ndarray"),
    "deep": (nested(101), r"extra\[0\]\[0\].* is nested more than 100 deep"),
    "key": ({(1, len): 2}, r"a key of extra\[1\] is a builtins\.builtin_function"),
}


def unfit(rank, num_ranks, directory, case):
    model, optimizer = made("small", "adamw")
    with pytest.raises(CheckpointError) as caught:
        onefold.save(directory / "it", model, optimizer, extra=UNFIT[case][0])
    return str(caught.value)


@pytest.mark.parametrize("case", UNFIT)
def test_what_a_checkpoint_cannot_hold_is_refused_by_its_place(ranks, tmp_path, case):
    for message in ranks(2).run(unfit, tmp_path, case):
        assert re.search(UNFIT[case][1], message), message
    assert not list(tmp_path.iterdir())


def inside(model, attempt):
    with onefold.gathered(model, write=True):
        attempt()


def applied(model, attempt):
    with onefold.EMA(model).applied():
        attempt()


def elsewhere(rank, num_ranks, directory):
    """What paths that are no checkpoints give."""
    model, optimizer = made("small", "adamw")
    (directory / "mine").mkdir()
    (directory / "mine" / "thesis.tex").write_text("much work")
    (directory / "file").write_text("a file")
    onefold.save(directory / "real", model, optimizer)
    (directory / "link").symlink_to(directory / "real")
    (directory / "stale").symlink_to("nowhere")
    said = {}
    for name, attempt in {
        "over my files": lambda: onefold.save(directory / "mine", model),
        "over a file": lambda: onefold.save(directory / "file", model),
        "over a link": lambda: onefold.save(directory / "link", model),
        "below a stale link": lambda: onefold.save(directory / "stale" / "it", model),
        "as a leftover": lambda: onefold.save(directory / ".it.0123456789abcdef.partial", model),
        "as a replaced one": lambda: onefold.save(directory / ".it.replaced", model),
        "below a file": lambda: onefold.save(directory / "file" / "it", model),
        "keep nothing": lambda: onefold.save(directory / "new", model, keep_last=0),
        "nothing there": lambda: onefold.load(directory / "raal", model),
        "no latest": lambda: onefold.load(directory / "mine" / "latest", model),
        "not one": lambda: onefold.load(directory / "mine", model),
        "a file": lambda: onefold.load(directory / "file", model),
        "below": lambda: onefold.load(directory / "file" / "latest", model),
        "in a checkpoint": lambda: onefold.save(directory / "real" / "it", model),
        "save in gathered": lambda: inside(model, lambda: onefold.save(directory / "new", model)),
        "load in gathered": lambda: inside(model, lambda: onefold.load(directory / "real", model)),
        "other optimizer": lambda: onefold.save(directory / "new", model, made("small", "adamw")[1]),
        "other average": lambda: onefold.load(directory / "real", model, ema=onefold.EMA(made("small", "adamw")[0])),
        "averages": lambda: applied(model, lambda: onefold.save(directory / "new", model, optimizer)),
        "not sharded": lambda: onefold.save(directory / "new", nn.Linear(1, 1)),
    }.items():
        try:
            attempt()
        except OnefoldError as error:
            said[name] = str(error)
    onefold.load(directory / "link", model, optimizer)
    onefold.load(directory / "latest", model, optimizer)
    return said, sorted(path.name for path in directory.iterdir())


def test_paths_that_are_no_checkpoints_are_told_and_left_alone(ranks, tmp_path):
    ((said, names),) = ranks(1).run(elsewhere, tmp_path)
    assert "is there and is no checkpoint" in said["over my files"]
    assert "is there and is no checkpoint" in said["over a file"]
    assert "is a symbolic link" in said["over a link"]
    assert "stale is a link to nowhere, which is not there" in said["below a stale link"]
    assert "saves under way have such names" in said["as a leftover"]
    assert "saves under way have such names" in said["as a replaced one"]
    assert "file" in said["below a file"]
    assert "keep_last=0" in said["keep nothing"]
    assert "there are: " in said["nothing there"]
    assert "real" in said["nothing there"]
    assert "no whole checkpoint in" in said["no latest"]
    assert "is not a whole checkpoint" in said["not one"]
    assert "is not a whole checkpoint" in said["a file"]
    assert "file" in said["below"]
    assert "onefold.shard" in said["not sharded"]
    assert "optimizer= is of another model" in said["other optimizer"]
    assert "ema= is of another model" in said["other average"]
    assert "the model's weights are averages now" in said["averages"]
    assert "real is a checkpoint" in said["in a checkpoint"]
    assert "leave it first" in said["save in gathered"]
    assert "leave it first" in said["load in gathered"]
    assert names == ["file", "link", "mine", "real", "stale"]
