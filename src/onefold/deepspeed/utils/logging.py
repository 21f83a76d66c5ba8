"""DeepSpeed's module `utils.logging`: its logger, and logging on some ranks."""

import logging
from collections.abc import Sequence

from onefold.deepspeed import comm

logger = logging.getLogger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on `ranks` (-1 in front: all; None: on none). Before torch.distributed is set up, every process logs."""
    if not comm.is_initialized():
        logger.log(level, message)
    elif ranks and (ranks[0] == -1 or comm.get_rank() in ranks):
        logger.log(level, "[Rank %d] %s", comm.get_rank(), message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print where `log_dist` would log."""
    if not comm.is_initialized():
        print(message)
    elif ranks and (ranks[0] == -1 or comm.get_rank() in ranks):
        print(f"[Rank {comm.get_rank()}] {message}")
