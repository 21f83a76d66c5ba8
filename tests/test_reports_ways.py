"""Promise: a model may be left, watched and passed through in unusual ways, and the next step is right or refused."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import onefold
from checks import grads, same, tensors, weights
from models import Block, Stack, build
from onefold import Precision
from onefold.errors import OnefoldError
from plans import NAMED_PLANS, every_plan
from ranks import Case, squared, thinned, train

SCALED = Precision(loss_scale=256.0)


def sharded(plan, make=Stack, **options):
    return onefold.shard(build(make), NAMED_PLANS[plan], **options)


def backward(model):
    model(torch.linspace(-1, 1, 12).view(3, 4)).square().mean().backward()


class Interrupting(Stack):
    """Ctrl-C falls into its second forward."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.blocks[0](self.embed(x))
        if self.calls == 2:
            raise KeyboardInterrupt
        return self.head(self.blocks[2](self.blocks[1](x)))


def interrupted(rank, num_ranks, plan, precision):
    model, plain = sharded(plan, Interrupting, precision=precision), build(Interrupting)
    optimizer, other = onefold.SGD(model, lr=0.1), torch.optim.SGD(plain.parameters(), 0.1)
    for each, its in ((model, optimizer), (plain, other)):
        for _ in range(4):
            try:
                backward(each)
            except KeyboardInterrupt:
                continue
            its.step()
            its.zero_grad()
    same(weights(model), tensors(plain))


@pytest.mark.parametrize("precision", [None, SCALED], ids=["plain", "scaled"])
@thinned
def test_an_interrupted_forward_leaves_nothing_behind(ranks, plan, num_ranks, precision):
    ranks(num_ranks).run(interrupted, plan, precision)


class Selective(nn.Module):
    """A block whose matrix products are kept and whose rest is computed again."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        def policy(context, operation, *args, **kwargs):
            keep = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)


class Checkpointed(Stack):
    """Blocks checkpointed from outside, selectively."""

    def forward(self, x):
        x = self.embed(x)
        operations = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        for block in self.blocks:
            contexts = partial(create_selective_checkpoint_contexts, operations)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return self.head(x)


SELECTIVE = {
    "inside a block": Case(model=partial(Stack, block=Selective), work=squared),
    "around blocks": Case(model=Checkpointed, work=squared),
}


@pytest.mark.parametrize("name", SELECTIVE)
@thinned
def test_selective_checkpoints(ranks, plan, num_ranks, name):
    ranks(num_ranks).run(train, SELECTIVE[name], plan)


class Passing(Stack):
    """Returns what it was given, too."""

    def forward(self, x):
        return super().forward(x), x


def hooks_on_an_input(rank, num_ranks, plan):
    model, x = sharded(plan, Passing), torch.ones(3, 4, requires_grad=True)
    for _ in range(3):
        score, passed = model(x)
        (score.sum() + passed.sum()).backward()
    return len(x._backward_hooks or ())


@every_plan
def test_a_tensor_passed_through_gathers_no_hooks(ranks, plan):
    assert ranks(2).run(hooks_on_an_input, plan) == [0, 0]


def transformed(rank, num_ranks, plan):
    """torch.func over a sharded model: right, or an error of ours."""
    model, plain = sharded(plan), build(Stack)
    x = torch.ones(2, 4)
    want = torch.func.grad(lambda each: plain(each).sum())(x)
    try:
        got = torch.func.grad(lambda each: model(each).sum())(x)
    except OnefoldError as error:
        return str(error)
    same({"x": got}, {"x": want})
    return None


@every_plan
def test_function_transforms_are_right_or_refused(ranks, plan):
    for message in ranks(2).run(transformed, plan):
        assert message is None or "torch.func" in message


class Twice(Stack):
    """Returns one tensor in two places, and keeps it in a third."""

    def forward(self, x):
        self.kept = loss = super().forward(x).square().mean()
        return {"loss": loss, "parts": (loss,)}


def changed_in_one_place(rank, num_ranks, plan, precision):
    model, plain = sharded(plan, Twice, precision=precision), build(Twice)
    for each in (model, plain):
        output = each(torch.linspace(-1, 1, 12).view(3, 4))
        output["loss"] *= 3
        (output["parts"][0].square() + each.kept).backward()
    same(grads(model), {name: param.grad for name, param in plain.named_parameters()})


@pytest.mark.parametrize("precision", [None, SCALED], ids=["plain", "scaled"])
@pytest.mark.parametrize("plan", ["zero_2", "zero_3"])
def test_a_tensor_that_is_returned_twice_stays_one(ranks, plan, precision):
    ranks(2).run(changed_in_one_place, plan, precision)
