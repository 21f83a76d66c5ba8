"""Promise: an exception in a step leaves the next step as if it had not been there, and a rank that dies is an error on
the others, not a hang.
"""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

import onefold
from checks import same, tensors, weights
from models import Stack, backward, build, sharded
from onefold import Precision
from onefold.comm.mesh import connect
from onefold.engine.released import ReducedGradient
from onefold.errors import OrderMismatchError
from onefold.testing import RankError
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan
from ranks import Turn

PATIENCE_S = 240.0


class Stop(Exception):
    """What goes wrong."""


def stop(*ignored):
    raise Stop


class StopBackward(torch.autograd.Function):
    """Passes its input on, and fails in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Stop


def stop_backward(module, args, output):
    return StopBackward.apply(output)


# --- ways to fail: each fails in one pass of `model` and catches it


def failing(model, x, register):
    handle = register()
    try:
        model(x).square().mean().backward()
    except Stop:
        return True
    finally:
        handle.remove()
    return False


def before_the_first_block(model, x):
    return failing(model, x, lambda: model.blocks[0].register_forward_pre_hook(stop))


def inside_a_block(model, x):
    return failing(model, x, lambda: model.blocks[1].up.register_forward_hook(stop))


def after_the_last_block(model, x):
    return failing(model, x, lambda: model.head.register_forward_pre_hook(stop))


def in_backward_of_the_head(model, x):
    return failing(model, x, lambda: model.blocks[2].register_forward_hook(stop_backward))


def in_backward_of_a_block(model, x):
    return failing(model, x, lambda: model.blocks[1].up.register_forward_hook(stop_backward))


def at_the_end_of_backward(model, x):
    return failing(model, x, lambda: model.embed.register_forward_hook(stop_backward))


def in_a_gradient_hook(model, x):
    return failing(model, x, lambda: model.blocks[0].down.weight.register_hook(stop))


def in_the_loss(model, x):
    try:
        stop(model(x))
    except Stop:
        return True


FAILURES = [
    before_the_first_block,
    inside_a_block,
    after_the_last_block,
    in_backward_of_the_head,
    in_backward_of_a_block,
    at_the_end_of_backward,
    in_a_gradient_hook,
    in_the_loss,
]
by_failure = pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)


def gathered_units(model):
    """Names of units that are whole though nothing runs."""
    units = model._onefold_session.runtime.units
    return [unit.name for unit in units if type(unit).__name__ == "ShardedUnit" and (unit.is_gathered or _grown(unit))]


def _grown(unit):
    return any(flat.buffer.is_grown for flat in unit.flats)


def step(model, optimizer, rank, number, is_accumulated, fail=None):
    """One step of two micro-batches; `fail` strikes in the second, and the step is then made anew."""

    def micro(part):
        return Turn(rank, 10 * number + part, sharded=True).randn(3, 4)

    def first():
        if is_accumulated:
            with onefold.accumulate(model):
                model(micro(0)).square().mean().backward()
        else:
            model(micro(0)).square().mean().backward()

    if fail is not None:
        first()
        assert _fail_in(model, micro(1), fail, is_accumulated)
        optimizer.zero_grad()
        assert gathered_units(model) == []
    first()
    model(micro(1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _fail_in(model, x, fail, is_accumulated):
    if is_accumulated:
        with onefold.accumulate(model):
            return fail(model, x)
    return fail(model, x)


def with_and_without(rank, num_ranks, plan, fail, is_accumulated, when):
    """Tensors that differ between training with failures and without; what stays gathered."""
    ends = []
    for struck in (fail, None):
        model = onefold.shard(build(Stack), NAMED_PLANS[plan])
        optimizer = onefold.AdamW(model, lr=1e-2, max_grad_norm=0.5)
        for number in range(3):
            step(model, optimizer, rank, number, is_accumulated, struck if number == when else None)
        ends.append(weights(model))
    left = gathered_units(model)
    return [name for name, tensor in ends[0].items() if not torch.equal(tensor, ends[1][name])], left


@pairwise(fail=FAILURES, plan=PLANS, num_ranks=(1, 2))
def test_the_next_step_is_as_if_nothing_had_failed(ranks, plan, fail, num_ranks):
    results = ranks(num_ranks).run(with_and_without, plan, fail, False, 1, timeout_s=PATIENCE_S)
    assert results == [([], [])] * num_ranks


@by_failure
@pytest.mark.parametrize("plan", ["zero_1", "zero_3"])
def test_a_failure_in_the_first_step_changes_nothing(ranks, plan, fail):
    """Before any order was recorded."""
    assert ranks(2).run(with_and_without, plan, fail, False, 0, timeout_s=PATIENCE_S) == [([], [])] * 2


@by_failure
@every_plan
def test_a_failure_inside_accumulate_changes_nothing(ranks, plan, fail):
    assert ranks(2).run(with_and_without, plan, fail, True, 1, timeout_s=PATIENCE_S) == [([], [])] * 2


def exception_inside_accumulate(rank, num_ranks, plan):
    """Whether `accumulate` is over after an exception left its block: gradients are reduced again."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    try:
        with onefold.accumulate(model):
            raise Stop
    except Stop:
        model(Turn(rank, 0, sharded=True).randn(3, 4)).square().mean().backward()
    return isinstance(model.head.weight.grad, ReducedGradient)


@every_plan
def test_an_exception_leaves_accumulate(ranks, plan):
    assert ranks(2).run(exception_inside_accumulate, plan) == [True, True]


def exception_inside_gathered(rank, num_ranks, plan):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    try:
        with onefold.gathered(model):
            raise Stop
    except Stop:
        return gathered_units(model)


@every_plan
def test_an_exception_leaves_gathered(ranks, plan):
    assert ranks(2).run(exception_inside_gathered, plan) == [[], []]


# --- one rank alone


def raised_by(error, what):
    """The ranks whose note on `error` speaks of `what`."""
    heads = [note.split(" of ")[0].removeprefix("--- rank ") for note in error.__notes__ if what in note]
    return {int(rank) for head in heads for rank in head.split(", ")}


def caught_on_one_rank(rank, num_ranks, plan, fail, when):
    """One rank catches an exception and goes on to the optimizer's step."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model, lr=1e-2)
    for number in range(when + 2):
        x = Turn(rank, number, sharded=True).randn(3, 4)
        if rank == 1 and number == when:
            fail(model, x)
        else:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("fail", [inside_a_block, in_backward_of_a_block], ids=lambda fail: fail.__name__)
@pytest.mark.parametrize("plan", ["zero_1", "zero_3"])
def test_a_failure_that_one_rank_catches_is_an_error_on_all(ranks, plan, fail, when):
    """What that rank should have sent is missing, so there is no right step to make. (The ranks raise, rather than
    return what they caught, since a rank may leave with a gather that nobody answers any more.)"""
    with pytest.raises(OrderMismatchError, match="rank") as raised:
        ranks(2, grace_s=PATIENCE_S).run(caught_on_one_rank, plan, fail, when, timeout_s=PATIENCE_S)
    assert raised_by(raised.value, "OrderMismatchError") == {0, 1}


def die(*ignored):
    os._exit(7)


def dying(rank, num_ranks, plan, where):
    """One rank's process ends in its second step."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model, lr=1e-2)
    for number in range(3):
        if rank == 1 and number == 1:
            part = model.blocks[1]
            _ = part.register_forward_hook(die) if where == "forward" else part.up.weight.register_hook(die)
        model(Turn(rank, number, sharded=True).randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("plan", ["zero_1", "zero_3"])
def test_a_rank_that_dies_is_an_error_on_the_others(ranks, plan, where):
    with pytest.raises((RankError, RuntimeError)) as raised:
        ranks(2, grace_s=PATIENCE_S).run(dying, plan, where, timeout_s=PATIENCE_S)
    assert raised_by(raised.value, "exit code 7") == {1}
    assert raised_by(raised.value, "OrderMismatchError: rank 0: another rank left") == {0}


def patience(rank, num_ranks, seconds):
    """What the script gave torch.distributed, and what Onefold's groups have."""
    dist.destroy_process_group()
    meeting = dist.FileStore(str(seconds[1]), num_ranks)
    given = {} if seconds[0] is None else {"timeout": timedelta(seconds=seconds[0])}
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=num_ranks, **given)
    group = connect(torch.device("cpu")).control_group()
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.mark.parametrize("given", [None, 77])
def test_groups_are_as_patient_as_the_script_says(ranks, tmp_path, given):
    found = ranks(2).run(patience, (given, tmp_path / "meeting"))
    assert found == [timedelta(seconds=77) if given else default_pg_timeout] * 2


# --- forwards that are interrupted


SCALED = Precision(loss_scale=256.0)


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


@pairwise(precision={"plain": None, "scaled": SCALED}, plan=PLANS, num_ranks=(1, 2))
def test_an_interrupted_forward_leaves_nothing_behind(ranks, plan, num_ranks, precision):
    ranks(num_ranks).run(interrupted, plan, precision)
