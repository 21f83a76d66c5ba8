"""Owns the model and loop of the checkpoint tests: tied, frozen and buffered, two groups, a schedule, a loss scale.

Data are one fixed batch a step, dealt to the ranks in order: gradients are the same for any number of ranks, up to
rounding.
"""

import torch
from torch import nn

import onefold
from checks import equal
from plans import NAMED_PLANS

PLANS = ("zero_0", "zero_1", "zero_2", "zero_3", "offload")
PRECISIONS = {
    "fp32": onefold.Precision(),
    "bf16": onefold.Precision(params="bf16"),
    "fp16": onefold.Precision(params="fp16", loss_scale=onefold.DynamicLossScale(initial=2.0**8, window=2)),
}
BATCH, WIDTH, WORDS = 12, 8, 11


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding tied to the head, blocks, and a frozen projection."""

    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        x = self.frozen(self.embed(words)) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Run:
    """A training run of one rank."""

    def __init__(self, rank, num_ranks, plan, precision="fp32", optimizer="AdamW", seed=1, **options):
        self.rank, self.num_ranks = rank, num_ranks
        torch.manual_seed(seed)
        model = Net()
        chosen = plan if isinstance(plan, onefold.Plan) else NAMED_PLANS[plan]
        self.model = onefold.shard(model, chosen, precision=PRECISIONS[precision], **options)
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if n.startswith("blocks") and p.requires_grad], "lr": 0.02},
            {"params": [p for n, p in named.items() if not n.startswith("blocks") and p.requires_grad]},
        ]
        if optimizer == "AdamW":
            self.optimizer = onefold.AdamW(
                self.model,
                lr=0.01,
                weight_decay=0.1,
                eps=1e-4,
                max_grad_norm=1.0,
                param_groups=groups,
                no_decay=["*.bias"],
            )
        else:
            cls = getattr(torch.optim, optimizer)
            self.optimizer = onefold.Elementwise(self.model, cls, lr=0.01, param_groups=groups)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7)
        self.step = 0

    def train(self, steps):
        """The losses of some steps, of this rank."""
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            words = torch.randint(WORDS, (BATCH, 5), generator=generator)
            mine = words.chunk(self.num_ranks)[self.rank]
            logits = self.model(mine[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def state(self):
        """Everything that training depends on, whole: weights by name, buffers, rates, loss scale."""
        with onefold.gathered(self.model):
            weights = {name: param.detach().float().cpu().clone() for name, param in self.model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return weights | buffers, (rates, self.optimizer.loss_scale, self.optimizer.num_updates)

    def save(self, path, **options):
        return onefold.save(
            path, self.model, self.optimizer, scheduler=self.scheduler, extra={"step": self.step}, **options
        )

    def load(self, path, **options):
        self.step = onefold.load(path, self.model, self.optimizer, scheduler=self.scheduler, **options)["step"]


def same_state(mine, theirs):
    """Whether two states are the same, bit for bit."""
    (tensors, numbers), (others, other_numbers) = mine, theirs
    return numbers == other_numbers and equal(tensors, others)


def distance(mine, theirs):
    """The largest difference between the weights of two states."""
    return max(float((tensor - theirs[0][name]).abs().max()) for name, tensor in mine[0].items() if tensor.numel())
