"""Promise: a loop that is cut short - by Ctrl-C while it waits for an update on the host, by a worker that fails, by a
fork - leaves weights that are all of one step, and a process in which training goes on.
"""

import ctypes
import gc
import operator
import os
import signal
import threading
from collections import deque
from functools import partial

import pytest
import torch
from torch import nn

import onefold
from checks import same, tensors
from host_updates import (
    STRESSED,
    Held,
    every_plan,
    prepared,
    through_backward,
    through_forward,
    through_gathered,
    updated,
)
from inside import BrokenKernel
from models import Stack, build
from onefold.errors import OnefoldError
from plans import NAMED_PLANS


class Interrupting(Held):
    """Presses Ctrl-C when it is told to, and updates then."""

    def update(self, run, step):
        if not self.was_told:
            self.go.wait(240)
            os.kill(os.getpid(), signal.SIGINT)
        super().update(run, step)


def wait_in(kernel, use):
    kernel.go.set()
    use()
    threading.Event().wait(240)


def end_by_ctrl_c(kernel, use):
    raises_ctrl_c(lambda: wait_in(kernel, use))


def raises_ctrl_c(use):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            use()
    finally:
        signal.signal(signal.SIGINT, before)


def through_full_state(model, plain):
    same(onefold.full_state_dict(model), tensors(plain))


def is_whole_after(model, way):
    """Whatever looks first sees the step, and writing does not undo it."""
    way(model, updated())
    with onefold.gathered(model, write=True):
        pass
    through_gathered(model, updated())


def interrupted(rank, num_ranks, plan, way):
    kernel = Interrupting()
    model, optimizer = prepared(plan, kernel)
    optimizer.step()
    optimizer.zero_grad()
    end_by_ctrl_c(kernel, lambda: model(torch.ones(2, 4)))
    is_whole_after(model, way)


@pytest.mark.parametrize("plan", STRESSED)
@pytest.mark.parametrize("way", [through_forward, through_gathered, through_full_state, through_backward])
def test_no_old_weight_is_seen_after_a_forward_was_interrupted(ranks, way, plan):
    ranks(1).run(interrupted, STRESSED[plan][0], way)


def interrupted_late(rank, num_ranks, plan, way, place):
    kernel = Interrupting()
    model, optimizer = prepared(plan, kernel, delayed=True, delay_after=0)
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()  # with the weights of before
    end_by_ctrl_c(kernel, lambda: place(model, optimizer))
    optimizer.zero_grad()
    is_whole_after(model, way)


def in_step(model, optimizer):
    optimizer.step()


def in_gathered(model, optimizer):
    with onefold.gathered(model):
        pass


@pytest.mark.parametrize("plan", ["offload", "zero_3 and host"])
@pytest.mark.parametrize("place", [in_step, in_gathered])
@pytest.mark.parametrize("way", [through_gathered, through_full_state])
def test_a_late_update_is_seen_after_its_wait_was_interrupted(ranks, way, place, plan):
    ranks(1).run(interrupted_late, plan, way, place)


def press_ctrl_c(module, arguments):
    raise KeyboardInterrupt


def dropped(rank, num_ranks, plan):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    model.blocks[1].register_forward_pre_hook(press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 4))
    del model
    gc.collect()
    plain, again = build(Stack), onefold.shard(build(Stack), NAMED_PLANS[plan])
    for each in (plain, again):
        each(torch.ones(2, 4)).square().mean().backward()
    with onefold.gathered(again):
        same({name: p.grad for name, p in again.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("plan", ["zero_2", "zero_3", "offload_3"])
def test_other_models_train_after_one_was_interrupted_and_dropped(ranks, plan):
    assert ranks(1).run(dropped, plan) == [None]


def pressed_in_kernels(rank, num_ranks, plan):
    """Ctrl-C comes while no Python runs, and the next thing is that autograd drops what it saved of the weights. All of
    it happens in C, so whatever Python runs first is what a signal's exception is raised in."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    graph = [model(torch.ones(2, 4)).sum()]
    press = partial(getattr(ctypes.CDLL(None), "raise"), int(signal.SIGINT))
    raises_ctrl_c(lambda: deque(map(operator.call, (press, graph.clear)), maxlen=0))
    assert not graph


@pytest.mark.parametrize("plan", ["zero_3", "offload_3"])
def test_ctrl_c_is_not_lost_where_autograd_drops_saved_weights(ranks, plan):
    ranks(1).run(pressed_in_kernels, plan)


def failed(rank, num_ranks, plan):
    """How often what went wrong in one step is raised."""
    model, optimizer = prepared(plan, BrokenKernel())
    optimizer.step()
    raised = 0
    for use in (lambda: model(torch.ones(3, 4)), lambda: in_gathered(model, None), lambda: in_gathered(model, None)):
        try:
            use()
        except ZeroDivisionError:
            raised += 1
    return raised


@every_plan
def test_what_goes_wrong_in_all_units_of_a_step_does_not_come_back_for_each(ranks, plan):
    assert ranks(1).run(failed, plan)[0] <= 2


def use_elsewhere(model):
    """In a process that was forked: 3 if it is told why it cannot."""
    try:
        model(torch.ones(2, 4))
    except OnefoldError as error:
        os._exit(3 if "forked" in str(error) else 1)
    os._exit(0)


def forked(rank, num_ranks, plan):
    kernel = Held()
    model, optimizer = prepared(plan, kernel)
    optimizer.step()
    child = os.fork()
    if child == 0:
        use_elsewhere(model)
    _, status = os.waitpid(child, 0)
    kernel.go.set()
    through_gathered(model, updated())
    return os.waitstatus_to_exitcode(status)


@every_plan
def test_a_process_that_is_forked_during_an_update_is_told(ranks, plan):
    assert ranks(1).run(forked, plan) == [3]


def outside_of_inference(rank, num_ranks, plan):
    model, _ = prepared(plan, Held())
    with torch.inference_mode(), onefold.gathered(model):
        seen = {name: param.grad for name, param in model.named_parameters()}
        assert not any(grad.is_inference() for grad in seen.values())
        return isinstance(model, nn.Module)


@pytest.mark.parametrize("plan", ["zero_2", "zero_3", "offload"])
def test_gradients_are_shown_in_inference_mode(ranks, plan):
    assert ranks(1).run(outside_of_inference, NAMED_PLANS[plan]) == [True]
