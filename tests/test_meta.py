"""Promise: a model built on the meta device gets its own initializers' values, unit by unit, the same everywhere.

Values depend on torch's seed alone, not on the number of ranks or the plan.
"""

import math

import pytest
import torch
from torch import nn

import onefold
from checks import weights
from models import on_meta
from onefold import Precision
from plans import NAMED_PLANS, PLANS, every_plan


class Scale(nn.Module):
    """A module of its own, with a parameter, a buffer, and the method that torch's layers have."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.register_buffer("ramp", torch.empty(width))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.gain, mean=1.0, std=0.1)
        with torch.no_grad():
            self.ramp.copy_(torch.arange(len(self.ramp), dtype=self.ramp.dtype))
            self.count.fill_(7)

    def forward(self, x):
        return x * self.gain + 0.01 * self.ramp


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 2, batch_first=True)
        self.scale = Scale(width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        x = self.norm(x)
        x = self.mix(x, x, x, need_weights=False)[0]
        return self.out(self.scale(x))


class Mixed(nn.Module):
    """Tokens [n, 5] to scores [n, 5, 11]: torch's layers and a module of its own, the embedding tied to the head."""

    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(self.conv(x)))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
    )


class Pair(nn.Module):
    """torch's encoder-decoder, whose outermost module initializes what the inner ones initialized before."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.inner = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.inner(x, x)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=37, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, initializer_factor=0.3)
    return T5ForConditionalGeneration(config)


MODELS = {"own and torch's": Mixed, "torch's Transformer": Pair, "GPT-2": gpt2, "Llama": llama}


class Recurrent(nn.Module):
    """torch's recurrent layers, which hold weak references to their parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.LSTM(8, 8, 2, batch_first=True), nn.LSTM(8, 8, batch_first=True)])
        self.last = nn.GRU(8, 8, batch_first=True)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return self.last(x)[0]


MODELS["recurrent"] = Recurrent
BORN = {**MODELS, "T5": t5}
"""Those of which only the values are looked at, too."""


def born(plan, make, seed=3, **options):
    torch.manual_seed(seed)
    return onefold.shard(on_meta(make), NAMED_PLANS[plan], **options)


def logits(model):
    output = model(torch.arange(10).view(2, 5))
    return getattr(output, "logits", output)


# --- the same everywhere


def values(rank, num_ranks, plan, name):
    """All tensors after birth, and how the model computes after it."""
    torch.manual_seed(100 * (rank + 1))  # only rank 0's seed counts
    model = onefold.shard(on_meta(MODELS[name]), NAMED_PLANS[plan])
    model.eval()
    with torch.no_grad():
        output = logits(model)
    return {**weights(model), "(output)": output}


def values_of_every_plan(rank, num_ranks, name):
    return {plan: values(rank, num_ranks, plan, name) for plan in PLANS}


@pytest.mark.parametrize("name", list(MODELS))
def test_values_depend_on_neither_ranks_nor_plan(ranks, name):
    want = ranks(1).run(values, "zero_0", name)[0]
    assert all(tensor.isfinite().all() for tensor in want.values())
    for num_ranks in (1, 2, 3):
        for found in ranks(num_ranks).run(values_of_every_plan, name):
            for plan in PLANS:
                assert found[plan].keys() == want.keys()
                # Bits of an output may depend on where its operands lie in memory; its value does not.
                assert torch.allclose(found[plan]["(output)"], want["(output)"], rtol=1e-5, atol=1e-6)
                wrong = [key for key in want if key != "(output)" and not torch.equal(found[plan][key], want[key])]
                assert (num_ranks, plan, wrong) == (num_ranks, plan, [])


def twins(rank, num_ranks, seed, other):
    first, second = (weights(born("zero_3", Mixed, each)) for each in (seed, other))
    return [name for name in first if torch.equal(first[name], second[name])]


def test_values_follow_the_seed(ranks):
    constant = [name for name, tensor in twins_of_one().items() if "bias" in name or "norm" in name or "ramp" in name]
    for same in ranks(2).run(twins, 1, 2):
        assert set(same) <= {*constant, *(name for name in same if "count" in name or "num_batches" in name)}
    for same in ranks(2).run(twins, 1, 1):
        assert set(same) == set(twins_of_one())


def twins_of_one():
    model = Mixed()
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])


def random_state(rank, num_ranks):
    """Whether birth leaves torch's random numbers as they were."""
    torch.manual_seed(5)
    born("zero_3", Mixed, 5)
    return torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_birth_draws_nothing_from_the_callers_random_numbers(ranks):
    assert ranks(2).run(random_state) == [True, True]


# --- the right values


def born_and_built(rank, num_ranks, name):
    """Means and spreads of every tensor born on meta, and of the same model built on the CPU."""
    model = born("zero_3", BORN[name])
    torch.manual_seed(3)
    built = BORN[name]()
    with onefold.gathered(model):
        pairs = [
            (key, tensor.detach().double(), other.detach().double())
            for (key, tensor), (_, other) in zip(_named(model), _named(built), strict=True)
        ]
    return [
        (key, got.numel(), (got.mean().item(), _spread(got)), (want.mean().item(), _spread(want)))
        for key, got, want in pairs
    ]


def _named(model):
    return [*model.named_parameters(), *model.named_buffers()]


def _spread(tensor):
    return tensor.std(correction=0).item()


@pytest.mark.parametrize("name", list(BORN))
def test_values_are_those_of_the_models_own_initializers(ranks, name):
    for key, numel, (mean, spread), (want_mean, want_spread) in ranks(2).run(born_and_built, name)[0]:
        if want_spread == 0:  # a constant
            assert (key, mean, spread) == (key, want_mean, 0)
            continue
        assert (key, mean) == (key, pytest.approx(want_mean, abs=6 * want_spread / math.sqrt(numel)))
        assert (key, spread) == (key, pytest.approx(want_spread, rel=4 / math.sqrt(numel)))


def exact_buffers(rank, num_ranks, name):
    model, built = born("zero_3", MODELS[name]), MODELS[name]()
    return [
        key
        for (key, buffer), (_, want) in zip(model.named_buffers(), built.named_buffers(), strict=True)
        if buffer.dtype != want.dtype or not torch.equal(buffer, want)
    ]


@pytest.mark.parametrize("name", list(MODELS))
def test_buffers_have_the_values_of_a_model_built_elsewhere(ranks, name):
    assert ranks(2).run(exact_buffers, name) == [[], []]


def ties(rank, num_ranks, plan, name):
    model = born(plan, MODELS[name])
    one, other = _tied(model)
    logits(model).sum().backward()
    return one is other


def _tied(model):
    if isinstance(model, Mixed):
        return model.embed.weight, model.head.weight
    return model.transformer.wte.weight, model.lm_head.weight


@pytest.mark.parametrize("name", ["own and torch's", "GPT-2"])
@every_plan
def test_tied_parameters_stay_one(ranks, name, plan):
    assert ranks(2).run(ties, plan, name) == [True, True]


def rounded(rank, num_ranks, dtype):
    """Parameters that are not fp32 values rounded once."""
    exact, low = weights(born("zero_3", gpt2)), weights(born("zero_3", gpt2, precision=Precision(params=dtype)))
    return [name for name in exact if not torch.equal(exact[name].to(low[name].dtype), low[name])]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_values_are_drawn_in_fp32_and_rounded_once(ranks, dtype):
    assert ranks(2).run(rounded, dtype) == [[], []]


def trained(rank, num_ranks, name):
    """Parameters that end otherwise under some plan than under ZERO_0."""
    ends = {}
    for plan in PLANS:
        model = born(plan, MODELS[name])
        model.eval()
        optimizer = onefold.AdamW(model, lr=1e-2)
        for _ in range(2):
            logits(model).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends[plan] = weights(model)
    want = ends["zero_0"]
    return {plan: [key for key in want if not torch.equal(end[key], want[key])] for plan, end in ends.items()}


@pytest.mark.parametrize("name", list(MODELS))
def test_a_born_model_trains_alike_under_every_plan(ranks, name):
    assert ranks(2).run(trained, name) == [{plan: [] for plan in PLANS}] * 2


def partly(rank, num_ranks, plan):
    """A model of which one part already has values (a loaded encoder, say): they stay."""
    model = on_meta(Mixed)
    torch.manual_seed(9)
    model.blocks[1] = Block()
    want = {name: tensor.detach().clone() for name, tensor in model.blocks[1].state_dict().items()}
    model = onefold.shard(model, NAMED_PLANS[plan])
    found = weights(model)
    return [name for name in want if not torch.equal(found[f"blocks.1.{name}"], want[name])], all(
        tensor.isfinite().all() for tensor in found.values()
    )


@every_plan
def test_parts_that_have_values_keep_them(ranks, plan):
    assert ranks(2).run(partly, plan) == [([], True)] * 2
