"""Owns what the programs of test_model_based.py use: a model that a call tells which way to go, what stands for Onefold
where plain PyTorch runs a program, and how two runs compare.

It is printed in front of every program that failed, so it imports nothing of the tests.
"""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

CLOSE = 2.0**-16
"""Of the largest element of a tensor: more than the order of a sum can change. Weights are small integers, so that sums
are exact until steps make them long."""

SAVES_PARAMETERS = False
"""Whether a block has autograd save a parameter itself, where False is a view of it. A reentrant checkpoint around
several units would give such a unit back as it is recomputed, where a plan splits parameters, and torch would crash."""


class Stop(Exception):
    """What goes wrong on purpose."""


class Bomb(torch.autograd.Function):
    """Passes its input on, and fails in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Stop


class Block(nn.Module):
    """A unit. `then` is what it does in the middle: other modules, or itself again through them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x, then=None):
        x = self.linear(x)
        gain = self.gain if SAVES_PARAMETERS else self.gain.view_as(self.gain)
        return gain * (x if then is None else then(x))


class Net(nn.Module):
    """Goes the way that `steps` tell: a number is a block; "side" and "tied" are used when they are named, only."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Parameter(torch.ones(2))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.side = Block()
        self.head = nn.Linear(2, 2, bias=False)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.blocks[1].linear.weight
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                places = torch.arange(param.numel()).view_as(param) + number
                param.copy_(torch.tensor([1.0, 2.0, -1.0])[places % 3])

    def forward(self, x, *steps):
        return self.head(self.walk(x * self.stem, steps))

    def walk(self, x, steps):
        for step in steps:
            x = self.do(x, step)
        return x

    def do(self, x, step):
        match step:
            case "skip":
                return x
            case "stop":
                raise Stop
            case "stop when recording":  # in a reentrant checkpoint: when it is recomputed
                return self.do(x, "stop" if torch.is_grad_enabled() else "skip")
            case "bomb":
                return Bomb.apply(x)
            case "peek":  # reads a parameter of another unit
                return x + self.side.gain
            case str():
                return getattr(self, step)(x)
            case int():
                return self.blocks[step](x)
            case ("reentrant" | "recomputed" as kind, *inner):
                return checkpoint(self.walk, x, inner, use_reentrant=kind == "reentrant")
            case ("sum", *branches):
                return sum(self.walk(x, inner) for inner in branches)
            case ("try", *inner):
                with contextlib.suppress(Stop):
                    return self.walk(x, inner)
                return x
            case (place, *inner):
                return self.blocks[place](x, partial(self.walk, steps=inner))


class Plain:
    """What stands for `onefold` where plain PyTorch runs a program: gradients are averaged before they are seen."""

    def __init__(self, model, optimizer):
        self._model = model
        optimizer.register_step_pre_hook(lambda *_: self._average())

    def gathered(self, target, write=False):
        self._average()
        return contextlib.nullcontext()

    def accumulate(self, model):
        return contextlib.nullcontext()

    def full_state_dict(self, model):
        is_told = not dist.is_initialized() or dist.get_rank() == 0
        return {name: value.detach().clone() for name, value in model.state_dict().items()} if is_told else {}

    def _average(self):
        """Give every rank the mean. A rank without a gradient counts as zero; none anywhere stays none."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        params = list(self._model.parameters())
        parts = [torch.zeros(param.shape) if param.grad is None else param.grad for param in params]
        is_there = torch.tensor([float(param.grad is not None) for param in params])
        total = torch.cat([is_there, *[part.flatten() for part in parts]])
        dist.all_reduce(total)
        counts, means = total[: len(params)], total[len(params) :] / dist.get_world_size()
        for param, count, mean in zip(params, counts, means.split([param.numel() for param in params]), strict=True):
            param.grad = mean.view(param.shape).clone() if count else None


def look(onefold, model):
    """Every parameter and its gradient."""
    with onefold.gathered(model):
        return {name: (copied(param), copied(param.grad)) for name, param in model.named_parameters()}


def copied(tensor):
    return None if tensor is None else tensor.detach().clone()


def with_gradient(model):
    """Which parameters have a gradient, as anybody can see at any time."""
    return [name for name, param in model.named_parameters() if param.grad is not None]


def values_of(names):
    """What a program has computed, of all its names."""
    kinds = torch.Tensor | tuple | list | dict
    return {
        name: value for name, value in names.items() if isinstance(value, kinds) and not isinstance(value, nn.Parameter)
    }


def differences(got, want, name=""):
    """What differs, in words."""
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor) and got.shape == want.shape:
        margin = CLOSE * max(1.0, float(want.detach().abs().max()))
        is_far = not torch.allclose(got.detach(), want.detach(), rtol=0, atol=margin)
        words = [f"{name}: {got.tolist()}, in plain PyTorch {want.tolist()}"] if is_far else []
        return words + (differences(got.grad, want.grad, f"{name}.grad") if want.is_leaf else [])
    if isinstance(want, dict) and isinstance(got, dict) and got.keys() == want.keys():
        pairs = [(key, got[key], want[key]) for key in want]
    elif isinstance(want, tuple | list) and isinstance(got, tuple | list) and len(got) == len(want):
        pairs = list(zip(range(len(want)), got, want, strict=True))
    else:
        is_other = got is not want if want is None or isinstance(want, torch.Tensor) else got != want
        return [f"{name}: {got}, in plain PyTorch {want}"] if is_other else []
    return [words for key, mine, yours in pairs for words in differences(mine, yours, f"{name}[{key!r}]")]
