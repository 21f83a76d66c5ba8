"""Promise: a `RankPool` runs functions on real ranks; whatever goes wrong on one becomes an error that says where."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from onefold.errors import OrderMismatchError
from onefold.testing import RankError, RankPool, RankTimeoutError


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


def add_up(rank, num_ranks, tensor):
    before = dist.get_world_size() if dist.is_initialized() else None
    if num_ranks > 1:
        dist.all_reduce(tensor)
    return rank, before, tensor.tolist(), torch.get_num_threads(), torch.rand(1).item()


def process(rank, num_ranks):
    return os.getpid()


def fail_on_one(rank, num_ranks):
    if rank == 1:
        raise OrderMismatchError("this rank went its own way")
    dist.barrier()


def fail_on_all(rank, num_ranks):
    raise KeyError("everywhere")


def wait_for_nobody(rank, num_ranks):
    if rank == 1:
        dist.barrier()
    return rank


def die(rank, num_ranks):
    if rank == 1:
        os._exit(9)
    time.sleep(600)


def leave(rank, num_ranks):
    sys.exit(3)


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.hook = lambda: None


def raise_unpicklable(rank, num_ranks):
    raise Unpicklable("this", "that")


def return_unpicklable(rank, num_ranks):
    return lambda: None


def test_ranks_share_a_group(pool):
    results = pool.run(add_up, torch.ones(2))
    assert [result[:4] for result in results] == [(0, 2, [2.0, 2.0], 1), (1, 2, [2.0, 2.0], 1)]
    assert results[0][4] == results[1][4]


def test_one_rank_has_no_group():
    with RankPool(1) as pool:
        assert pool.run(add_up, torch.ones(2))[0][:4] == (0, None, [1.0, 1.0], 1)


def test_processes_stay(pool):
    assert pool.run(process) == pool.run(process)


def test_an_error_keeps_its_type_and_names_its_rank(pool):
    with pytest.raises(OrderMismatchError, match="its own way") as caught:
        pool.run(fail_on_one)
    notes = "\n".join(caught.value.__notes__)
    assert "--- rank 1 of 2" in notes
    assert "in fail_on_one" in notes
    assert "rank 0 of 2: still running" in notes
    assert pool.run(add_up, torch.ones(1))[0][2] == [2.0]


def test_workers_survive_an_error_that_all_ranks_share():
    with RankPool(2, grace_s=240) as patient:  # on a busy machine one rank may be much later than the other
        before = patient.run(process)
        with pytest.raises(KeyError, match="everywhere"):
            patient.run(fail_on_all)
        assert patient.run(process) == before


def hang(pool):
    """What is said of a hang, once only the rank that does hang is left: on a busy machine that may take longer."""
    for timeout_s in (2, 10, 60):
        with pytest.raises(RankTimeoutError) as caught:
            pool.run(wait_for_nobody, timeout_s=timeout_s)
        if "still running: rank 0" not in str(caught.value):
            break
    return str(caught.value)


def test_a_hang_shows_who_and_where(pool):
    said = hang(pool)
    assert "still running: rank 1 of 2" in said
    assert "in wait_for_nobody" in said
    assert pool.run(add_up, torch.ones(1))[1][2] == [2.0]


@pytest.mark.parametrize(
    ("fn", "message"),
    [(die, "rank 1: its process died"), (leave, "SystemExit: 3"), (raise_unpicklable, "Unpicklable: this and that")],
)
def test_every_end_is_an_error_with_a_rank(pool, fn, message):
    with pytest.raises(RankError, match=message):
        pool.run(fn)


def test_a_result_that_cannot_be_pickled_says_so(pool):
    with pytest.raises(Exception, match=r"[Cc]an't pickle|cannot pickle"):
        pool.run(return_unpicklable)
