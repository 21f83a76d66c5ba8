"""Promise: a model built on the meta device is born unit by unit, never whole, and what cannot be born is named."""

import sys

import pytest
import torch
from torch import nn

import onefold
from checks import live_bytes
from models import on_meta, wide
from onefold.errors import ShardError
from onefold.memory.buffer import Buffer
from plans import NAMED_PLANS

# --- never whole


DEPTH = 16


def bytes_on_the_way(rank, num_ranks, plan):
    """The most bytes held at any unit's birth, after it and in the middle of its move into flat buffers."""
    module, seen = sys.modules["onefold.setup.shard"], []
    materialize, bind, before = module.materialize, Buffer.bind, live_bytes()

    def materialize_and_look(*arguments):
        materialize(*arguments)
        seen.append(live_bytes() - before)

    def bind_and_look(self, params):
        bind(self, params)
        seen.append(live_bytes() - before)

    module.materialize, Buffer.bind = materialize_and_look, bind_and_look
    try:
        model = onefold.shard(on_meta(wide), NAMED_PLANS[plan], units=[nn.Linear])
    finally:
        module.materialize, Buffer.bind = materialize, bind
    return max(seen), len(seen), sum(param.numel() * 4 for param in model.parameters())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_model_is_never_whole(ranks, num_ranks):
    """Each unit adds its shards (weights only: the optimizer comes later) and, while it is born, a few times itself."""
    for peak, num_looks, whole in ranks(num_ranks).run(bytes_on_the_way, "zero_3"):
        unit = whole / DEPTH
        assert num_looks >= 2 * DEPTH
        assert peak <= whole / num_ranks + 4 * unit < whole


# --- what cannot be born


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))

    def reset_parameters(self):
        nn.init.ones_(self.first)


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.empty(3))

    def reset_parameters(self):
        pass


UNBORN = {
    "no initializer": (Bare, ["'inner.1'", "Bare", "reset_parameters", "real device"]),
    "a parameter unset": (Half, ["inner.1.second", "Half", "unset", "real device"]),
    "a buffer unset": (Silent, ["inner.1.table", "Silent", "unset", "real device"]),
}


def unborn(rank, num_ranks, plan, name):
    with torch.device("meta"):
        model = nn.Sequential()
        model.add_module("inner", nn.Sequential(nn.Linear(3, 3), UNBORN[name][0]()))
    try:
        onefold.shard(model, NAMED_PLANS[plan])
    except ShardError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", list(UNBORN))
@pytest.mark.parametrize("plan", ["zero_0", "zero_3"])
def test_a_module_that_cannot_fill_its_tensors_is_named(ranks, plan, name):
    for message in ranks(2).run(unborn, plan, name):
        assert message is not None
        assert all(word in message for word in UNBORN[name][1]), message


def adapted(rank, num_ranks):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"]))
    try:
        onefold.shard(model, NAMED_PLANS["zero_3"])
    except ShardError as error:
        return str(error)
    return None


def test_an_adapter_made_on_meta_is_refused(ranks):
    """Its first values make it change nothing, and are lost."""
    for message in ranks(2).run(adapted):
        assert message is not None
        assert "lora_" in message
        assert "adapter" in message
