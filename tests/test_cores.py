"""Promise: updates on the host run on a rank's share of the cores, never on the one left to the launching thread, and
nothing else of the process is bound.
"""

import gc
import os
import threading

import pytest
import torch

import onefold
from inside import TorchKernel, insides, kernel_on_the_host
from models import Stack, build
from onefold.system.cores import share_of


@pytest.mark.parametrize("num_cores", [1, 2, 3, 16, 31])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_shares_are_apart_while_there_are_cores(num_cores, num_ranks):
    cores = [7 * core for core in range(num_cores)]
    shares = [share_of(cores, index, num_ranks) for index in range(num_ranks)]
    assert all(shares)
    used = [core for share in shares for core in share]
    assert set(used) <= set(cores)
    if num_cores >= num_ranks:
        assert len(used) == len(set(used))
    if num_cores >= 2 * num_ranks:
        assert len(used) == num_cores - num_ranks


@pytest.mark.parametrize(
    ("processors", "told", "want"),
    [
        (float("inf"), [("here", tuple(range(64)))], [63]),
        (4.0, [("here", tuple(range(64)))], [3]),
        (1.5, [("here", tuple(range(64)))], [1]),
        (100.0, [("here", tuple(range(64)))], [63]),
        (8.0, [("here", tuple(range(64)))] * 2, [3, 3]),
        (8.0, [("here", tuple(range(32))), ("here", tuple(range(32, 64)))], [3, 3]),
        (8.0, [("here", tuple(range(64))), ("elsewhere", tuple(range(64)))], [7]),
    ],
)
def test_updates_have_no_more_threads_than_the_quota_of_processors(monkeypatch, processors, told, want):
    monkeypatch.setattr(onefold.system.cores, "quota", lambda: processors)
    for rank, num_threads in enumerate(want):
        share = onefold.system.cores.update_cores(rank, told)
        assert share.num_threads == num_threads
        assert len(share.cores) == len(told[rank][1]) // told.count(told[rank]) - 1


class Watching(TorchKernel):
    def __init__(self):
        self.seen = []

    def update(self, run, step):
        self.seen.append((threading.current_thread(), os.sched_getaffinity(0)))
        super().update(run, step)


def watched(rank, num_ranks):
    before = os.sched_getaffinity(0)
    model = onefold.shard(build(Stack), onefold.OFFLOAD)
    kernel = Watching()
    with kernel_on_the_host(lambda num_threads: kernel):
        optimizer = onefold.SGD(model, lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    session = insides(model)
    session.runtime.finish_updates()
    assert kernel.seen
    assert all(thread is not threading.main_thread() for thread, _ in kernel.seen)
    assert os.sched_getaffinity(0) == before
    return [cores for _, cores in kernel.seen], set(session.cores), before


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_worker_stays_on_the_cores_of_its_rank(ranks, num_ranks):
    results = ranks(num_ranks).run(watched)
    for seen, cores, before in results:
        assert all(each == cores for each in seen)
        assert cores < before or len(before) == 1
    if len(results[0][2]) >= num_ranks:
        assert not set.intersection(*(cores for _, cores, _ in results)) or num_ranks == 1


def test_an_update_thread_ends_with_its_model():
    def train():
        model = onefold.shard(torch.nn.Linear(4, 4), onefold.OFFLOAD)
        optimizer = onefold.AdamW(model)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        return {thread for thread in threading.enumerate() if thread.name.startswith("onefold-update")}

    threads = train()
    assert threads
    gc.collect()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
