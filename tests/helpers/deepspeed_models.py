"""Owns the model of the tests of `zero`: its constructors do to their weights what constructors do."""

import copy

import torch
from torch import nn

from onefold.deepspeed import zero

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


def plain(seed=3):
    torch.manual_seed(seed)
    return Net()
