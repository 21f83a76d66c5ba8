"""Promise: every parameter trains as it would alone: idle, empty, frozen for a while, of its own dtype, of any strides.

Libraries failed here because a flat buffer saw one run of numbers where the user sees parameters.
"""

import dataclasses
from functools import partial

import torch
from torch import nn

import onefold
from models import WIDTH, Block, Stack, build
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan, one_and_two_ranks
from ranks import Case, Turn, squared, train

# --- parameters that are idle in some steps


class Heads(Stack):
    """One trunk, several heads, of which each step uses some."""

    def __init__(self):
        super().__init__(depth=2)
        self.head = nn.ModuleList(nn.Linear(WIDTH, size) for size in (1, 2, 3))

    def forward(self, x, chosen):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return sum(self.head[index](x).pow(2).mean() for index in chosen)


class Dropped(Stack):
    """Leaves out whole blocks."""

    def forward(self, x, kept):
        x = self.embed(x)
        for index in kept:
            x = self.blocks[index](x)
        return self.head(x).pow(2).mean()


HEADS = {
    "alternate": lambda step: [step % 2],
    "first late": lambda step: [0] if step > 1 else [1],
    "only once": lambda step: [1, 2] if step == 1 else [2],
    "never": lambda step: [0],
}
BLOCKS = {
    "one dropped in turn": lambda step: [index for index in range(3) if index != step % 3],
    "first always dropped": lambda step: [1, 2],
    "one at a time": lambda step: [step % 3],
}


def with_heads(model, turn, choice):
    model(turn.randn(3, 4), HEADS[choice](turn.step)).backward()


def with_blocks(model, turn, choice):
    model(turn.randn(3, 4), BLOCKS[choice](turn.step)).backward()


IDLE = {
    **{f"heads: {name}": Case(model=Heads, work=partial(with_heads, choice=name), steps=5) for name in HEADS},
    **{f"blocks: {name}": Case(model=Dropped, work=partial(with_blocks, choice=name), steps=5) for name in BLOCKS},
}


@pairwise(name=list(IDLE), optimizer=("adamw", "momentum"), plan=PLANS, num_ranks=(1, 2))
def test_an_idle_parameter_neither_decays_nor_advances(ranks, name, optimizer, plan, num_ranks):
    case = dataclasses.replace(IDLE[name], optimizer=optimizer)
    ranks(num_ranks).run(train, case, plan)


def names_without_gradient(rank, num_ranks, plan):
    model = onefold.shard(build(Heads), NAMED_PLANS[plan])
    with_heads(model, Turn(rank, 0, sharded=True), "never")
    with onefold.gathered(model):
        return [name for name, parameter in model.named_parameters() if parameter.grad is None]


@every_plan
@one_and_two_ranks
def test_no_gradient_reads_as_none(ranks, plan, num_ranks):
    unused = ["head.1.weight", "head.1.bias", "head.2.weight", "head.2.bias"]
    assert ranks(num_ranks).run(names_without_gradient, plan) == [unused] * num_ranks


# --- parameters with few or no elements


class Odd(nn.Module):
    """A block whose parameters have no dims, no elements, or one."""

    def __init__(self, trained=True, width=WIDTH):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0))
        self.rows = nn.Parameter(torch.empty(0, 8))
        self.deep = nn.Parameter(torch.empty(3, 0, 2))
        self.one = nn.Parameter(torch.ones(1, 1, 1), requires_grad=trained)
        self.narrow = nn.Linear(width, 0, bias=False)

    def forward(self, x):
        nothing = self.none.sum() + self.rows.sum() + self.deep.sum() + self.narrow(x).sum()
        return torch.tanh(x * self.scale + self.one.squeeze()) + nothing


class Scalars(nn.Module):
    """Fewer elements in all than there are ranks."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.shift


class Between(Stack):
    """Parameters of odd sizes around blocks of ordinary ones."""

    def __init__(self):
        super().__init__()
        self.first = Odd(width=4)
        self.count = nn.Parameter(torch.tensor(2.0))
        self.last = nn.Parameter(torch.ones(0))

    def forward(self, x):
        return super().forward(self.first(x)) * self.count + self.last.sum()


SIZES = {
    "in every block": partial(Stack, block=Odd),
    "frozen too": partial(Stack, block=partial(Odd, trained=False)),
    "around the blocks": Between,
    "fewer than ranks": Scalars,
}


@pairwise(sizes=list(SIZES), plan=PLANS, num_ranks=(1, 2, 3))
def test_parameters_with_few_or_no_elements(ranks, sizes, plan, num_ranks):
    ranks(num_ranks).run(train, Case(model=SIZES[sizes], work=squared, optimizer="adamw"), plan)


# --- frozen and unfrozen after shard()


def partly_frozen(*parts):
    model = Stack()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(part) for part in parts))
    return model


def switch(model, step, changes):
    for part, trained in changes.get(step, {}).items():
        for name, parameter in model.named_parameters():
            if name.startswith(part):
                parameter.requires_grad_(trained)


def switched(frozen, changes, optimizer):
    thaws = any(changes_of_a_step[part] for changes_of_a_step in changes.values() for part in changes_of_a_step)
    return Case(
        model=partial(partly_frozen, *frozen),
        work=squared,
        before=partial(switch, changes=changes),
        optimizer=optimizer,
        steps=4,
        refusal="frozen when onefold.shard was called" if thaws else None,
    )


SWITCHES = {
    "a block is unfrozen": (("blocks.0",), {1: {"blocks.0": True}}),
    "a bias is unfrozen": (("blocks.1.up.bias",), {2: {"blocks.1.up.bias": True}}),
    "all but the head is unfrozen": (("embed", "blocks"), {1: {"embed": True, "blocks": True}}),
    "gradual unfreezing": (("blocks",), {1: {"blocks.2": True}, 2: {"blocks.1": True}, 3: {"blocks.0": True}}),
    "a block is frozen": ((), {1: {"blocks.1": False}}),
    "one weight is frozen": ((), {2: {"blocks.1.up.weight": False}}),
    "turns": (("head",), {k: {"head": k % 2 == 1, "blocks": k % 2 == 0} for k in range(4)}),
}


@pairwise(name=list(SWITCHES), optimizer=("sgd", "adamw"), plan=PLANS, num_ranks=(1, 2))
def test_freezing_after_shard_counts_and_unfreezing_is_refused(ranks, name, optimizer, plan, num_ranks):
    ranks(num_ranks).run(train, switched(*SWITCHES[name], optimizer), plan)


# --- parameters of several dtypes


class Mixed(nn.Module):
    """Computes in `dtype` beside a low-rank adapter in fp32."""

    def __init__(self, dtype, trained):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.base = nn.Linear(WIDTH, WIDTH).to(dtype).requires_grad_(trained)
        self.lora_a = nn.Linear(WIDTH, 2, bias=False)
        self.lora_b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.base(hidden.to(self.base.weight.dtype)).float() + self.lora_b(self.lora_a(hidden))


def with_wide_head(dtype):
    model = Stack()
    model.blocks.to(dtype)
    model.embed.register_forward_hook(lambda module, inputs, output: output.to(dtype))
    model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    return model


DTYPES = {
    "frozen bf16": (partial(Stack, block=partial(Mixed, torch.bfloat16, False)), 1e-5),
    "frozen fp16": (partial(Stack, block=partial(Mixed, torch.float16, False)), 1e-5),
    "trained bf16": (partial(Stack, block=partial(Mixed, torch.bfloat16, True)), 2e-2),
    "trained fp64": (partial(Stack, block=partial(Mixed, torch.float64, True)), 1e-5),
    "fp64 blocks": (partial(with_wide_head, torch.float64), 1e-5),
    "bf16 blocks": (partial(with_wide_head, torch.bfloat16), 3e-2),
}


@pairwise(dtypes=list(DTYPES), plan=PLANS, num_ranks=(1, 2))
def test_parameters_keep_their_own_dtypes(ranks, dtypes, plan, num_ranks):
    model, tolerance = DTYPES[dtypes]
    ranks(num_ranks).run(train, Case(model=model, work=squared, tolerance=tolerance), plan)


# --- parameters of any strides


def transposed():
    return torch.randn(WIDTH, 3).t()


def permuted():
    return torch.randn(2, 3, 4).permute(2, 0, 1)


def channels_last():
    return torch.randn(1, 4, 2, 3).to(memory_format=torch.channels_last)


def rows_of_a_larger_tensor():
    return torch.randn(10, 3)[2:7]


def columns_of_a_larger_tensor():
    return torch.randn(5, 10)[:, 1::3]


class Strided(nn.Module):
    """A block whose parameter has the strides under test, and takes part by index."""

    def __init__(self, make):
        super().__init__()
        self.strided = nn.Parameter(make())
        self.block = Block()

    def forward(self, x):
        coefficients = torch.arange(float(self.strided.numel())).view(self.strided.shape) / self.strided.numel()
        return self.block(x) + (self.strided * coefficients).mean() * x.mean()


class Sliced(nn.Module):
    """Query, key and value weights cut from one storage."""

    def __init__(self):
        super().__init__()
        whole = torch.randn(3 * WIDTH, WIDTH) / WIDTH
        self.q, self.k, self.v = (nn.Parameter(part) for part in whole.chunk(3))

    def forward(self, x):
        return x + torch.tanh(x @ self.q.t()) * (x @ self.k.t()) + x @ self.v.t()


class Picture(nn.Module):
    """Convolutions in channels_last."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.first(x.view(-1, 1, 2, 2).to(memory_format=torch.channels_last))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.mean()


MAKERS = (transposed, permuted, channels_last, rows_of_a_larger_tensor, columns_of_a_larger_tensor)
STRIDES = {
    **{make.__name__: partial(Stack, block=partial(Strided, make)) for make in MAKERS},
    "slices of one storage": partial(Stack, block=Sliced),
    "convolutions": Picture,
}


@pairwise(strides=list(STRIDES), plan=PLANS, num_ranks=(1, 2))
def test_parameters_of_any_strides(ranks, strides, plan, num_ranks):
    ranks(num_ranks).run(train, Case(model=STRIDES[strides], work=squared), plan)


# --- parameters of a class of their own


class Marked(nn.Parameter):
    """What scripts and libraries make to tell parameters apart."""

    @property
    def mark(self):
        return "marked"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.LSTM(4, 4, batch_first=True) for _ in range(2))
        self.out = nn.Linear(4, 4)
        for param in self.parameters():
            param.__class__ = Marked

    def forward(self, x):
        for block in self.blocks:
            x = block(x)[0]
        assert self.out.weight.mark == "marked"
        return self.out(x).pow(2).mean()


def in_sequences(model, turn):
    model(turn.randn(2, 3, 4)).backward()


@every_plan
def test_parameters_of_a_class_of_their_own(ranks, plan):
    ranks(2).run(train, Case(model=Recurrent, work=in_sequences), plan)


# --- frozen parameters


def frozen_of(dtype):
    model = Stack()
    values = torch.arange(24).view(4, 6) % 15
    model.table = nn.Parameter(values.to(dtype), requires_grad=False)
    model.register_buffer("counts", (values + 1).to(dtype))
    return model


def odd_dtype(rank, num_ranks, plan, dtype):
    torch.manual_seed(rank)
    model = onefold.shard(frozen_of(dtype), NAMED_PLANS[plan], units=[Block])
    want = torch.arange(24).view(4, 6) % 15
    with onefold.gathered(model):
        assert torch.equal(model.table.to(torch.int64), want)
    assert torch.equal(model.counts.to(torch.int64), want + 1)


@pairwise(dtype=(torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64), plan=PLANS, num_ranks=(1, 2))
def test_frozen_parameters_of_any_dtype(ranks, plan, num_ranks, dtype):
    ranks(num_ranks).run(odd_dtype, plan, dtype)
