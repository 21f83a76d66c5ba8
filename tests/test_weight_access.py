"""Promise: however a model uses its weights, it trains sharded as it does in plain PyTorch.

What reads a weight is often not the module that owns it: a parent, a loss inside forward, an autograd function.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from models import WIDTH, Block, Stack
from pairs import pairwise
from plans import PLANS
from ranks import Case, squared, train

# --- a module reads what another owns


class Reading(nn.Module):
    """A block that reads its child's weight with `read` and never calls the child."""

    def __init__(self, read):
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.read = read

    def forward(self, x):
        return x + torch.tanh(self.read(x, self.child))


def by_linear(x, child):
    return F.linear(x, child.weight, child.bias)


def by_matmul(x, child):
    return x @ child.weight.t() + child.bias


def by_einsum(x, child):
    return torch.einsum("nk,mk->nm", x, child.weight)


def by_rows(x, child):
    return torch.cat([x @ row[:, None] for row in child.weight.unbind()], 1) * child.bias[2]


def by_slices(x, child):
    first, second = child.weight.chunk(2)
    return torch.cat([x @ first.T, x @ second.T], 1) + child.weight[:, 1:2].sum()


def by_index(x, child):
    return x + child.weight[torch.tensor([1, 1, 3])].sum(0) + F.embedding(torch.tensor([0, 2]), child.weight).mean()


def by_detach(x, child):
    return x @ child.weight.detach() + child.weight.data.mean() + by_linear(x, child)


def by_reshape(x, child):
    return x @ child.weight.reshape(-1).view(WIDTH, WIDTH).permute(1, 0).contiguous()


def by_norm(x, child):
    return x * child.weight.norm() / (1 + torch.linalg.matrix_norm(child.weight, 2)) + child.weight.abs().max()


def by_cast(x, child):
    return (x.double() @ child.weight.double()).float() + child.bias.to(torch.bfloat16).float()


def by_arithmetic(x, child):
    return x @ (2 * child.weight - child.weight * child.bias + 1) ** 2 / WIDTH


def by_metadata(x, child):
    rows, columns = child.weight.shape
    same = child.weight.dtype == x.dtype and child.weight.device == x.device and child.weight.is_leaf
    return by_linear(x, child) * (rows / columns) * len(child.weight) * (child.weight.dim() if same else 0)


def by_functional_call(x, child):
    return torch.func.functional_call(child, {"weight": child.weight * 2, "bias": child.bias}, (x,))


def by_vmap(x, child):
    return torch.vmap(lambda row: child.weight @ row)(x)


READERS = (
    by_linear,
    by_matmul,
    by_einsum,
    by_rows,
    by_slices,
    by_index,
    by_detach,
    by_reshape,
    by_norm,
    by_cast,
    by_arithmetic,
    by_metadata,
    by_functional_call,
    by_vmap,
)


@pairwise(read=READERS, plan=PLANS, num_ranks=(1, 2))
def test_a_parent_reads_its_childs_weight(ranks, read, plan, num_ranks):
    ranks(num_ranks).run(train, Case(model=partial(Stack, block=partial(Reading, read)), work=squared), plan)


# --- one unit reads another


class HeadInLoss(Stack):
    """Computes the loss inside forward from the head's weight."""

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(hidden @ self.head.weight.t() + self.head.bias, torch.tensor([0, 1, 1]))


class BlocksInLoss(Stack):
    """Adds a penalty over weights of all units at the end of forward."""

    def forward(self, x):
        return super().forward(x) + 0.01 * sum(parameter.pow(2).sum() for parameter in self.parameters())


class Early(Stack):
    """Reads the last block before any runs, and the first after all did."""

    def forward(self, x):
        bias = self.blocks[-1].up.weight.mean()
        return super().forward(x) * bias + self.blocks[0].down.weight.sum() * self.head.weight.mean()


class Stacked(Stack):
    """Runs all blocks at once on stacked weights, as functional ensembles do."""

    def forward(self, x):
        x = self.embed(x).expand(len(self.blocks), -1, -1)
        up = torch.stack([block.up.weight for block in self.blocks])
        down = torch.stack([block.down.weight for block in self.blocks])
        return self.head(torch.bmm(torch.tanh(torch.bmm(x, up.mT)), down.mT).mean(0))


class Neighbour(nn.Module):
    """Reads the weight of the block before it."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, before=None):
        return torch.tanh(self.own(x) if before is None else self.own(x) + x @ before.own.weight)


class Chain(Stack):
    def __init__(self):
        super().__init__(block=Neighbour)

    def forward(self, x):
        x = self.embed(x)
        for before, block in zip([None, *self.blocks], self.blocks, strict=False):
            x = block(x, before)
        return self.head(x)


class Lazy(Stack):
    """Computes after forward has returned, as a generator does."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Identity(), nn.Identity()

    def forward(self, x):
        x = x.repeat(1, 2)
        for block in self.blocks:
            x = block(x)
            yield x


def own_loss(model, turn):
    model(turn.randn(3, 4)).mean().backward()


def lazily(model, turn):
    sum(x.pow(2).mean() for x in model(turn.randn(3, 4))).backward()


def penalty_outside(model, turn):
    loss = model(turn.randn(3, 4)).pow(2).mean()
    (loss + 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())).backward()


ACROSS = {
    "the loss reads the head": Case(model=HeadInLoss, work=own_loss),
    "the loss reads every weight": Case(model=BlocksInLoss, work=own_loss),
    "before and after": Case(model=Early, work=squared),
    "all at once": Case(model=Stacked, work=squared),
    "the block before": Case(model=Chain, work=squared),
    "a generator": Case(model=Lazy, work=lazily),
    "after forward": Case(model=Stack, work=penalty_outside, refusal=r"gathered\(model\)", refused_under=["zero_3"]),
}


@pairwise(name=list(ACROSS), plan=PLANS, num_ranks=(1, 2))
def test_one_unit_reads_another(ranks, name, plan, num_ranks):
    ranks(num_ranks).run(train, ACROSS[name], plan)


# --- autograd functions, hooks and control flow of the model's own


class Product(torch.autograd.Function):
    """x @ w, which keeps the weight as autograd wants it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Careless(Product):
    """Keeps the weight where autograd does not see it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight.t(), ctx.x.t() @ grad


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.function = function

    def forward(self, x):
        return x + torch.tanh(self.function.apply(x, self.weight))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(self.block(x) * 0.5)


class Recursive(Stack):
    def forward(self, x, depth=0):
        if depth == 0:
            x = self.embed(x)
        x = self.blocks[depth](x)
        return self.forward(x, depth + 1) if depth < 2 else self.head(x)


class Fallible(nn.Module):
    """Raises for its first argument after having used a weight; the caller goes on."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, fail=False):
        y = self.block(x)
        if fail:
            raise ValueError("not this one")
        return y


class Forgiving(Stack):
    def __init__(self):
        super().__init__(block=Fallible)

    def forward(self, x):
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            try:
                x = block(x, fail=index == 1)
            except ValueError:
                x = x * 2
        return self.head(x)


class InPlace(Stack):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            y = block(x)
            y += 1
            x = (x * 0.5).add_(y).clamp_(-3, 3)
        return self.head(x)


class Sequential(Stack):
    def forward(self, x):
        x = self.embed(x).requires_grad_()
        return self.head(checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=False))


class Mixture(Stack):
    """A few blocks chosen by the data, by all ranks alike; the others are idle."""

    def forward(self, x):
        scores = torch.softmax(self.head(self.embed(x)).mean(0), 0)
        x = self.embed(x)
        for index in range(2):
            x = x + scores[index] * self.blocks[index](x)
        return self.head(x)


def hooked():
    """Doubles a gradient with the user's own tensor hook, and watches modules in both directions."""
    model = Stack()
    model.blocks[1].up.weight.register_hook(lambda grad: 2 * grad)
    model.blocks[0].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    model.blocks[2].register_forward_hook(lambda module, inputs, output: output * 1.5)
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    return model


def hook_after_shard(model, step):
    if step == 0:
        model.blocks[1].down.weight.register_hook(lambda grad: 3 * grad)


def under_autocast(model, turn):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(turn.randn(3, 4)).float().pow(2).mean()
    loss.backward()


def sparse():
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), Stack())


def renormalized():
    return nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), Stack())


def tokens(model, turn, step_only=False):
    """Rows that a rank writes in forward are its own; only where all ranks look up the same do replicas agree."""
    rows = torch.tensor([1, 4, 4]) + turn.step if step_only else turn.randint(9, 3)
    model(rows).pow(2).mean().backward()


OWN = {
    "autograd function": Case(model=partial(Stack, block=partial(Custom, Product)), work=squared),
    "careless autograd function": Case(model=partial(Stack, block=partial(Custom, Careless)), work=squared),
    "a block twice in a row": Case(model=partial(Stack, block=Twice), work=squared),
    "recursion": Case(model=Recursive, work=squared),
    "an exception caught in forward": Case(model=Forgiving, work=squared, optimizer="adamw"),
    "in-place operations": Case(model=InPlace, work=squared),
    "checkpoint_sequential": Case(model=Sequential, work=squared),
    "blocks by choice": Case(model=Mixture, work=squared, optimizer="adamw"),
    "the user's hooks": Case(model=hooked, work=squared),
    "the user's hook after shard": Case(model=Stack, work=squared, before=hook_after_shard),
    "autocast": Case(model=Stack, work=under_autocast, tolerance=1e-3),
    "sparse gradients": Case(model=sparse, work=tokens),
    "weights renormalized in forward": Case(
        model=renormalized, work=partial(tokens, step_only=True), refusal="max_norm", refused_under=["zero_3"]
    ),
}


@pairwise(name=list(OWN), plan=PLANS, num_ranks=(1, 2))
def test_models_with_code_of_their_own(ranks, name, plan, num_ranks):
    ranks(num_ranks).run(train, OWN[name], plan)
