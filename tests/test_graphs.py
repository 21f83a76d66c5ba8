"""Promise: whatever path the graph takes through the model, gradients are those of plain PyTorch.

Each kind below failed in a library that hangs its gathers on one expected path: in through forward, out through the
returned tensor, back once.
"""

import dataclasses
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import onefold
from checks import same
from models import WIDTH, Stack, build, sharded
from onefold.errors import OnefoldError
from pairs import pairwise
from plans import PLANS, every_plan
from ranks import Case, train


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    states: list


class Opaque:
    """A return value that no tree utility can look into."""

    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class Verbose(Stack):
    """Returns its tensors in the container asked for."""

    def __init__(self, container):
        super().__init__()
        self.container = container

    def forward(self, x):
        states = [self.embed(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.container(self.head(states[-1]), states)


def nested(logits, states):
    return {"logits": logits, "rest": ({"states": tuple(states)}, None, 3)}


def opaque(logits, states):
    return Opaque((logits, states))


def later(logits, states):
    """A closure over the graph: nothing in the return value is a tensor."""
    return lambda: logits.pow(2).mean() + states[1].pow(2).mean()


class Balanced(Stack):
    """Collects an auxiliary loss of each block on the side, as mixtures of experts do."""

    def forward(self, x):
        self.extra = []
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            self.extra.append(block.middle.pow(2).mean())
        return self.head(x)


# --- backward enters the model at a tensor that it did not return


def from_attribute(model, turn, depth):
    model(turn.randn(3, 4))
    model.blocks[depth].middle.pow(2).mean().backward()


def from_attribute_and_output(model, turn):
    out = model(turn.randn(3, 4))
    (out.pow(2).mean() + model.blocks[0].middle.sum()).backward()


def from_output_then_attribute(model, turn):
    out = model(turn.randn(3, 4))
    with turn.accumulate(model):
        out.pow(2).mean().backward(retain_graph=True)
    model.blocks[1].middle.sum().backward()


def from_user_hook(model, turn):
    seen = []
    handle = model.blocks[1].down.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(turn.randn(3, 4))
    handle.remove()
    seen[0].pow(2).mean().backward()


def from_side_list(model, turn):
    loss = model(turn.randn(3, 4)).pow(2).mean()
    (loss + 0.1 * sum(model.extra)).backward()


def from_side_list_only(model, turn):
    model(turn.randn(3, 4))
    model.extra[1].backward()


def from_nested(model, turn):
    out = model(turn.randn(3, 4))
    (out["logits"].sum() + out["rest"][0]["states"][2].pow(2).mean()).backward()


def from_dataclass(model, turn):
    model(turn.randn(3, 4)).states[2].pow(2).mean().backward()


def from_opaque(model, turn):
    logits, states = model(turn.randn(3, 4)).hidden
    (logits.pow(2).mean() + states[1].sum()).backward()


def from_closure(model, turn):
    model(turn.randn(3, 4))().backward()


ENTRIES = {
    "first block's attribute": Case(model=Stack, work=partial(from_attribute, depth=0)),
    "last block's attribute": Case(model=Stack, work=partial(from_attribute, depth=2)),
    "attribute and output": Case(model=Stack, work=from_attribute_and_output),
    "output, then attribute": Case(model=Stack, work=from_output_then_attribute),
    "user's forward hook": Case(model=Stack, work=from_user_hook),
    "side list": Case(model=Balanced, work=from_side_list),
    "side list only": Case(model=Balanced, work=from_side_list_only),
    "nested containers": Case(model=partial(Verbose, nested), work=from_nested),
    "dataclass": Case(model=partial(Verbose, Output), work=from_dataclass),
    "opaque object": Case(model=partial(Verbose, opaque), work=from_opaque),
    "closure": Case(model=partial(Verbose, later), work=from_closure),
}


@pairwise(name=list(ENTRIES), plan=PLANS, num_ranks=(1, 2))
def test_backward_may_enter_anywhere(ranks, name, plan, num_ranks):
    ranks(num_ranks).run(train, ENTRIES[name], plan)


UNSCALED = ("user's forward hook", "opaque object", "closure")
"""Where backward enters at tensors that no module of a unit returned in a container that can be looked into."""


@pytest.mark.parametrize("plan", ["zero_0", "zero_3"])
@pytest.mark.parametrize("name", ENTRIES)
def test_a_loss_scale_is_undone_where_backward_entered_or_refused(ranks, name, plan):
    """Scaling at the model's outputs alone would divide these gradients by a factor they never had."""
    options = {"precision": onefold.Precision(loss_scale=1024.0)}
    refusal = r"entered the model at a tensor that its forward did not return.*loss_scale is not applied"
    case = dataclasses.replace(ENTRIES[name], options=options, refusal=refusal if name in UNSCALED else None)
    ranks(2).run(train, case, plan)


# --- several forwards and backwards, in any order


def two_of_each(model, turn, order):
    losses = [(k + 1) * model(turn.randn(2, 4)).pow(2).mean() for k in range(len(order))]
    for position, k in enumerate(order):
        if position < len(order) - 1:
            with turn.accumulate(model):
                losses[k].backward()
        else:
            losses[k].backward()


def without_accumulate(model, turn):
    first, second = model(turn.randn(2, 4)).sum(), 2 * model(turn.randn(2, 4)).sum()
    first.backward()
    second.backward()


def sum_of_two(model, turn):
    (model(turn.randn(2, 4)).sum() * model(turn.randn(2, 4)).sum()).backward()


def forward_never_used(model, turn):
    kept, dropped = model(turn.randn(2, 4)), model(turn.randn(2, 4))
    del dropped
    kept.pow(2).mean().backward()


def target_without_grad(model, turn):
    x = turn.randn(2, 4)
    online = model(x)
    with torch.no_grad():
        target = model(x + 0.1)
    (online - target).pow(2).mean().backward()


def detached_between(model, turn):
    """Truncated backpropagation: the second forward starts from a detached piece of the first."""
    first = model(turn.randn(2, 4))
    second = model(first.detach().repeat(1, 2))
    with turn.accumulate(model):
        second.sum().backward()
    first.pow(2).mean().backward()


def blocks_in_any_order(model, turn):
    """The loop over the blocks lives outside: forward of the model itself is never called."""
    x = model.embed(turn.randn(3, 4))
    for index in (2, 0, 1, 0):
        x = model.blocks[index](x)
    model.head(x).pow(2).mean().backward()


def outside_any_forward(model, turn):
    model.blocks[1](turn.randn(3, WIDTH)).pow(2).mean().backward()


ORDERS = {
    "oldest first": Case(model=Stack, work=partial(two_of_each, order=(0, 1))),
    "newest first": Case(model=Stack, work=partial(two_of_each, order=(1, 0))),
    "three, mixed": Case(model=Stack, work=partial(two_of_each, order=(1, 2, 0))),
    "without accumulate": Case(model=Stack, work=without_accumulate),
    "one backward through both": Case(model=Stack, work=sum_of_two),
    "a forward that is dropped": Case(model=Stack, work=forward_never_used, steps=3),
    "a no_grad forward between": Case(model=Stack, work=target_without_grad),
    "detached in between": Case(model=Stack, work=detached_between),
    "blocks called from outside": Case(model=Stack, work=blocks_in_any_order),
    "one block alone": Case(model=Stack, work=outside_any_forward),
}


@pairwise(name=list(ORDERS), plan=PLANS, num_ranks=(1, 2))
def test_forwards_and_backwards_in_any_order(ranks, name, plan, num_ranks):
    ranks(num_ranks).run(train, ORDERS[name], plan)


# --- gradients of gradients


def penalty(model, turn, square=True):
    x = turn.randn(3, 4).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    norm = slope.norm(dim=1)
    ((norm - 1).pow(2) if square else norm).mean().backward()


def penalty_with_loss(model, turn):
    x = turn.randn(3, 4).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.pow(2).mean() + 10 * slope.pow(2).sum(1).mean()).backward()


def product_with_hessian(model, turn):
    x = turn.randn(3, 4).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).pow(2).mean(), x, create_graph=True)
    (product,) = torch.autograd.grad((slope * turn.randn(3, 4)).sum(), x, create_graph=True)
    product.pow(2).mean().backward()


def saliency_first(model, turn):
    """A first-order `autograd.grad` for the input leaves the parameters' gradients alone."""
    x = turn.randn(3, 4).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (out * (1 + slope.abs().sum())).sum().backward()


def of_an_intermediate(model, turn):
    out = model(turn.randn(3, 4))
    middle = model.blocks[1].middle
    (slope,) = torch.autograd.grad(out.pow(2).mean(), middle, create_graph=True)
    (slope.pow(2).mean() + out.sum()).backward()


PENALTIES = {
    "slope to 1": Case(model=Stack, work=penalty),
    "plain norm": Case(model=Stack, work=partial(penalty, square=False)),
    "with the loss": Case(model=Stack, work=penalty_with_loss),
    "third order": Case(model=Stack, work=product_with_hessian),
    "first order": Case(model=Stack, work=saliency_first),
    "of an intermediate": Case(model=Stack, work=of_an_intermediate),
}


@pairwise(name=list(PENALTIES), plan=PLANS, num_ranks=(1, 2))
def test_gradients_of_gradients(ranks, name, plan, num_ranks):
    ranks(num_ranks).run(train, PENALTIES[name], plan)


# --- transforms of functions


def transformed(rank, num_ranks, plan):
    """torch.func over a sharded model: right, or refused where autograd's hooks are needed to gather again."""
    model, plain = sharded(plan), build(Stack)
    x = torch.ones(2, 4)
    want = torch.func.grad(lambda each: plain(each).sum())(x)
    with pytest.raises(OnefoldError, match=r"torch\.func\.grad.*ZERO_2") if plan == "zero_3" else nullcontext():
        same({"x": torch.func.grad(lambda each: model(each).sum())(x)}, {"x": want})


@every_plan
def test_function_transforms_are_right_or_refused(ranks, plan):
    ranks(2).run(transformed, plan)
