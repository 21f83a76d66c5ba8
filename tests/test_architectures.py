"""Promise: an architecture of any kind trains sharded as it does in plain PyTorch.

Every model has blocks in a ModuleList or Sequential where such models have them, so units really form under ZERO_3.
"""

import collections
import dataclasses
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from models import WIDTH, Block, Stack, sequential
from pairs import pairwise
from plans import PLANS
from ranks import Case, squared, train

# --- convolutions and batch norm


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return F.relu_(x + self.second(F.relu(self.norm(self.first(x)))))


class ResNet(nn.Module):
    """Batch statistics are each rank's own, as without SyncBatchNorm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(*(Residual(4) for _ in range(3)))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    """Skips that join distant blocks; transposed convolutions; blocks of different sizes."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 4, 2, 2), nn.ConvTranspose2d(8, 1, 2, 2)])
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x):
        first = torch.tanh(self.down[0](x))
        second = self.norm(self.down[1](first))
        return self.up[1](torch.cat([self.up[0](second), first], 1))


def images(model, turn):
    out = model(turn.randn(3, 1, 8, 8))
    out.pow(2).mean().backward()


# --- recurrence


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.body = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 7)

    def forward(self, tokens):
        states, _ = self.body(self.table(tokens))
        return self.head(states)


class StackedLSTM(nn.Module):
    """One LSTM a block: its list of flat weights aliases the parameters of a unit."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


class Unrolled(nn.Module):
    """Cells called once per time step, layer inside time: every unit comes round many times a pass."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.cells = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, tokens):
        states = [torch.zeros(tokens.shape[0], WIDTH) for _ in self.cells]
        outputs = []
        for x in self.table(tokens).unbind(1):
            for index, cell in enumerate(self.cells):
                x = states[index] = cell(x, states[index])
            outputs.append(self.head(x))
        return torch.stack(outputs, 1)


def next_token(model, turn):
    tokens = turn.randint(7, 3, 5)
    F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()


# --- graphs


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Linear(2 * WIDTH, WIDTH)
        self.update = nn.GRUCell(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, nodes, source, target):
        sent = torch.relu(self.message(torch.cat([nodes[source], nodes[target]], -1)))
        received = torch.zeros_like(nodes).index_add(0, target, sent)
        return self.update(received * self.scale, nodes)


class GraphNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.rounds = nn.ModuleList(Messages() for _ in range(3))
        self.read_out = nn.Linear(WIDTH, 1)

    def forward(self, nodes, edges):
        nodes = self.embed(nodes)
        for each in self.rounds:
            nodes = each(nodes, *edges)
        return self.read_out(nodes.sum(0))


def graph(model, turn):
    num_nodes = 4 + turn.rank  # graphs differ in size over the ranks
    model(turn.randn(num_nodes, 4), turn.randint(num_nodes, 2, 9)).pow(2).sum().backward()


# --- attention of torch itself


class Encoder(nn.Module):
    def __init__(self, norm_first=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True, norm_first=norm_first)
        self.table = nn.Embedding(7, WIDTH)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, tokens):
        return self.head(self.body(self.table(tokens)))


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.head(self.body(x, x.flip(1)))


class Attention(nn.Module):
    """Calls nn.MultiheadAttention, which reads the weights of its child without calling it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attend(y, y, y, need_weights=False)[0]


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(WIDTH, 7, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def with_evaluation(model, turn):
    """Evaluation before training: in eval mode torch's encoder takes a fused path that reads all weights itself."""
    tokens = turn.randint(7, 2, 5)
    model.eval()
    with torch.no_grad():
        weight = model(tokens).abs().mean()
    model.train()
    (F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) * (1 + weight)).backward()


# --- weights that are shared, derived, or held in unusual places


class TiedHead(Attentive):
    def __init__(self):
        super().__init__()
        self.head.weight = self.table.weight


class SharedBlock(Stack):
    """One block at every depth."""

    def __init__(self):
        super().__init__(depth=1)
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


class TiedBlocks(Stack):
    """Blocks of their own that share one matrix."""

    def __init__(self):
        super().__init__()
        for block in self.blocks[1:]:
            block.up.weight = self.blocks[0].up.weight


class TiedAcross(Stack):
    """A block shares a matrix with the root, under another name."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(WIDTH, 2 * WIDTH)
        self.extra.weight = self.blocks[1].up.weight

    def forward(self, x):
        return super().forward(x) + self.extra(self.embed(x)).mean()


def normalized(kind):
    model = Stack()
    for block in model.blocks:
        kind(block.up)
    return model


class Bare(nn.Module):
    """A block of parameters without modules, in lists and dicts."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(2))
        self.named = nn.ParameterDict({"scale": torch.ones(WIDTH), "shift": torch.zeros(WIDTH)})

    def forward(self, x):
        for weight in self.steps:
            x = torch.tanh(x @ weight)
        return x * self.named["scale"] + self.named["shift"]


Named = collections.namedtuple("Named", ["logits", "hidden"])


@dataclasses.dataclass
class Data:
    logits: torch.Tensor
    hidden: list


class Returning(Stack):
    """Takes keywords and a dict; returns what `kind` makes of its tensors."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, *, batch, scale=1.0):
        x = self.embed(batch["x"] * scale)
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return self.kind(self.head(x), hidden)


def as_dict(logits, hidden):
    return collections.OrderedDict(logits=logits, hidden=hidden)


def returned(model, turn):
    out = model(batch={"x": turn.randn(3, 4)}, scale=0.5)
    logits, hidden = (out["logits"], out["hidden"]) if isinstance(out, dict) else (out.logits, out.hidden)
    (logits.pow(2).mean() + hidden[1].pow(2).mean()).backward()


def lone_linear():
    return nn.Linear(4, 2)


class Nested(nn.Module):
    """Lists within lists: stages of blocks."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))

    def forward(self, x):
        for stage in self.stages:
            for block in stage:
                x = x + torch.tanh(block(x))
        return x


CASES = {
    "resnet": Case(model=ResNet, work=images),
    "unet": Case(model=UNet, work=images),
    "lstm": Case(model=partial(Recurrent, nn.LSTM), work=next_token, steps=3),
    "gru": Case(model=partial(Recurrent, nn.GRU), work=next_token),
    "stacked lstm": Case(model=StackedLSTM, work=next_token, optimizer="adamw"),
    "unrolled cells": Case(model=Unrolled, work=next_token, optimizer="adamw"),
    "graph network": Case(model=GraphNetwork, work=graph),
    "transformer encoder": Case(model=Encoder, work=with_evaluation, optimizer="adamw"),
    "pre-norm encoder": Case(model=partial(Encoder, norm_first=True), work=next_token),
    "encoder and decoder": Case(model=EncoderDecoder, work=with_evaluation),
    "multihead attention": Case(model=Attentive, work=with_evaluation, optimizer="adamw"),
    "tied head": Case(model=TiedHead, work=next_token, optimizer="adamw"),
    "one block at every depth": Case(model=SharedBlock, work=squared, optimizer="adamw"),
    "blocks share a matrix": Case(model=TiedBlocks, work=squared, optimizer="adamw"),
    "block and root share": Case(model=TiedAcross, work=squared),
    "weight norm": Case(model=partial(normalized, nn.utils.parametrizations.weight_norm), work=squared),
    "spectral norm": Case(model=partial(normalized, nn.utils.parametrizations.spectral_norm), work=squared),
    "orthogonal": Case(model=partial(normalized, nn.utils.parametrizations.orthogonal), work=squared),
    "old spectral norm": Case(model=partial(normalized, nn.utils.spectral_norm), work=squared),
    "bare parameters": Case(model=partial(Stack, block=Bare), work=squared, optimizer="momentum"),
    "returns a named tuple": Case(model=partial(Returning, Named), work=returned),
    "returns a dict": Case(model=partial(Returning, as_dict), work=returned),
    "returns a dataclass": Case(model=partial(Returning, Data), work=returned),
    "one linear layer": Case(model=lone_linear, work=squared),
    "sequential": Case(model=sequential, work=squared, optimizer="adagrad"),
    "nested lists": Case(model=Nested, work=squared, optimizer="momentum"),
    "stack of blocks": Case(model=partial(Stack, block=Block), work=squared, optimizer="adagrad", steps=4),
}


@pairwise(name=list(CASES), plan=PLANS, num_ranks=(1, 2))
def test_architectures(ranks, name, plan, num_ranks):
    ranks(num_ranks).run(train, CASES[name], plan)
