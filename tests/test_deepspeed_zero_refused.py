"""Promise: what cannot be done with parameters that rest in parts is refused by name, with the way out."""

import copy

import pytest
import torch
from torch import nn

import onefold.deepspeed as deepspeed
from deepspeed_models import SETTINGS, Net, made
from onefold.deepspeed import zero
from onefold.errors import ConfigError, OnefoldError, ReleasedParameterError, ShardError

READS = {
    "a sum": lambda model: model.embed.weight.sum(),
    "data": lambda model: model.embed.weight.data,
    "a move": lambda model: model.to(torch.float64),
    "a copy": copy.deepcopy,
    "a state dict": lambda model: model.state_dict()["embed.weight"].add(1),
    "a forward": lambda model: model(torch.arange(5)[None]),
}


def read_outside(rank, num_ranks, what):
    READS[what](made(Net, 3))


@pytest.mark.parametrize("what", READS)
def test_reading_what_rests_in_parts_is_refused_by_name(ranks, what):
    with pytest.raises(ReleasedParameterError, match=r"parameter '\w+\.\w+' \[.*zero\.GatheredParameters"):
        ranks(1).run(read_outside, what)


def shown(rank, num_ranks):
    return repr(made(Net, 3).embed.weight)


def test_what_rests_in_parts_can_be_shown(ranks):
    assert ranks(2).run(shown) == ["Parameter containing:\n<released parameter 'Embedding.weight' [11, 6]>"] * 2


def nest(rank, num_ranks):
    model = made(Net, 3)
    with zero.GatheredParameters(model.embed.weight), zero.GatheredParameters(model.head.weight):
        pass


def read_another(rank, num_ranks):
    with zero.Init():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with zero.GatheredParameters(model[0].weight, modifier_rank=0):
            nn.init.zeros_(model[1].weight)


def gather_meta(rank, num_ranks):
    with zero.GatheredParameters(nn.Linear(2, 2, device="meta").weight, modifier_rank=0):
        pass


REFUSALS = {
    "a context in another": (nest, "is gathered already"),
    "another parameter inside": (read_another, "not gathered"),
    "a parameter on meta": (gather_meta, "meta device"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_gathering_what_cannot_be_is_refused(ranks, case):
    act, message = REFUSALS[case]
    with pytest.raises(OnefoldError, match=message):
        ranks(1).run(act)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mpu": object()}, "over all ranks"),
        ({"data_parallel_group": object()}, "over all ranks"),
        ({"zero_quantized_weights": True}, "never quantizes"),
        ({"remote_device": "tpu"}, "remote_device"),
    ],
    ids=["mpu", "group", "quantized", "device"],
)
def test_arguments_that_ask_for_what_there_is_not_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        zero.Init(**options)


def test_whole_parameters_are_left_alone():
    model = nn.Linear(2, 2)
    with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.weight.data.fill_(2)
    assert model.weight.eq(2).all()


def test_external_parameters_have_to_be_parameters():
    with pytest.raises(ConfigError, match=r"torch\.nn\.Parameter"):
        zero.register_external_parameter(nn.Linear(1, 1), torch.ones(1))


def shard_twice(rank, num_ranks):
    model = deepspeed.initialize(model=made(Net, 3), config=SETTINGS | {"zero_optimization": {"stage": 3}})[0].module
    deepspeed.initialize(model=model, config=SETTINGS)


def test_a_sharded_model_is_still_known_as_one(ranks):
    with pytest.raises(ShardError, match="already sharded"):
        ranks(1).run(shard_twice)
