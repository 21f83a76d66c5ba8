"""Promise: loops that train more than one model end with the weights of plain PyTorch.

Each loop is written once and run twice: with plain replicas whose gradients are averaged by hand, and sharded.
"""

import torch
import torch.nn.functional as F

import onefold
from checks import same, tensors, weights
from models import Stack, build
from pairs import pairwise
from plans import NAMED_PLANS, PLANS
from ranks import Turn, average


class Side:
    """One way to hold a model: how it steps, and how it is read."""

    def __init__(self, seed, plan, num_replicas, *, trained=True):
        self.plan = plan
        self.replicas = [build(Stack, seed) for _ in range(num_replicas)]
        for replica in self.replicas:
            replica.requires_grad_(trained)
        if plan is not None:
            onefold.shard(self.replicas[0], NAMED_PLANS[plan])
        make = torch.optim.AdamW if plan is None else onefold.AdamW
        source = [replica.parameters() if plan is None else replica for replica in self.replicas]
        self.optimizers = [make(each, lr=1e-2, eps=1e-3) for each in source] if trained else []

    def step(self):
        if self.plan is None:
            average(self.replicas)
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def read(self, index):
        return tensors(self.replicas[index]) if self.plan is None else weights(self.replicas[0])


def padded(x):
    """The output of one model as input of another: [n, 2] to [n, 4]."""
    return torch.cat([x, x.abs()], 1)


def adversaries(sides, turns):
    """Two models trained in turn; the generator's gradient flows through the critic, whose own is thrown away."""
    generator, critic = sides
    for index, turn in enumerate(turns):
        noise, real = turn.randn(3, 4), turn.randn(3, 4)
        with torch.no_grad():
            fake = padded(generator.replicas[index](noise))
        (critic.replicas[index](real).mean() - critic.replicas[index](fake).mean()).backward()
    critic.step()
    critic.zero_grad()
    for index, turn in enumerate(turns):
        critic.replicas[index](padded(generator.replicas[index](turn.randn(3, 4)))).mean().backward()
    generator.step()
    generator.zero_grad()
    critic.zero_grad()


def distillation(sides, turns):
    """A frozen teacher, sharded too, beside the student."""
    student, teacher = sides
    for index, turn in enumerate(turns):
        x = turn.randn(3, 4)
        with torch.no_grad():
            wanted = teacher.replicas[index](x)
        F.mse_loss(student.replicas[index](x), wanted).backward()
    student.step()
    student.zero_grad()


def through_the_teacher(sides, turns):
    """The gradient passes through a frozen sharded model on its way to the trained one."""
    student, teacher = sides
    for index, turn in enumerate(turns):
        teacher.replicas[index](padded(student.replicas[index](turn.randn(3, 4)))).pow(2).mean().backward()
    student.step()
    student.zero_grad()


def one_loss_for_both(sides, turns):
    """One backward through two models, one inside the other's graph, then a step of each."""
    first, second = sides
    for index, turn in enumerate(turns):
        hidden = padded(first.replicas[index](turn.randn(3, 4)))
        (second.replicas[index](hidden).pow(2).mean() + hidden.mean()).backward()
    for side in sides:
        side.step()
        side.zero_grad()


LOOPS = {
    "adversaries": (adversaries, (True, True)),
    "distillation": (distillation, (True, False)),
    "through the teacher": (through_the_teacher, (True, False)),
    "one loss for both": (one_loss_for_both, (True, True)),
}


def run_loop(rank, num_ranks, name, plan):
    loop, trained = LOOPS[name]
    plain = [Side(seed, None, num_ranks, trained=each) for seed, each in enumerate(trained)]
    sharded = [Side(seed, plan, 1, trained=each) for seed, each in enumerate(trained)]
    for step in range(3):
        loop(plain, [Turn(number, step, sharded=False) for number in range(num_ranks)])
        loop(sharded, [Turn(rank, step, sharded=True)])
    for ours, theirs in zip(sharded, plain, strict=True):
        same(ours.read(0), theirs.read(rank))


@pairwise(name=list(LOOPS), plan=PLANS, num_ranks=(1, 2))
def test_loops_with_two_models(ranks, name, plan, num_ranks):
    ranks(num_ranks).run(run_loop, name, plan)
