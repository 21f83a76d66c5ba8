"""Promise: a plan decides where bytes rest, never what they are.

In fp32 every plan, on any number of ranks, ends with the very bits of plain replicated PyTorch; in 16 bits all plans
end with the same bits. So does every choice of units.
"""

import fnmatch
import functools

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import onefold
from checks import differing, weights
from models import build
from onefold import DynamicLossScale, Precision
from plans import NAMED_PLANS, PLANS, every_plan

STEPS, MICRO, ROWS = 5, 2, 3
LIMIT = 0.05
"""Every gradient norm here is larger, so clipping bites in each step."""
NO_DECAY = ("*bias", "gain", "embed.weight")
ADAMW = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.3}


class Odd(nn.Module):
    """A layer whose sizes are no multiple of anything."""

    def __init__(self, width=7, hidden=13):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Small(nn.Module):
    """Tokens [n, 3] to scores [n, 3, 5]: blocks, an embedding, a head, and a parameter of the root's own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.gain = nn.Parameter(torch.full((1, 1, 7), 0.9))
        self.blocks = nn.ModuleList(Odd() for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, tokens):
        x = self.embed(tokens) * self.gain
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(11, (ROWS, 3), generator=generator), torch.randn(ROWS, 3, 5, generator=generator)


def loss_of(model, step, micro, rank):
    tokens, targets = batch(step, micro, rank)
    return (model(tokens).float() - targets).square().mean() / MICRO


def decayed(name):
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in NO_DECAY)


def schedule(optimizer):
    return LambdaLR(optimizer, lambda step: 0.5**step)


def train(rank, plan, precision=None, make_optimizer=None, **options):
    """Five steps sharded: (weights, norms before clipping)."""
    model = onefold.shard(build(Small), NAMED_PLANS[plan], precision=precision, **options)
    make_optimizer = make_optimizer or functools.partial(onefold.AdamW, no_decay=NO_DECAY, **ADAMW)
    optimizer = make_optimizer(model, max_grad_norm=LIMIT)
    scheduler, norms = schedule(optimizer), []
    for step in range(STEPS):
        for micro in range(MICRO - 1):
            with onefold.accumulate(model):
                loss_of(model, step, micro, rank).backward()
        loss_of(model, step, MICRO - 1, rank).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return weights(model), norms


def reference(num_ranks, make_optimizer=None):
    """The same five steps in plain PyTorch: gradients summed in rank order, then divided; (weights, norms)."""
    model = build(Small)
    optimizer = (make_optimizer or plain_adamw)(model)
    scheduler, norms = schedule(optimizer), []
    for step in range(STEPS):
        by_rank = []
        for rank in range(num_ranks):
            model.zero_grad()
            for micro in range(MICRO):
                loss_of(model, step, micro, rank).backward()
            by_rank.append([param.grad for param in model.parameters()])
        for param, *grads in zip(model.parameters(), *by_rank, strict=True):
            param.grad = functools.reduce(torch.add, grads) / num_ranks
        squares = [param.grad.double().square().sum() for param in model.parameters()]
        norms.append(float(torch.stack(squares).sum().sqrt()))
        factor = (LIMIT / (torch.tensor(norms[-1], dtype=torch.float32) + 1e-6)).clamp(max=1.0)
        for param in model.parameters():
            param.grad.mul_(factor)
        optimizer.step()
        scheduler.step()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def plain_adamw(model):
    named = list(model.named_parameters())
    groups = [
        {"params": [param for name, param in named if decayed(name)]},
        {"params": [param for name, param in named if not decayed(name)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, foreach=False, **ADAMW)


# --- fp32: the bits of plain PyTorch


def trained_and_reference(rank, num_ranks, plan):
    found, norms = train(rank, plan)
    want, want_norms = reference(num_ranks)
    return differing(found, want), norms, want_norms


@every_plan
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_fp32_is_plain_replicated_training_bit_for_bit(ranks, num_ranks, plan):
    for wrong, norms, want_norms in ranks(num_ranks).run(trained_and_reference, plan):
        assert wrong == []
        assert norms == pytest.approx(want_norms, rel=1e-12)
        assert min(norms) > LIMIT


def test_the_reference_is_not_a_standstill():
    before = dict(build(Small).named_parameters())
    after, _ = reference(2)
    assert differing(after, before) == list(before)


def test_the_number_of_ranks_matters():
    """Else equality on several ranks would not say that gradients of all ranks count."""
    assert differing(reference(1)[0], reference(2)[0])


# --- units: the same bits


UNITS = {
    "found": None,
    "the root alone": (),
    "blocks and leaves": ("embed", "head", "blocks.*"),
    "layers": (nn.Linear, nn.LayerNorm),
    "by class": (Odd,),
}


def trained_with_units(rank, num_ranks, plan, units):
    return differing(train(rank, plan, units=UNITS[units])[0], reference(num_ranks)[0])


@pytest.mark.parametrize("plan", ["zero_1", "zero_3"])
@pytest.mark.parametrize("units", list(UNITS))
def test_the_choice_of_units_changes_no_bit(ranks, units, plan):
    assert ranks(2).run(trained_with_units, plan, units) == [[], []]


# --- 16 bits: plans agree


PRECISIONS = {
    "bf16": Precision(params="bf16"),
    "bf16, whole master": Precision(params="bf16", master="fp32"),
    "bf16, reduced in fp32": Precision(params="bf16", reduce="fp32"),
    "fp16": Precision(params="fp16"),
    "fp16, fixed scale": Precision(params="fp16", loss_scale=256.0),
    # starts so high that some steps are skipped
    "fp16, dynamic scale": Precision(params="fp16", loss_scale=DynamicLossScale(initial=2.0**18, hysteresis=1)),
}


def trained_under_every_plan(rank, num_ranks, precision):
    return {plan: train(rank, plan, PRECISIONS[precision]) for plan in PLANS}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_plans_agree_bit_for_bit_in_16_bits(ranks, precision, num_ranks):
    results = ranks(num_ranks).run(trained_under_every_plan, precision)
    want, want_norms = results[0]["zero_0"]
    before = dict(build(Small).named_parameters())
    assert all(want[name].dtype == PRECISIONS[precision].params for name in want)
    assert all(not torch.equal(want[name].float(), before[name]) for name in want)
    for result in results:
        assert {plan: differing(found, want) for plan, (found, _) in result.items()} == {plan: [] for plan in PLANS}
        assert [str(norms) for _, norms in result.values()] == [str(want_norms)] * len(PLANS)


# --- every rule


class PlainLion(torch.optim.Optimizer):
    """Lion as its paper writes it (Chen et al. 2023, algorithm 2)."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                direction = (momentum * beta1).add(param.grad, alpha=1 - beta1).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.mul_(beta2).add_(param.grad, alpha=1 - beta2)


RULES = {
    "AdamW": (onefold.AdamW, torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "Adam": (onefold.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (onefold.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (onefold.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "nesterov": (onefold.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Lion": (onefold.Lion, PlainLion, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "Adagrad": (onefold.Adagrad, torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}),
    "Adamax": (None, torch.optim.Adamax, {"lr": 1e-2}),
    "NAdam": (None, torch.optim.NAdam, {"lr": 1e-2}),
    "RMSprop": (None, torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
}


def trained_by_rule(rank, num_ranks, rule):
    ours, theirs, options = RULES[rule]
    sharded = functools.partial(onefold.Elementwise, cls=theirs, **options)
    sharded = functools.partial(ours, **options) if ours else sharded
    single = {} if theirs is PlainLion else {"foreach": False}
    want, _ = reference(num_ranks, lambda model: theirs(model.parameters(), **single, **options))
    return {plan: differing(train(rank, plan, make_optimizer=sharded)[0], want) for plan in PLANS}


@pytest.mark.parametrize("rule", list(RULES))
def test_every_rule_is_its_torch_optimizer_under_every_plan(ranks, rule):
    assert ranks(2).run(trained_by_rule, rule) == [{plan: [] for plan in PLANS}] * 2
