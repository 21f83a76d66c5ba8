"""Promise: while all is well ranks never wait to agree. A step waits for one message, whatever the plan; passes wait
for none. A rank that is late is named, and one that needs more than the others gets it.
"""

import logging
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import onefold
from inside import insides
from models import Routed, Stack, build
from onefold.comm import control_plane
from onefold.comm.control_plane import PassHistory
from plans import NAMED_PLANS
from ranks import Case, Turn, train

PLANS = ("zero_0", "zero_1", "zero_2", "zero_3", "offload", "offload_3")
DELAY_S = 0.02


class Delayed:
    """Puts a delay into every message of a model's control plane, as hundreds of ranks over TCP would have: nobody has
    it sooner than that after it was sent."""

    def __init__(self, model, delay_s=DELAY_S):
        self._comm = insides(model).comm
        self._begin, self._objects = self._comm.begin_exchange, self._comm.exchange_objects
        self._delay_s = delay_s
        self._comm.begin_exchange, self._comm.exchange_objects = self.begin_exchange, self.exchange_objects
        self.forget()

    def forget(self):
        self.messages, self.waited_s = 0, 0.0

    def begin_exchange(self, message):
        self.messages += 1
        finish, due = self._begin(message), time.monotonic() + self._delay_s

        def late():
            left = max(0.0, due - time.monotonic())
            self.waited_s += left
            time.sleep(left)  # what is tested: as slow as a large cluster
            return finish()

        return late

    def exchange_objects(self, value):
        self.messages += 1
        return self._objects(value)


def plain(model, optimizer, turn):
    model(turn.randn(3, 4)).square().mean().backward()


def accumulated(model, optimizer, turn):
    for _ in range(3):
        with onefold.accumulate(model):
            plain(model, optimizer, turn)
    plain(model, optimizer, turn)


def several_backwards(model, optimizer, turn):
    plain(model, optimizer, turn)
    plain(model, optimizer, turn)


def evaluated(model, optimizer, turn):
    plain(model, optimizer, turn)
    with torch.no_grad():
        model(turn.randn(3, 4))


def clipped(model, optimizer, turn):
    optimizer.max_grad_norm = 0.5
    plain(model, optimizer, turn)


WORK = (plain, accumulated, several_backwards, evaluated, clipped)


def messages_of_a_step(rank, num_ranks, plan, work, options):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], **options)
    optimizer = onefold.AdamW(model, lr=1e-2)
    delayed, seen = Delayed(model), []
    for step in range(6):
        delayed.forget()
        work(model, optimizer, Turn(rank, step, sharded=True))
        optimizer.step()
        optimizer.zero_grad()
        seen.append((delayed.messages, delayed.waited_s))
    return seen


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_waits_for_one_message(ranks, plan, num_ranks):
    """From the third step on: in the first one ranks get to know each other's order."""
    for rank in ranks(num_ranks).run(messages_of_a_step, plan, plain, {}):
        assert [messages for messages, _ in rank[2:]] == [1, 1, 1, 1]
        assert max(waited_s for _, waited_s in rank[2:]) <= 1.5 * DELAY_S


@pytest.mark.parametrize("work", WORK[1:], ids=lambda work: work.__name__)
@pytest.mark.parametrize("plan", ["zero_0", "zero_2", "zero_3"])
def test_so_does_a_step_of_several_passes(ranks, plan, work):
    for rank in ranks(2).run(messages_of_a_step, plan, work, {}):
        assert [messages for messages, _ in rank[3:]] == [1, 1, 1]


def test_so_does_a_step_on_a_mesh_and_in_fp16(ranks):
    options = {"precision": onefold.Precision(params="fp16")}
    for rank in ranks(2).run(messages_of_a_step, "zero_3", plain, options):
        assert [messages for messages, _ in rank[2:]] == [1, 1, 1, 1]


# --- a rank that needs more than the others


def once_more_later(model, turn):
    order = (0, 1, 1, 0, 2, 3) if turn.rank and turn.step in (3, 4) else (0, 1, 2, 3)
    model(turn.randn(3, 4), order=order).square().mean().backward()


def other_blocks_on_each_rank_later(model, turn):
    order = (0, 1 + turn.rank % 2, 1 + turn.rank % 2, 3) if turn.step >= 2 else (0, 3)
    model(turn.randn(3, 4), order=order).square().mean().backward()


@pytest.mark.parametrize("work", [once_more_later, other_blocks_on_each_rank_later], ids=lambda work: work.__name__)
@pytest.mark.parametrize("plan", ["zero_3", "offload_3"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_unit_beside_the_order_is_served_by_ranks_that_went_on(ranks, num_ranks, plan, work):
    case = Case(model=Routed, work=work, steps=7)
    ranks(num_ranks).run(train, case, plan)


# --- a rank that is late


class Told(logging.Handler):
    """Lets another rank go on once a warning has come."""

    def __init__(self, store):
        super().__init__()
        self._store = store

    def emit(self, record):
        if "optimizer step for rank 1," in record.getMessage():
            self._store.set("warned", record.getMessage())


def late(rank, num_ranks):
    store = dist.PrefixStore("test-late", dist.distributed_c10d._get_default_store())
    told = Told(store)
    logging.getLogger("onefold").addHandler(told)
    quick = {"_PATIENCE": timedelta(seconds=0.05), "_PIECE": timedelta(seconds=0.05), "_LOOKS_EACH_S": 0.05}
    with mock.patch.multiple(control_plane, **quick, _WARN_EACH_S=0.2):
        model = onefold.shard(build(Stack), onefold.ZERO_2)
        optimizer = onefold.SGD(model, lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        if rank == 1:
            store.wait(["warned"])
        optimizer.step()
    logging.getLogger("onefold").removeHandler(told)
    return store.get("warned").decode()


def test_a_rank_that_is_late_is_named_and_waited_for(ranks):
    for warned in ranks(3).run(late):
        assert "optimizer step for rank 1" in warned
        assert "timeout of init_process_group" in warned


# --- what is expected next


def test_a_loop_is_expected_once_it_has_run_twice():
    history, loop = PassHistory(), [*[1, 2] * 15, 1, 3]
    surprises = 0
    for number, kind in enumerate(loop * 6):
        surprises += history.expected != kind and number >= 2 * len(loop)
        history.add(kind)
    assert surprises <= 2


def test_ranks_that_made_the_same_passes_expect_the_same():
    one, other = PassHistory(), PassHistory()
    generator = torch.Generator().manual_seed(0)
    for kind in torch.randint(4, (500,), generator=generator).tolist():
        assert one.expected == other.expected
        one.add(kind), other.add(kind)
    assert (one.num_made, one.digest) == (other.num_made, other.digest)
