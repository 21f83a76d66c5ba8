"""Promise: gradients, their norm and the clipped update are the numbers that plain PyTorch computes.

Libraries failed here by counting: backward passes, micro-batches, ranks, tied weights, padding - once too often or too
seldom. A wrong factor does not crash; it only trains worse.
"""

from functools import partial

import pytest
import torch
from torch import nn

import onefold
from checks import grads, same, tensors, weights
from models import WIDTH, Block, Stack, build
from onefold import Precision
from plans import NAMED_PLANS, every_plan, one_and_two_ranks
from ranks import Case, Turn, average, squared, train

# --- several backward passes before a step


class TwoHeads(Stack):
    def __init__(self):
        super().__init__(depth=2)
        self.second = nn.Linear(WIDTH, 3)

    def forward(self, x, second=False):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.second(x) if second else self.head(x)


def rows(model, turn, accumulated):
    """One backward per row of the identity; the first ones inside `accumulate`."""
    for index, row in enumerate(torch.eye(4)):
        if index < accumulated:
            with turn.accumulate(model):
                model(row[None]).sum().backward()
        else:
            model(row[None]).sum().backward()


def nested_accumulate(model, turn):
    with turn.accumulate(model):
        squared(model, turn)
        with turn.accumulate(model):
            squared(model, turn)
        squared(model, turn)
    squared(model, turn)


def each_head(model, turn):
    x = turn.randn(3, 4)
    model(x).sum().backward()
    model(x, second=True).pow(2).sum().backward()


def same_graph_twice(model, turn):
    loss = model(turn.randn(3, 4)).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def discarded(model, turn):
    """A backward that is thrown away, as after a loss that was not finite."""
    squared(model, turn)
    model.zero_grad()
    squared(model, turn)


def discarded_in_accumulate(model, turn):
    with turn.accumulate(model):
        squared(model, turn)
    model.zero_grad()
    squared(model, turn)


def only_on_even_steps(model, turn):
    if turn.step % 2 == 0:
        squared(model, turn)


def parts_of_the_model(model, turn):
    """The second backward reaches only some of the parameters."""
    with turn.accumulate(model):
        squared(model, turn)
    model(turn.randn(3, 4))
    model.blocks[0].middle.mean().backward()


BACKWARDS = {
    **{f"4, {k} of them in accumulate": Case(model=Stack, work=partial(rows, accumulated=k)) for k in (0, 1, 3)},
    "nested accumulate": Case(model=Stack, work=nested_accumulate),
    "one per head": Case(model=TwoHeads, work=each_head),
    "same graph twice": Case(model=Stack, work=same_graph_twice),
    "second reaches a part": Case(model=Stack, work=parts_of_the_model),
    "one thrown away": Case(model=Stack, work=discarded),
    "one thrown away in accumulate": Case(model=Stack, work=discarded_in_accumulate),
    "two steps per zero_grad": Case(model=Stack, work=squared, steps=4, steps_per_zero=2),
    "no backward in odd steps": Case(model=Stack, work=only_on_even_steps, optimizer="adamw", steps=4),
}


@every_plan
@one_and_two_ranks
@pytest.mark.parametrize("name", BACKWARDS)
def test_every_backward_counts_once(ranks, name, plan, num_ranks):
    ranks(num_ranks).run(train, BACKWARDS[name], plan)


# --- micro-batches


def micro_steps(rank, num_ranks, plan, counts):
    """The norm after each step of micro-gradients 1, 2, .. `count`, the same on all ranks, each divided by `count`."""
    model = onefold.shard(nn.Sequential(nn.Linear(4, 1, bias=False)), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.0)
    norms = []
    for count in counts:
        for k in range(count):
            loss = model(torch.full((1, 4), k + 1.0)).sum() / count
            if k < count - 1:
                with onefold.accumulate(model):
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return norms


@every_plan
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("counts", [(4, 4, 4), (1, 4, 2), (3, 1, 1)], ids=str)
def test_every_step_counts_its_micro_batches_alike(ranks, counts, plan, num_ranks):
    means = [(count + 1) / 2 * 4**0.5 for count in counts]  # mean of 1..count in each of 4 weights
    for norms in ranks(num_ranks).run(micro_steps, plan, counts):
        assert norms == pytest.approx(means, rel=1e-6)


def split_batch(rank, num_ranks, plan, count):
    """Gradients, norm and losses of one batch of 4 rows a rank, cut into `count` micro-batches."""
    batch = torch.randn(num_ranks, 4, 4, generator=torch.Generator().manual_seed(7))
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1)
    losses = []
    for index, part in enumerate(batch[rank].chunk(count)):
        loss = model(part).pow(2).mean()
        before = loss.item()
        if index < count - 1:
            with onefold.accumulate(model):
                (loss / count).backward()
        else:
            (loss / count).backward()
        losses += [before, loss.item()]  # backward leaves the loss as it was
    reference = build(Stack)
    reference(batch.flatten(0, 1)).pow(2).mean().backward()
    same(grads(model), {name: parameter.grad for name, parameter in reference.named_parameters()})
    optimizer.step()
    whole = [parameter.grad for parameter in reference.parameters()]
    return optimizer.grad_norm, torch.nn.utils.get_total_norm(whole).item(), losses


@every_plan
@one_and_two_ranks
@pytest.mark.parametrize("count", [1, 2, 4])
def test_micro_batches_equal_the_batch(ranks, count, plan, num_ranks):
    for norm, wanted, losses in ranks(num_ranks).run(split_batch, plan, count):
        assert norm == pytest.approx(wanted, rel=1e-5)
        assert losses[::2] == losses[1::2]


# --- the norm that clips


class Tied(nn.Module):
    """An embedding tied to the head, frozen parameters between, an idle one beside."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.table((x.abs() * 10).long().flatten() % 5)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, so shards end in padding."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 7), nn.Linear(7, 1)])
        self.scale = nn.Parameter(torch.tensor(1.7))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale


MODELS = {"tied": Tied, "uneven": Uneven, "stack": Stack}


def clipped_step(rank, num_ranks, plan, model, limit, precision):
    """Norms after two clipped steps, and those of plain PyTorch; the weights are compared here."""
    lr = 1.0 if limit == 0.01 else 0.05  # a large step only where clipping keeps it small
    replicas = [build(model) for _ in range(num_ranks)]
    sharded = onefold.shard(build(model), NAMED_PLANS[plan], precision=precision)
    optimizer = onefold.SGD(sharded, lr=lr, max_grad_norm=limit)
    norms, wanted = [], []
    for step in range(2):
        for number, replica in enumerate(replicas):
            squared(replica, Turn(number, step, sharded=False))
        average(replicas)
        for replica in replicas:
            norm = torch.nn.utils.clip_grad_norm_(replica.parameters(), float("inf") if limit is None else limit)
            torch.optim.SGD(replica.parameters(), lr=lr).step()
            replica.zero_grad()
        wanted.append(norm.item())
        squared(sharded, Turn(rank, step, sharded=True))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    same(weights(sharded), tensors(replicas[rank]))
    return norms, wanted


@every_plan
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("limit", [0.01, 1e6, None])
@pytest.mark.parametrize("model", MODELS)
def test_the_norm_is_global_and_clips(ranks, model, limit, plan, num_ranks):
    results = ranks(num_ranks).run(clipped_step, plan, MODELS[model], limit, Precision())
    for norms, wanted in results:
        assert norms == results[0][0]  # the same number on every rank, to the last bit
        assert norms == pytest.approx(wanted, rel=1e-5)


@every_plan
@one_and_two_ranks
def test_the_norm_is_of_unscaled_gradients(ranks, plan, num_ranks):
    for norms, wanted in ranks(num_ranks).run(clipped_step, plan, Tied, 0.01, Precision(loss_scale=1024.0)):
        assert norms == pytest.approx(wanted, rel=1e-5)


def zero_gradients(rank, num_ranks, plan):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=1.0, max_grad_norm=1.0)
    (model(torch.ones(1, 4)) * 0).sum().backward()
    optimizer.step()
    same(weights(model), tensors(build(Stack)), 0)
    return optimizer.grad_norm


@every_plan
@one_and_two_ranks
def test_a_norm_of_zero_clips_nothing(ranks, plan, num_ranks):
    assert ranks(num_ranks).run(zero_gradients, plan) == [0.0] * num_ranks


# --- buffers


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


@every_plan
@one_and_two_ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_precision_leaves_buffers_alone(ranks, dtype, plan, num_ranks):
    for dtypes in ranks(num_ranks).run(buffers_after_two_steps, plan, dtype):
        cast = {name: name.startswith("norm") for name in dtypes}
        assert dtypes == {name: torch.float32 if kept else dtype for name, kept in cast.items()}


# --- zeros that users write


def zeroed(rank, num_ranks, plan, precision):
    """Rows are set to zero after every step, as for padding or pruning."""
    model, plain = onefold.shard(build(Stack), PLANS_WHOLE[plan], precision=precision), build(Stack)
    optimizers = onefold.SGD(model, lr=0.1), torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(torch.ones(3, 4)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter[::2].zero_()
    for optimizer in optimizers:
        optimizer.step()  # nothing to update by
    got = {name: tensor.float() for name, tensor in weights(model).items()}
    same(got, tensors(plain), 3e-2)


PLANS_WHOLE = {name: NAMED_PLANS[name] for name in ("zero_0", "zero_1", "zero_2", "offload")}


@pytest.mark.parametrize("plan", PLANS_WHOLE)
@pytest.mark.parametrize("precision", [Precision(params="bf16"), Precision(params="fp16")], ids=["bf16", "fp16"])
def test_weights_that_are_set_to_zero_train_on(ranks, plan, precision):
    ranks(2).run(zeroed, plan, precision)
