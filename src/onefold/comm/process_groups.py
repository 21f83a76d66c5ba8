"""Owns the process groups of this process: models over the same ranks share them, and what is left to send over them
when the process ends.
"""

import atexit
import time
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from onefold.comm.control_plane import ControlPlane, WaitWatch
from onefold.comm.pending_gathers import Refreshes, leave
from onefold.errors import ShardError

Families = tuple[tuple[int, ...], ...]
"""Sets of ranks, none in two of them, that do the same at the same time, each for itself."""
PLANES = ("data", "reduction", "refresh", "control")
"""What a group of its own is for, since it may run beside the others. Control messages go through host memory."""
_GRACE_S = 0.1

# Process groups belong to the process and cost threads, memory and (on GPUs) channels, so models over the same ranks
# share them; the entry goes when torch.distributed is shut down.
_made: WeakKeyDictionary[Any, dict[tuple[Families, str, tuple[str, ...]], dict[str, Any]]] = WeakKeyDictionary()


def all_ranks() -> tuple[int, ...] | None:
    """The ranks of torch.distributed; None where it is not set up."""
    return tuple(range(dist.get_world_size())) if dist.is_initialized() else None


def groups_of(families: Families, backend: str, planes: tuple[str, ...]) -> dict[str, Any]:
    """This rank's group for each plane, over its one of `families`, and the order of its refreshes; made once, by all
    ranks of all families.

    Raises:
        ShardError: it is in none of them.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)
    made = _made.setdefault(dist.group.WORLD, {})
    if (families, backend, planes) not in made:
        me = dist.get_rank()
        mine = next((place for place, ranks in enumerate(families) if me in ranks), None)
        if mine is None:
            raise ShardError(f"this is rank {me}, and mesh holds ranks {families}: shard only on ranks of the mesh")
        # torch tells groups apart by their number, equal on all ranks if all make all; or else by their ranks as well.
        world, timeout = ref(dist.group.WORLD), _timeout()
        is_partial = sum(map(len, families)) < dist.get_world_size()
        made[families, backend, planes] = {
            plane: [
                dist.new_group(
                    list(ranks),
                    timeout=timeout,
                    backend="gloo" if plane == "control" else backend,
                    use_local_synchronization=is_partial,
                )
                for ranks in families
            ][mine]
            for plane in planes
        } | {
            "order": Refreshes(lambda: dist.is_initialized() and dist.group.WORLD is world()),
            "watch": _watch_over(families[mine], me),
        }
    return made[families, backend, planes]


def _watch_over(ranks: tuple[int, ...], me: int) -> WaitWatch:
    name = "onefold-watch-" + "-".join(map(str, ranks))
    store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return WaitWatch(ControlPlane(), store, ranks.index(me), len(ranks))


def _timeout() -> timedelta | None:
    """What the script gave `init_process_group`; None where that was torch's default, which depends on the backend. A
    group that is made later does not take it over by itself."""
    for device in ("cuda", "cpu"):
        try:
            backend = dist.group.WORLD._get_backend(torch.device(device))  # type: ignore[union-attr]
        except RuntimeError:  # none for such devices
            continue
        given = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(given, timedelta):
            return None if given in (default_pg_timeout, default_pg_nccl_timeout) else given
    return None


def _leave() -> None:
    """Let the others have what they wait for. And a thread of gloo lets go of a collective's tensors a moment after all
    were told that it is done, which needs an interpreter, or it aborts the process. Nothing tells when it has."""
    if dist.is_initialized():
        made = _made.get(dist.group.WORLD, {}).values()
        leave(groups["order"] for groups in made if "order" in groups)
    time.sleep(_GRACE_S)
