"""Owns what tests of reading and writing files of weights share."""

import torch
from safetensors.torch import save_file
from torch import nn

import onefold
from models import build
from onefold.errors import OnefoldError


class Odd(nn.Module):
    """Frozen weights, persistent and other buffers, a tied parameter, no dims, no elements, sizes that do not align."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.whole = nn.Parameter(torch.arange(7), requires_grad=False)
        self.scale, self.none = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(0, 3))
        self.register_buffer("bytes", torch.arange(3, dtype=torch.uint8))
        self.register_buffer("wide", torch.randn(1, 3).expand(2, 3))  # after an odd number of bytes
        self.register_buffer("hidden", torch.randn(3), persistent=False)


def saved(model, directory, **options):
    """The directory, in which the model was saved by transformers, or by safetensors."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(directory, **options)
    else:
        directory.mkdir(exist_ok=True)
        tied = {id(param): name for name, param in model.named_parameters()}
        kept = {name for name, param in model.named_parameters(remove_duplicate=False) if tied[id(param)] == name}
        params = dict(model.named_parameters(remove_duplicate=False))
        state = {name: value for name, value in model.state_dict().items() if name in kept or name not in params}
        save_file({name: value.contiguous() for name, value in state.items()}, directory / "model.safetensors")
    return directory


def whole(model):
    with onefold.gathered(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def outcome(rank, num_ranks, make, directory, options):
    """What `load_pretrained` returned or raised; then nothing may have changed."""
    model = onefold.shard(build(make, seed=3), onefold.ZERO_3)
    before = whole(model)
    try:
        return onefold.load_pretrained(model, directory, **options), whole(model)
    except OnefoldError as error:
        after = whole(model)
        assert all(torch.equal(after[key], before[key]) for key in before)
        return type(error), str(error)
