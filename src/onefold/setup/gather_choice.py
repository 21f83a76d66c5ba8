"""Owns the choice of how shards are gathered and gradients reduced: by collectives, or by copies between the ranks of
one machine."""

import os
import platform
import time
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from onefold.comm.agreement import together
from onefold.comm.comm import Comm
from onefold.comm.copies.copy_collectives import PeerComm
from onefold.comm.copies.shared_memory import MappedPool, Pool, SymmetricPool
from onefold.errors import ShardError
from onefold.memory.streams import lanes_for
from onefold.optim.kernels.fused import mean_on

GatherChoice = Literal["auto", "collective", "copy"]

_TRIAL_BYTES = 2**25
"""Of each rank's shard: about a block of a 7B model over four ranks."""
_TRIAL_SIDE = 8192
_TRIALS = 8


def choose_gather(how: GatherChoice, comm: Comm, device: torch.device) -> Comm:
    """`comm`, or one over it whose gathers of shards on `device` are copies. All ranks call it and get the same.

    Raises:
        ShardError: copies were asked for, and the ranks do not see each other's memory.
    """
    is_tried = how == "auto" and device.type == "cuda"
    if comm.peer_group is None or not (how == "copy" or is_tried):
        return comm
    try:
        if how == "auto" and not _is_faster(_copying(comm, device), comm, device):
            return comm
        return _copying(comm, device)  # another one: what the trial took is given back
    except ShardError:
        if how == "copy":
            raise
        return comm


def _copying(comm: Comm, device: torch.device) -> PeerComm:
    pool = together(comm, partial(_pool, comm, device), did="sees no memory of the others")
    return PeerComm(comm, pool, mean_on(device))


def _pool(comm: Comm, device: torch.device) -> Pool:
    mine = (_machine(), SymmetricPool.num_opened)
    everyone = comm.exchange_objects(mine)
    machines = sorted({everyone[peer][0] for peer in comm.peers})
    if len(machines) > 1:
        raise ShardError(
            f'gather="copy" needs ranks that gather from each other to be on one machine (and in one container), and '
            f"these are on {len(machines)} ({', '.join(name for name, *_ in machines)}); leave gather out, or give a "
            "mesh whose shard axis is one machine"
        )
    if device.type != "cuda":
        return MappedPool(comm)
    if len({everyone[peer][1] for peer in comm.peers}) > 1:
        raise ShardError(
            'gather="copy": some of these ranks have shared GPU memory with other ranks before, on a mesh of theirs, '
            "and PyTorch cannot let them share with these any more; shard the model that more ranks hold first, or "
            'give gather="collective" to those before it'
        )
    return SymmetricPool(comm.peer_group, device)


def _machine() -> tuple[str, str, str]:
    """Where numbers of processes mean the same: in another container they are those of other processes, if any."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # a sandbox that shows none: there its other names have to tell
        namespace = ""
    return platform.node(), Path("/proc/sys/kernel/random/boot_id").read_text().strip(), namespace


def _is_faster(copying: Comm, collective: Comm, device: torch.device) -> bool:
    """Whether matrix products beside gathers take less time if the gathers are `copying`, over all ranks."""
    resting = torch.zeros(_TRIAL_BYTES, dtype=torch.uint8, device=device)
    mine = [_nanoseconds(comm, comm.expose(resting), device) for comm in (copying, collective)]
    every = collective.exchange(mine)
    return sum(copying for copying, _ in every) < sum(collected for _, collected in every)


def _nanoseconds(comm: Comm, shard: torch.Tensor, device: torch.device) -> int:
    lanes = lanes_for(device)
    whole = torch.empty(comm.num_shards * shard.numel(), dtype=shard.dtype, device=device)
    factor = torch.zeros(_TRIAL_SIDE, _TRIAL_SIDE, dtype=torch.bfloat16, device=device)
    begun = 0
    for trial in range(_TRIALS + 1):
        if trial == 1:  # the one before it warmed up
            torch.cuda.synchronize(device)
            comm.exchange([0])
            begun = time.perf_counter_ns()
        lanes.order_gather()
        gathered = lanes.gather.run(partial(comm.all_gather, whole, shard))
        product = factor @ factor
        gathered.wait()
        del product
    torch.cuda.synchronize(device)
    return time.perf_counter_ns() - begun
