"""Owns how a process becomes a rank where a launcher started it and its script did not call torch.distributed."""

from onefold.comm.comm import join, start
from onefold.system.announced_ranks import announced_rank
from onefold.system.environment import environ


def join_ranks() -> None:
    """Initialize torch.distributed as torchrun says, or whoever else announced ranks; without any, or where the script
    did it, do nothing.

    Raises:
        ShardError: ranks were announced, but not where they meet, or which of them this process is.
    """
    if start():
        return
    announced = announced_rank(environ())
    if announced is not None:
        join(
            init_method="env://",
            rank=announced.rank,
            num_ranks=announced.num_ranks,
            local_rank=announced.local_rank,
        )
