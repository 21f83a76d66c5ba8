"""Promise: models made under `zero.Init` have the values they would have without it, and no rank holds one whole.

`GatheredParameters` reads and writes them, before and after `initialize`, the same under every plan.
"""

import copy

import pytest
import torch
from torch import nn

import onefold.deepspeed as deepspeed
from onefold import nursery
from onefold.deepspeed import zero
from onefold.errors import ConfigError, OnefoldError, ReleasedParameterError, ShardError
from onefold.released import metadata_only
from ranks import one_and_two_ranks

SETTINGS = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "eps": 1e-3}}}
LEVELS = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "offload3": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


class Block(nn.Module):
    """Writes weights of its children, copies one, and holds parameters of its own."""

    def __init__(self, width=6):
        super().__init__()
        self.up = nn.Linear(width, width)
        nn.init.eye_(self.up.weight)
        with torch.no_grad():
            self.up.weight.add_(0.1 * torch.randn(width, width))
        self.twin = copy.deepcopy(self.up)
        nn.init.zeros_(self.twin.bias)
        self.mix = nn.MultiheadAttention(width, 2, batch_first=True)
        self.scale = nn.Parameter(torch.randn(width))
        self.shifts = nn.ParameterList([torch.randn(width) for _ in range(2)])
        self.empty = nn.Parameter(torch.empty(0, width))
        self.register_buffer("ramp", torch.arange(width) / width)

    def forward(self, x):
        x = self.twin(torch.tanh(self.up(x))) * self.scale + self.shifts[0] + self.shifts[1] * self.ramp
        return x + self.mix(x, x, x, need_weights=False)[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 2)
        self.recur = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.recur(self.layers(x))[0] * self.frozen)


def loss_of(model, rank, step):
    words = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def made(make, seed, **options):
    torch.manual_seed(seed)
    with zero.Init(**options):
        return make()


def values_of(model):
    with zero.GatheredParameters(list(model.parameters())):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(value, wanted[name]) for name, value in found.items())


def plain(seed=3):
    torch.manual_seed(seed)
    return Net()


def make_and_compare(rank, num_ranks, most):
    bound, nursery._AWAKE_BYTES = nursery._AWAKE_BYTES, most
    try:
        model = made(Net, 3 + rank)  # rank 0's values are everyone's
    finally:
        nursery._AWAKE_BYTES = bound
    params = list(model.parameters())
    with metadata_only():
        held = sum(param.untyped_storage().nbytes() for param in params)
        kept = [param.__dict__["_onefold_kept"].part for param in params]
        fair = [-(-param.numel() // num_ranks) for param in params]
    assert held == 0
    assert [part.numel() for part in kept] == fair
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in kept)
    return same(values_of(model), dict(plain().named_parameters())) and torch.equal(
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
    assert same(values, weights)
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
    return same(values_of(model), wanted)


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
    return view.eq(0).all().item() and same(values_of(model), dict(plain().named_parameters()))


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
    return same(values_of(model), wanted)


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
    return same(early, wanted) and same(late, wanted)


@pytest.mark.parametrize(("level", "is_split"), [("zero3", True), ("zero3", False), ("zero2", False)])
def test_scripts_find_the_marks_of_parameters_that_rest_in_parts(ranks, level, is_split):
    assert ranks(2).run(collect, level, is_split) == [True, True]


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
