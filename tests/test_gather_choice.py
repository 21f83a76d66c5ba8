"""Promise: shards are gathered by copies only where ranks see each other's memory, and in little more."""

import os
import platform
from unittest.mock import patch

import pytest
import torch

import onefold
from models import Stack, build
from onefold.comm.copies.shared_memory import MappedPool, SymmetricPool
from onefold.comm.mesh import connect
from onefold.errors import ShardError
from onefold.setup.gather_choice import choose_gather


def on_two_machines(rank, num_ranks, gather, names=("machine-0", "machine-1")):
    name, platform.node = platform.node, lambda: names[rank]
    try:
        onefold.shard(build(Stack), onefold.ZERO_3, gather=gather)
    except ShardError as error:
        return str(error)
    finally:
        platform.node = name
    return None


def test_copies_between_machines_are_refused(ranks):
    for told in ranks(2).run(on_two_machines, "copy"):
        assert "are on 2 (machine-0, machine-1)" in told
    assert ranks(2).run(on_two_machines, "auto") == [None, None]


def shared_with_others_before(rank, num_ranks, gather):
    """Rank 1 has opened memory with ranks of another mesh. What this is told, or whether collectives are used."""
    comm, gpu = connect(torch.device("cpu")), torch.device("cuda", rank)
    with patch.object(SymmetricPool, "num_opened", 7 * rank):
        try:
            return choose_gather(gather, comm, gpu) is comm
        except ShardError as error:
            return str(error)


def test_gpus_that_shared_memory_with_others_are_told_apart(ranks):
    """PyTorch would let these ranks wait for each other without end."""
    for told in ranks(2).run(shared_with_others_before, "copy"):
        assert "have shared GPU memory with other ranks before" in told
    assert ranks(2).run(shared_with_others_before, "auto") == [True, True]


def in_two_containers(rank, num_ranks):
    with patch.object(os, "readlink", lambda path: f"pid:[{rank}]"):
        return on_two_machines(rank, num_ranks, "copy", names=("host", "host"))


def test_copies_between_containers_are_refused(ranks):
    """Of the same name, on the same kernel: there a process's number is that of another one."""
    for told in ranks(2).run(in_two_containers):
        assert "in one container), and these are on 2 (host, host)" in told


def taken(rank, num_ranks):
    """What a pool took for allocations of 17 MiB with one of a few bytes between each, and whether they are apart."""
    comm = connect(torch.device("cpu"))
    pool = MappedPool(comm)
    allocations = [pool.allocate(numel, torch.uint8) for numel in (17 * 2**20, 7) * 4]
    for number, (own, _) in enumerate(allocations):
        own.fill_(16 * rank + number)
    comm.exchange([0])
    wrong = [
        (number, shard)
        for number, (_, everyone) in enumerate(allocations)
        for shard, seen in enumerate(everyone)
        if not bool((seen == 16 * shard + number).all())
    ]
    comm.exchange([0])
    return pool.held_bytes, wrong


def test_small_shards_between_large_ones_share_an_allocation(ranks):
    assert ranks(2).run(taken) == [(4 * 17 * 2**20 + 2**24, [])] * 2


def test_another_way_to_gather_is_refused():
    with pytest.raises(ShardError, match="gather='nccl': give one of 'auto', 'collective', 'copy'"):
        onefold.shard(build(Stack), onefold.ZERO_3, gather="nccl")
