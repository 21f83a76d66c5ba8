"""Promise: models made under `zero.Init` have the values they would have without it, and no rank holds one whole.

`GatheredParameters` reads and writes them, before and after `initialize`, the same under every plan.
"""

import pytest
import torch
from torch import nn

import onefold.deepspeed as deepspeed
from checks import equal
from deepspeed_models import LEVELS, SETTINGS, Net, loss_of, made, plain, values_of
from onefold.deepspeed import zero
from onefold.engine.released import metadata_only
from onefold.errors import OnefoldError
from onefold.setup import deferred_init
from plans import one_and_two_ranks


def make_and_compare(rank, num_ranks, most):
    bound, deferred_init._GATHERED_BYTES = deferred_init._GATHERED_BYTES, most
    try:
        model = made(Net, 3 + rank)  # rank 0's values are everyone's
    finally:
        deferred_init._GATHERED_BYTES = bound
    params = list(model.parameters())
    with metadata_only():
        held = sum(param.untyped_storage().nbytes() for param in params)
        kept = [param.__dict__["_onefold_owner"].part for param in params]
        fair = [-(-param.numel() // num_ranks) for param in params]
    assert held == 0
    assert [part.numel() for part in kept] == fair
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in kept)
    return equal(values_of(model), dict(plain().named_parameters())) and torch.equal(
        model.blocks[1].ramp, plain().blocks[1].ramp
    )


@one_and_two_ranks
@pytest.mark.parametrize("most", [0, 2**28])
def test_values_are_those_without_it_and_each_rank_keeps_its_part(ranks, num_ranks, most):
    assert ranks(num_ranks).run(make_and_compare, most) == [True] * num_ranks


def held(modules):
    with metadata_only():
        return sum(param.untyped_storage().nbytes() for module in modules for param in module.parameters())


def make_one_by_one(rank, num_ranks):
    built, most = [], 0
    with zero.Init():
        for _ in range(4):
            built.append(nn.Sequential(nn.Linear(16, 16)))
            most = max(most, held(built))
        nn.init.eye_(built[0][0].weight)
        woken = held(built)
    return most, woken, held(built)


def test_only_what_is_in_use_is_whole_while_a_model_is_made(ranks):
    assert ranks(2).run(make_one_by_one) == [(0, 4 * 16 * 16, 0)] * 2


def train(rank, num_ranks, level, prepare):
    """Losses and weights of two steps, of a model made in parts and of the same made whole."""
    found = []
    for make in (lambda: made(Net, 3), plain):
        model = make()
        prepare(model)
        engine = deepspeed.initialize(model=model, config=SETTINGS | {"zero_optimization": LEVELS[level]})[0]
        losses = []
        for step in range(2):
            loss = loss_of(engine, rank, step)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        found.append((losses, values_of(engine.module)))
    (losses, values), (wanted, weights) = found
    assert losses == wanted
    assert equal(values, weights)
    return losses


def as_it_is(model):
    pass


def initialize_weights(model):
    """As models do it that were written for DeepSpeed: rank 0 draws, everyone gets it."""
    for module in model.modules():
        params = list(module.parameters(recurse=False))
        with zero.GatheredParameters(params, modifier_rank=0):
            if deepspeed.comm.get_rank() == 0:
                torch.manual_seed(len(params))
                for param in params:
                    if param.dim() > 1 and param.numel():
                        nn.init.normal_(param, std=0.3)
                    param.data.add_(0.01)


@pytest.mark.parametrize(
    ("level", "prepare"), [*((level, as_it_is) for level in LEVELS), ("zero3", initialize_weights)]
)
def test_a_model_made_in_parts_trains_as_one_made_whole(ranks, level, prepare):
    first, second = ranks(2).run(train, level, prepare)
    assert first != second


def gather(rank, num_ranks, level, is_sharded):
    model = made(Net, 3)
    before = values_of(model)
    if is_sharded:
        model = deepspeed.initialize(model=model, config=SETTINGS | {"zero_optimization": LEVELS[level]})[0].module
    weight, bias = model.blocks[0].up.weight, model.blocks[0].up.bias
    with zero.GatheredParameters([weight, weight, bias], modifier_rank=1):
        weight.data.fill_(rank)
        seen = weight
    with zero.GatheredParameters(weight):
        assert weight.eq(1).all()
    assert seen is weight
    with zero.GatheredParameters(iter([bias]), modifier_rank=0, enabled=False):
        pass
    with zero.GatheredParameters([], modifier_rank=0):
        pass
    wanted = {**before, "blocks.0.up.weight": torch.ones(6, 6)}
    return equal(values_of(model), wanted)


@pytest.mark.parametrize(
    ("level", "is_sharded"), [("zero3", False), ("zero1", True), ("zero3", True), ("offload3", True)]
)
def test_what_the_modifying_rank_writes_is_kept_everywhere(ranks, level, is_sharded):
    assert ranks(2).run(gather, level, is_sharded) == [True, True]


def drop(rank, num_ranks):
    model = made(Net, 3)
    with zero.GatheredParameters(list(model.parameters())):
        model.embed.weight.data.zero_()
        view = model.embed.weight.data
    return view.eq(0).all().item() and equal(values_of(model), dict(plain().named_parameters()))


def test_without_a_modifying_rank_nothing_that_is_written_stays(ranks):
    assert ranks(2).run(drop) == [True, True]


class Careful(nn.Module):
    """Writes weights twice: on every rank, and on rank 0 with the weights gathered. Has a layer without a shape yet."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        nn.init.zeros_(self.first.weight)
        self.own = nn.Parameter(torch.zeros(3))
        with zero.GatheredParameters([self.first.weight, self.own], modifier_rank=0):
            if deepspeed.comm.get_rank() == 0:
                nn.init.eye_(self.first.weight)
                nn.init.ones_(self.own)
        self.later = nn.LazyLinear(3)

    def forward(self, x):
        return self.later(self.first(x) * self.own)


def construct(rank, num_ranks):
    with zero.Init():
        lazy = nn.Sequential(Careful())
        model = nn.Linear(3, 3, bias=False)
        nn.init.eye_(model.weight)
        engine = deepspeed.initialize(model=model, config=SETTINGS | {"zero_optimization": {"stage": 3}})[0]
    with zero.GatheredParameters(list(model.parameters())):
        assert torch.equal(model.weight, torch.eye(3))
    assert torch.equal(engine(torch.ones(2, 3)), torch.ones(2, 3))
    with zero.GatheredParameters([lazy[0].first.weight, lazy[0].own]):
        assert isinstance(lazy[0].later.weight, nn.parameter.UninitializedParameter)
        return torch.equal(lazy[0].first.weight, torch.eye(3)) and lazy[0].own.eq(1).all().item()


def test_constructors_may_gather_and_models_be_sharded_inside(ranks):
    assert ranks(2).run(construct) == [True, True]


def fail_inside(rank, num_ranks):
    model = made(Net, 3)
    try:
        with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if rank == 1:
                raise KeyError("no such weight")
    except (KeyError, OnefoldError) as error:
        return type(error).__name__, str(error)


def test_a_rank_that_fails_inside_does_not_leave_others_waiting(ranks):
    first, second = ranks(2).run(fail_inside)
    assert second == ("KeyError", "'no such weight'")
    assert first[0] == "OnefoldError"
    assert "rank 1 failed" in first[1]


def convert(rank, num_ranks):
    model = plain()
    zero.Init(module=model, config_dict_or_path={"bf16": {"enabled": True}}, remote_device="cpu")
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    wanted = {name: param.detach().bfloat16() for name, param in plain().named_parameters()}
    with zero.Init(enabled=False):
        assert type(nn.Linear(1, 1).weight) is nn.Parameter
    with zero.Init(dtype=torch.float64):
        assert nn.Sequential(nn.Linear(1, 1))[0].weight.dtype == torch.float64
    return equal(values_of(model), wanted)


def test_a_model_that_is_made_is_split_and_the_configuration_says_the_dtype(ranks):
    assert ranks(2).run(convert) == [True, True]


def generate(rank, num_ranks):
    engine = deepspeed.initialize(model=made(Net, 3), config=SETTINGS | {"zero_optimization": LEVELS["zero3"]})[0]
    words = torch.arange(5)[None]
    with torch.no_grad(), zero.unwrap_model_for_generation(engine) as model:
        found = model(words)
    zero.register_external_parameter(engine.module, engine.module.head.weight)
    return torch.allclose(found, plain()(words), atol=1e-6)


def test_a_model_can_be_whole_for_many_forwards(ranks):
    assert ranks(2).run(generate) == [True, True]


def maybe_zero_3(param):
    """As many fine-tuning scripts collect what they save."""
    if hasattr(param, "ds_id"):
        assert param.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
        assert (param.ds_numel, param.ds_shape) == (param.numel(), param.shape)
        with zero.GatheredParameters([param]):
            assert param.ds_status == zero.ZeroParamStatus.AVAILABLE
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


def collect(rank, num_ranks, level, is_split):
    model = made(Net, 3) if is_split else plain()
    early = {name: maybe_zero_3(param) for name, param in model.named_parameters()}
    engine = deepspeed.initialize(model=model, config=SETTINGS | {"zero_optimization": LEVELS[level]})[0]
    marked = [hasattr(param, "ds_id") for param in model.parameters()]
    assert all(marked) if is_split or level == "zero3" else not any(marked)
    late = {name: maybe_zero_3(param) for name, param in engine.module.named_parameters()}
    wanted = dict(plain().named_parameters())
    return equal(early, wanted) and equal(late, wanted)


@pytest.mark.parametrize(("level", "is_split"), [("zero3", True), ("zero3", False), ("zero2", False)])
def test_scripts_find_the_marks_of_parameters_that_rest_in_parts(ranks, level, is_split):
    assert ranks(2).run(collect, level, is_split) == [True, True]
