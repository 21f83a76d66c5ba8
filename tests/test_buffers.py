"""Promise: buffers stay what the model makes of them: no plan and no precision casts or rounds one."""

import torch
from torch import nn

import onefold
from checks import same
from models import build
from onefold import Precision
from pairs import pairwise
from plans import NAMED_PLANS, PLANS
from ranks import Turn


class Buffered(nn.Module):
    """Buffers whose values 16 bits cannot hold, of every kind models keep."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("frequency", 1 / 10000 ** (torch.arange(4) / 4), persistent=False)
        self.register_buffer("mask", torch.tensor([True, True, False, True]))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("phase", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("narrow", torch.ones(4, dtype=torch.float16))

    def forward(self, x, position):
        if self.training:
            self.calls += 1
        for block in self.blocks:
            x = block(x)
        turned = x.float() * torch.cos(position * self.frequency) * self.phase.real
        return self.norm(turned.masked_fill(~self.mask, 0.0))


def buffers_after_two_steps(rank, num_ranks, plan, dtype):
    model = onefold.shard(build(Buffered), NAMED_PLANS[plan], precision=Precision(params=dtype))
    optimizer = onefold.SGD(model, lr=0.0)
    reference = build(Buffered)
    for step in range(2):
        x = Turn(rank, step, sharded=True).randn(8, 4)
        model(x, 4095).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        reference(x, 4095)
    exact = [name for name, _ in reference.named_buffers() if "running" not in name]
    same({name: model.get_buffer(name) for name in exact}, {name: reference.get_buffer(name) for name in exact}, 0)
    same(dict(model.named_buffers()), dict(reference.named_buffers()), 3e-2)  # running means are of 16-bit activations
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


@pairwise(dtype=(torch.bfloat16, torch.float16), plan=PLANS, num_ranks=(1, 2))
def test_precision_leaves_buffers_alone(ranks, dtype, plan, num_ranks):
    for dtypes in ranks(num_ranks).run(buffers_after_two_steps, plan, dtype):
        cast = {name: name.startswith("norm") for name in dtypes}
        assert dtypes == {name: torch.float32 if kept else dtype for name, kept in cast.items()}
