"""Owns the models and loops that the GPU tests share: plain, deterministic, large enough to keep a GPU busy."""

import pytest
import torch
from torch import nn

import onefold

NUM_GPUS = torch.cuda.device_count()


def gpus(number):
    """Marks a test that needs this many GPUs; skipped with the reason where there are fewer."""
    skip = pytest.mark.skipif(number > NUM_GPUS, reason=f"needs {number} GPUs, this machine has {NUM_GPUS}")
    return lambda test: pytest.mark.gpu(skip(test))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(rank, num_ranks, plan, precision, device, mesh=None):
    """Five steps with clipping, weight decay, accumulation and a schedule. Returns (weights, norms, Budget matches)."""
    torch.manual_seed(0)
    model = onefold.shard(Tower(64, 3).to(device), plan, precision=precision, mesh=mesh)
    optimizer = onefold.AdamW(model, lr=1e-2, weight_decay=0.1, max_grad_norm=0.1, no_decay=["*.bias"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    generator = torch.Generator().manual_seed(rank)
    norms = []
    for _ in range(5):
        first, second = torch.randn(2, 16, 64, generator=generator).to(device)
        with onefold.accumulate(model):
            (model(first).float().square().mean() / 2).backward()
        (model(second).float().square().mean() / 2).backward()
        optimizer.step()
        scheduler.step()
        norms.append(optimizer.grad_norm)
        matches = bytes_of(onefold.measured(model, optimizer)) == bytes_of(onefold.predicted(model, optimizer))
        optimizer.zero_grad()
    with onefold.gathered(model):
        weights = [param.detach().float().cpu().clone() for param in model.parameters()]
    return weights, norms, matches


def bytes_of(budget):
    return dict(budget.params_bytes), dict(budget.grads_bytes), dict(budget.optim_bytes)


def late(lane):
    """Let everything on a lane begin some milliseconds after it was launched."""
    run = lane.run

    def slowly(launch, **words):
        def begin():
            torch.cuda._sleep(10**7)
            return launch()

        return run(begin, **words)

    lane.run = slowly


def on_gpu(rank, num_ranks, plan, precision):
    """`train` on this rank's GPU."""
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    return train(rank, num_ranks, plan, precision, torch.device("cuda", rank))
