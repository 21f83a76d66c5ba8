"""Promise: what training loops do to gradients and weights between the usual calls has the effect it has in torch.

A plain replica in the same process does the same; both must end with the same weights. Where Onefold cannot do what
torch does, it says so.
"""

import pytest
import torch

import onefold
from checks import same, tensors, weights
from models import Stack, backward, build, sharded
from onefold import Precision
from onefold.errors import OrderMismatchError
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, WHOLE_PLANS, every_plan
from ranks import thinned

SCALED = Precision(loss_scale=256.0)


def whole(model):
    """Where gradients and weights may be touched."""
    return onefold.gathered(model, write=True)


# --- gradients


def halve_in_place(model):
    for param in model.parameters():
        param.grad.mul_(0.5)


def noise_added(model):
    for param in model.parameters():
        param.grad.add_(torch.linspace(0, 1, param.numel()).view(param.shape))


def one_replaced(model):
    model.head.weight.grad = torch.ones_like(model.head.weight)


def one_cleared(model):
    model.blocks[1].up.weight.grad = None


EDITS = {each.__name__: each for each in (halve_in_place, noise_added, one_replaced, one_cleared)}


def edited(rank, num_ranks, plan, name, precision):
    model, plain = sharded(plan, precision=precision), build(Stack)
    optimizer, other = onefold.SGD(model, lr=0.1, momentum=0.9), torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        backward(model)
        with onefold.gathered(model):
            EDITS[name](model)
        backward(plain)
        EDITS[name](plain)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    same(weights(model), tensors(plain))


@pairwise(name=list(EDITS), precision={"plain": None, "scaled": SCALED}, plan=PLANS, num_ranks=(1, 2))
def test_gradients_changed_while_gathered_are_stepped_with(ranks, plan, num_ranks, name, precision):
    ranks(num_ranks).run(edited, plan, name, precision)


def assigned_then_backward(rank, num_ranks, plan, precision):
    """A gradient of the user's own, to which a backward pass adds."""
    model, plain = sharded(plan, precision=precision), build(Stack)
    optimizer, other = onefold.SGD(model, lr=0.1), torch.optim.SGD(plain.parameters(), 0.1)
    for each in (model, plain):
        each.head.weight.grad = torch.full((2, 8), 0.25)
        backward(each)
    optimizer.step()
    other.step()
    same(weights(model), tensors(plain))


@pairwise(precision={"plain": None, "scaled": SCALED}, plan=PLANS, num_ranks=(1, 2))
def test_backward_adds_to_an_assigned_gradient(ranks, plan, num_ranks, precision):
    ranks(num_ranks).run(assigned_then_backward, plan, precision)


def returned_gradients(rank, num_ranks, plan, precision):
    """torch.autograd.grad between backward and step: its numbers are right, and the step is not disturbed."""
    model, plain = sharded(plan, precision=precision), build(Stack)
    optimizer, other = onefold.SGD(model, lr=0.1), torch.optim.SGD(plain.parameters(), 0.1)
    x = torch.ones(2, 4)
    for _ in range(2):
        backward(model)
        backward(plain)
        with onefold.gathered(model):
            got = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        want = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
        same(dict(enumerate(got)), dict(enumerate(want)))
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    same(weights(model), tensors(plain))


@pairwise(precision={"plain": None, "scaled": SCALED}, plan=PLANS, num_ranks=(1, 2))
def test_returned_gradients_leave_pending_ones_alone(ranks, plan, num_ranks, precision):
    ranks(num_ranks).run(returned_gradients, plan, precision)


def kept_while_the_scale_grows(rank, num_ranks, plan):
    """Never cleared: what an earlier backward left is still the same gradient when the loss scale has doubled."""
    scale = onefold.DynamicLossScale(initial=2.0, window=1)
    model, plain = sharded(plan, precision=Precision(loss_scale=scale)), build(Stack)
    optimizer, other = onefold.SGD(model, lr=0.01), torch.optim.SGD(plain.parameters(), 0.01)
    scales = []
    for _ in range(4):
        backward(model)
        backward(plain)
        optimizer.step()
        other.step()
        scales.append(optimizer.loss_scale)
    assert scales[-1] > scales[0]
    same(weights(model), tensors(plain))


@thinned
def test_kept_gradients_follow_the_loss_scale(ranks, plan, num_ranks):
    ranks(num_ranks).run(kept_while_the_scale_grows, plan)


def cleared_on_one_rank(rank, num_ranks, plan):
    model = sharded(plan)
    optimizer = onefold.SGD(model, lr=0.1)
    backward(model)
    if rank == 1:
        model.blocks[0].up.weight.grad = None
    try:
        optimizer.step()
    except OrderMismatchError as error:
        return str(error)
    return None


@every_plan
def test_a_gradient_cleared_on_one_rank_only_is_an_error(ranks, plan):
    for message in ranks(2).run(cleared_on_one_rank, plan):
        assert message is not None
        assert "'blocks.0.up.weight'" in message
        assert "every rank" in message


# --- steps


def step_while_gathered(rank, num_ranks, plan):
    model, plain = sharded(plan), build(Stack)
    optimizer, other = onefold.SGD(model, lr=0.1), torch.optim.SGD(plain.parameters(), 0.1)
    with onefold.gathered(model):
        backward(model)
        backward(plain)
        optimizer.step()
        other.step()
        same(tensors(model), tensors(plain))
    same(weights(model), tensors(plain))


@thinned
def test_a_step_inside_gathered_is_seen_there(ranks, plan, num_ranks):
    ranks(num_ranks).run(step_while_gathered, plan)


# --- weights


def clamped(model):
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.25, 0.25)


def clamped_data(model):
    for param in model.parameters():
        param.data.clamp_(-0.25, 0.25)


def part_loaded(model):
    model.blocks[1].load_state_dict({name: 0.5 * value for name, value in model.blocks[1].state_dict().items()})


WRITES = {each.__name__: each for each in (clamped, clamped_data, part_loaded)}


def written(rank, num_ranks, plan, name, precision):
    """Weights after writes between steps: with master weights, the next step starts from what was written."""
    ends = []
    for as_written in (WRITES[name], lambda model: [WRITES[name](model) for _ in (0,)]):
        model = sharded(plan, precision=precision)
        optimizer = onefold.SGD(model, lr=0.0)
        backward(model)
        as_written(model)
        want = tensors(model)
        optimizer.step()
        same(weights(model), want, 0)
        ends.append(want)
    assert any(not torch.equal(ends[0][key], value) for key, value in tensors(build(Stack)).items())


PRECISIONS = {
    "fp32": None,
    "bf16": Precision(params="bf16"),
    "bf16 with copies": Precision(params="bf16", master="fp32"),
    "fp16": Precision(params="fp16", loss_scale=256.0),
}


@pairwise(name=list(WRITES), precision=list(PRECISIONS), plan=WHOLE_PLANS)
def test_writes_into_whole_parameters_outlive_the_step(ranks, plan, name, precision):
    ranks(2).run(written, plan, name, PRECISIONS[precision])


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
