"""Promise: ranks that were asked for different things are told so, all of them, before or at the first step."""

import pytest
import torch
from torch import nn

import onefold
from models import Block, Stack, build
from onefold import Precision
from onefold.comm.agreement import united
from onefold.comm.control import Control
from onefold.comm.mesh import connect
from onefold.engine.grad_report import GradientReport, Told, mask_of, places_in
from onefold.errors import OnefoldError, OrderMismatchError, WeightsError
from plans import NAMED_PLANS, every_plan

PATIENCE_S = 240.0


class Counting(Stack):
    def __init__(self, size):
        super().__init__()
        if size:
            self.register_buffer("seen", torch.zeros(size))


class Unfilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))


class Filled(Unfilled):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


def complex_on_one(rank):
    model = Stack()
    if rank:
        model.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    return model, {}


def unborn_on_one(rank):
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), Unfilled() if rank else Filled()), {}


def meta_on_one(rank):
    with torch.device("meta" if rank else "cpu"):
        return Stack(), {}


def precision(**words):
    return lambda rank: (Stack(), {"precision": Precision(**{key: pair[rank] for key, pair in words.items()})})


SHARDED = {
    "other units": (lambda rank: (Stack(), {"units": [Block] if rank else [nn.Linear]}), "unit"),
    "more units": (lambda rank: (Stack(), {"units": ["blocks.0", *["blocks.1"] * rank]}), "unit"),
    "other precision": (precision(params=("bf16", "fp32")), "Precision"),
    "other reduction": (precision(params=("bf16", "bf16"), reduce=("fp32", None)), "reduce"),
    "other masters": (precision(params=("bf16", "bf16"), master=("fp32", "split")), "master"),
    "other loss scale": (precision(params=("fp16", "fp16"), loss_scale=(1024.0, 512.0)), "loss_scale"),
    "a buffer more": (lambda rank: (Counting(3 * rank), {}), "seen"),
    "a longer buffer": (lambda rank: (Counting(3 + rank), {}), "seen"),
    "a complex parameter": (complex_on_one, "'phase'"),
    "no initializer": (unborn_on_one, "Unfilled"),
    "meta": (meta_on_one, "on meta"),
}


def sharded_differently(rank, num_ranks, name, plan):
    model, options = SHARDED[name][0](rank)
    try:
        onefold.shard(model, NAMED_PLANS[plan], **options)
    except OnefoldError as error:
        return str(error)
    return None


@pytest.mark.parametrize("plan", ["zero_0", "zero_3"])
@pytest.mark.parametrize("name", SHARDED)
def test_what_differs_in_shard_is_named_on_every_rank(ranks, name, plan):
    for message in ranks(2).run(sharded_differently, name, plan, timeout_s=PATIENCE_S):
        assert message is not None
        assert SHARDED[name][1] in message


STEPPED = {
    "clipping": lambda model, rank: onefold.AdamW(model, max_grad_norm=0.1 if rank else None),
    "learning rate": lambda model, rank: onefold.AdamW(model, lr=0.1 + rank),
    "rule": lambda model, rank: onefold.AdamW(model) if rank else onefold.Adam(model),
    "weight decay": lambda model, rank: onefold.AdamW(model, no_decay=["*.bias"] if rank else []),
    "groups": lambda model, rank: onefold.AdamW(model, no_decay=["*.bias"] if rank else ["*.weight"]),
}


def stepped_differently(rank, num_ranks, name, plan):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = STEPPED[name](model, rank)
    model(torch.ones(3, 4)).square().mean().backward()
    try:
        optimizer.step()
    except OnefoldError as error:
        return str(error)
    return None


@every_plan
@pytest.mark.parametrize("name", STEPPED)
def test_optimizers_that_differ_are_an_error_on_every_rank(ranks, name, plan):
    for rank, message in enumerate(ranks(2).run(stepped_differently, name, plan, timeout_s=PATIENCE_S)):
        assert message is not None
        assert "optimizers differ" in message
        assert f"rank {rank}" in message


# --- what every rank does, done by one


def save(model, optimizer, directory):
    onefold.save(directory / "step-1", model, optimizer)


ALONE = {
    "onefold.save": save,
    "onefold.load": lambda model, optimizer, directory: onefold.load(directory, model, optimizer),
    "onefold.export": lambda model, optimizer, directory: onefold.export(model, directory),
    "onefold.full_state_dict": lambda model, optimizer, directory: onefold.full_state_dict(model),
    "onefold.load_pretrained": lambda model, optimizer, directory: onefold.load_pretrained(model, directory),
}


def called_alone(rank, num_ranks, name, plan, directory):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model)
    try:
        if rank == 0:
            ALONE[name](model, optimizer, directory)
        model(torch.ones(3, 4)).square().mean().backward()
    except OrderMismatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize("plan", ["zero_0", "zero_3"])
@pytest.mark.parametrize("name", ALONE)
def test_what_one_rank_does_alone_is_named_on_every_rank(ranks, name, plan, tmp_path):
    for message in ranks(2).run(called_alone, name, plan, tmp_path, timeout_s=PATIENCE_S):
        assert message is not None
        assert f"rank 0 came to the {name}; rank 1 came to the" in message


def trained_apart(rank, num_ranks, plan, depth):
    """Rank 0 trains one model, rank 1 the other."""
    models = [
        onefold.shard(build(Stack), NAMED_PLANS[plan]),
        onefold.shard(build(lambda: Stack(depth)), NAMED_PLANS[plan]),
    ]
    try:
        models[rank](torch.ones(3, 4)).square().mean().backward()
    except OrderMismatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize("plan", ["zero_0", "zero_3"])
@pytest.mark.parametrize("depth", [3, 200], ids=["as large", "larger than one message"])
def test_ranks_that_train_different_models_are_told(ranks, plan, depth):
    for message in ranks(2).run(trained_apart, plan, depth, timeout_s=PATIENCE_S):
        assert message is not None
        assert "of model 1, a " in message
        assert "of model 2, a " in message


def met(rank, num_ranks, num_params):
    size = GradientReport.num_bytes(num_params, num_params)
    control = Control(connect(torch.device("cpu")), "a model", size)
    mine = mask_of(place % (rank + 5) == 0 for place in range(num_params))
    report = GradientReport(
        num_reduced=rank,
        num_failed=0,
        settings=7,
        is_order_stale=bool(rank),
        order=(1, 2),
        squares=0.1 + rank,
        given=mine,
        kept=0,
        cleared=mine,
        pending=mine,
    )
    messages = control.meet("test", report.pack(num_params, num_params))
    told = Told([GradientReport.unpack(message, num_params, num_params) for message in messages])
    assert told.reports[rank] == report
    return [each.num_reduced for each in told.reports], places_in(told.given), places_in(told.cleared)


@pytest.mark.parametrize("num_params", [0, 1, 8, 62 * 32 + 1, 5000])
def test_what_ranks_tell_of_any_number_of_parameters_is_united(ranks, num_params):
    given = [place for place in range(num_params) if place % 5 == 0 or place % 6 == 0]
    torn = [place for place in given if place % 30]
    assert ranks(2).run(met, num_params) == [([0, 1], given, torn)] * 2


# --- work of many collectives


def worked(rank, num_ranks, fails_at):
    """Three steps that end in a meeting; where rank r fails, and the number of steps made and the error it got."""
    comm, done = connect(torch.device("cpu")), 0
    try:
        with united(comm, "the work", ("the same",)) as meet:
            for step in range(3):
                if fails_at.get(rank) == step:
                    raise ZeroDivisionError(f"rank {rank} divided by zero")
                meet()
                done += 1
    except (ZeroDivisionError, WeightsError) as error:
        return done, f"{type(error).__name__}: {error}"
    return done, None


@pytest.mark.parametrize("fails_at", [{}, {0: 0}, {1: 1}, {2: 2}, {0: 1, 2: 1}, {0: 2, 1: 0}], ids=str)
def test_where_one_rank_fails_all_stop_at_the_next_meeting(ranks, fails_at):
    first = min(fails_at.values(), default=3)
    failing = [rank for rank, step in fails_at.items() if step == first]
    for rank, outcome in enumerate(ranks(3).run(worked, fails_at, timeout_s=PATIENCE_S)):
        if rank in failing:
            want = f"ZeroDivisionError: rank {rank} divided by zero"
        else:
            story = f"rank {rank} stops too: rank {min(failing, default=0)} divided by zero"
            want = f"WeightsError: the work failed on rank {min(failing, default=0)}, so {story}"
        assert outcome == (first, want if fails_at else None)


# --- options that mean nothing


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"units": [3]}, "units=3"),
        ({"units": 3}, "units=3"),
        ({"prefetch_bytes": -1}, "prefetch_bytes=-1"),
        ({"prefetch_bytes": "1GB"}, "prefetch_bytes='1GB'"),
        ({"mesh": "x"}, "mesh='x'"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options, word):
    with pytest.raises(OnefoldError, match=word):
        onefold.shard(Stack(), onefold.ZERO_3, **options)


@pytest.mark.parametrize("units", [nn.Linear, "blocks.*"], ids=str)
def test_one_unit_choice_needs_no_list(units):
    model = onefold.shard(build(Stack), onefold.ZERO_3, units=units)
    model(torch.ones(3, 4)).sum().backward()


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(OnefoldError, match="inference_mode"):
        onefold.shard(Stack(), onefold.ZERO_1)
