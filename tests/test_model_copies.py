"""Promise: a copy of a sharded model is a faithful one, or an error that names the way out; never placeholders.

Libraries failed here because `deepcopy`, `pickle` and `state_dict` copied emptied tensors without a word.
"""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import onefold
from checks import same, tensors, weights
from models import Stack, build
from onefold.errors import OnefoldError
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan, one_and_two_ranks
from ranks import Turn, average, squared


def trained(rank, plan):
    """A sharded model after one step."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1)
    squared(model, Turn(rank, 0, sharded=True))
    optimizer.step()
    optimizer.zero_grad()
    for block in model.blocks:
        del block.middle  # no module with an activation in it can be copied
    return model


def by_deepcopy(model):
    return tensors(copy.deepcopy(model))


def by_averaged_model(model):
    return tensors(AveragedModel(model).module)


def by_pickle(model):
    return tensors(pickle.loads(pickle.dumps(model)))


def by_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return tensors(torch.load(buffer, weights_only=False))


def by_state_dict(model):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer)


def by_state_dict_of_a_block(model):
    state = {f"blocks.1.{name}": tensor.clone() for name, tensor in model.blocks[1].state_dict().items()}
    return {**weights(model), **state}


def by_block_deepcopy(model):
    block = copy.deepcopy(model.blocks[1])
    return {**weights(model), **{f"blocks.1.{name}": tensor for name, tensor in tensors(block).items()}}


def by_reading(model):
    """What an average over the weights does when nobody told it about shards."""
    return {name: parameter.detach() * 1.0 for name, parameter in model.named_parameters()}


def by_data(model):
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def by_numpy(model):
    return {name: torch.tensor(parameter.tolist()) for name, parameter in model.named_parameters()}


COPIES = (
    by_deepcopy,
    by_averaged_model,
    by_pickle,
    by_torch_save,
    by_state_dict,
    by_state_dict_of_a_block,
    by_block_deepcopy,
    by_reading,
    by_data,
    by_numpy,
)


def is_refused(how, plan):
    """A module cannot be copied once it is sharded; values can be read where they are whole."""
    return plan == "zero_3" or how not in READABLE


def copied(rank, num_ranks, plan, how):
    """The copy equals the weights, or is refused with the way out and changes nothing."""
    wanted = weights(trained(rank, plan))
    model = trained(rank, plan)  # nobody has read it since its step
    if is_refused(how, plan):
        with pytest.raises(OnefoldError, match=r"gathered\(model\)"):
            how(model)
        same(weights(model), wanted, 0)
    else:
        same(how(model), wanted, 0)


@pairwise(how=COPIES, plan=PLANS, num_ranks=(1, 2))
def test_a_copy_is_faithful_or_refused(ranks, how, plan, num_ranks):
    ranks(num_ranks).run(copied, plan, how)


READABLE = (by_state_dict, by_state_dict_of_a_block, by_reading, by_data, by_numpy)


def copied_while_gathered(rank, num_ranks, plan, how):
    model = trained(rank, plan)
    with onefold.gathered(model):
        same(how(model), tensors(model), 0)


@pairwise(how=READABLE, plan=PLANS, num_ranks=(1, 2))
def test_gathered_weights_can_be_copied(ranks, how, plan, num_ranks):
    ranks(num_ranks).run(copied_while_gathered, plan, how)


def moving_average(rank, num_ranks, plan):
    """An average of the weights over three steps, swapped in for one evaluation and out again, as in plain PyTorch."""
    replicas = [build(Stack) for _ in range(num_ranks)]
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.SGD(model, lr=0.1, momentum=0.9)
    plain_optimizers = [torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9) for replica in replicas]
    mean, wanted_mean = weights(model), tensors(replicas[rank])
    for step in range(3):
        for number, replica in enumerate(replicas):
            squared(replica, Turn(number, step, sharded=False))
        average(replicas)
        for each, replica in zip(plain_optimizers, replicas, strict=True):
            each.step()
            replica.zero_grad()
        squared(model, Turn(rank, step, sharded=True))
        optimizer.step()
        optimizer.zero_grad()
        for average_of, now in ((mean, weights(model)), (wanted_mean, tensors(replicas[rank]))):
            for name, tensor in average_of.items():
                tensor.lerp_(now[name], 0.5)
        _evaluate_swapped(model, replicas[rank], mean)
    same(mean, wanted_mean)
    same(weights(model), tensors(replicas[rank]))


def _evaluate_swapped(model, replica, mean):
    """Both models evaluate the average; then training goes on from the weights it had."""
    kept, plain_kept = weights(model), tensors(replica)
    replica.load_state_dict(mean)
    _write(model, mean)
    with torch.no_grad():
        same({"output": model(torch.ones(1, 4))}, {"output": replica(torch.ones(1, 4))})
    replica.load_state_dict(plain_kept)
    _write(model, kept)


def _write(model, values):
    with onefold.gathered(model, write=True):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(values[name])


@every_plan
@one_and_two_ranks
def test_an_average_of_the_weights_can_be_kept_and_swapped_in(ranks, plan, num_ranks):
    ranks(num_ranks).run(moving_average, plan)


def load_elsewhere(rank, num_ranks, plan):
    """The gathered state dict loads into a plain model, and back into a sharded one that differed."""
    model = trained(rank, plan)
    with onefold.gathered(model):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = build(Stack, seed=5)
    plain.load_state_dict(state)
    same({"output": plain(torch.ones(1, 4))}, {"output": model(torch.ones(1, 4))})
    other = onefold.shard(build(Stack, seed=6), NAMED_PLANS[plan])
    other.load_state_dict(state)
    same(weights(other), state, 0)
    optimizers = [onefold.SGD(each, lr=0.1) for each in (model, other)]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        squared(each, Turn(rank, 1, sharded=True))
        optimizer.step()
    same(weights(other), weights(model), 0)  # the loaded values reached what the optimizer updates


@every_plan
@one_and_two_ranks
def test_a_state_dict_loads_into_any_model(ranks, plan, num_ranks):
    ranks(num_ranks).run(load_elsewhere, plan)


def sent(rank, num_ranks, plan, gather, is_sent):
    """Weights after training goes on, where rank 0 sent some to another process; and whether what that has is right."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], gather=gather)
    optimizer = onefold.SGD(model, lr=0.1)
    is_right = True
    for step in range(4):
        squared(model, Turn(rank, step, sharded=True))
        optimizer.step()
        optimizer.zero_grad()
        if is_sent and rank == 0 and step == 1 and plan != "zero_3":
            pickle.loads(ForkingPickler.dumps(model.head.weight.detach()))
        with onefold.gathered(model):
            if is_sent and rank == 0 and step == 2:
                for name, value in model.state_dict().items():
                    got = pickle.loads(ForkingPickler.dumps({name: value}))[name]
                    is_right = is_right and torch.equal(got, value)
    return weights(model), is_right


@pytest.mark.parametrize("gather", ["collective", "copy"])
@every_plan
def test_weights_can_be_sent_to_another_process(ranks, plan, gather):
    """torch moves what is sent to memory that both processes see, and cannot resize it any more."""
    want = ranks(2).run(sent, plan, gather, False)
    for (got, is_right), (wanted, _) in zip(ranks(2).run(sent, plan, gather, True), want, strict=True):
        same(got, wanted, 0)
        assert is_right
