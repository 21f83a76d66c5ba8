"""Owns the wire: every collective Onefold runs goes through a `Comm`.

A `Comm` moves whole flat buffers and shards; it knows nothing of parameters. Reductions are means over the ranks, as in
DistributedDataParallel. Operations return a `Finish` to call before their result is read, or None where the current
stream already orders them.

[Note: All ranks, and those that share]
*All ranks* train one model: they meet, agree, average their gradients, and number their files (`rank`, `num_ranks`).
Ranks that *share* one set of shards hold one each (`shard`, `num_shards`): a layout is cut into as many, and gathered
from them. On one axis, as in this file, both are the same; in mesh.py several replicas hold each shard.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.comm.control_plane import ControlPlane, WaitWatch
from onefold.comm.pending_gathers import Refreshes
from onefold.comm.process_groups import PLANES, Families, groups_of
from onefold.comm.reductions import mean_of_rows
from onefold.errors import OrderMismatchError
from onefold.memory.streams import Finish, Pending, Ticket

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Comm(Protocol):
    """The seam to the wire. `whole` is 1-D with `num_shards` times the elements of `shard`; `shard` may be a view of
    it. See [Note: All ranks, and those that share]."""

    rank: int
    num_ranks: int
    shard: int
    """Which shard of every layout this rank holds."""
    num_shards: int
    """Ranks that hold one shard each."""
    replica: int
    """Which of the ranks that hold the same shard this is."""
    num_replicas: int
    peers: tuple[int, ...]
    """The ranks that hold one shard each with this one, by shard."""
    first_peers: tuple[int, ...]
    """The ranks of the first replica, by shard."""
    peer_group: Any
    """Their process group for gathers; None where there is nobody else."""
    reads_parts: bool
    """Whether `reduce_scatter` of a whole in parts does without a copy of it."""
    plane: ControlPlane
    """What models over all these ranks share."""
    refreshes: Refreshes
    """What `refresh` will be called for: models over the same ranks share a group, and so one order."""

    def expose(self, shard: Tensor) -> Tensor:
        """Where the values of `shard`, which rests on the device, should rest to be gathered from; all ranks call it.
        It may be `shard` itself."""

    def expose_whole(self, whole: Tensor) -> Tensor:
        """As `expose`, of `whole`, in which each rank changes its shard, and gathers the others'."""

    def before_change(self) -> None:
        """To be called by all ranks before exposed shards change: come back when nobody reads them any more."""

    def changed(self, shard: Tensor) -> None:
        """To be called by all ranks after an exposed shard changed: its gathers are of the new values."""
        ...

    def all_gather(self, whole: Tensor, shard: Tensor) -> Finish | None:
        """Put every `shard` into `whole`, in their order."""
        ...

    def refresh(self, whole: Tensor, shard: Tensor) -> Finish | None:
        """As `all_gather`, on a group of its own, for `refreshes`: ranks come to it at points of their own."""
        ...

    def expect_reductions(self, shard_bytes: int) -> None:
        """To be called by all ranks before the first reduction: no shard will be larger."""

    def reduce_scatter(self, shard: Tensor, *parts: Tensor) -> Finish | None:
        """Put the mean over all ranks of this rank's part of a whole into `shard`. The whole lies in `parts`, each 1-D
        and contiguous, one after another."""
        ...

    def mean_of_replicas(self, shard: Tensor) -> Finish | None:
        """Put the mean over the ranks that hold the same `shard` in its place."""
        ...

    def total(self, value: Tensor) -> Tensor:
        """The sum of `value` (0-dim) over the shards, in their order: 0-dim, the same bits on all ranks."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Make `tensor` equal to rank 0's on all ranks. For set-up only; returns when done."""
        ...

    def exchange(self, message: Sequence[int]) -> list[list[int]]:
        """Every rank's message (same length everywhere), by rank. Over host memory, apart from all other traffic; for
        set-up."""
        ...

    def begin_exchange(self, message: bytes) -> Callable[[], list[bytes]]:
        """As `exchange`, of a multiple of 8 bytes, without waiting: what is returned waits. Exchanges come in the order
        in which they begin."""
        ...

    def exchange_objects(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. For set-up and errors only."""
        ...

    def ask(self) -> None:
        """Let ranks that wait for others know that this one asks for something: [Note: Units out of order]."""

    def gather_on_host(self, shard: Tensor) -> Tensor:
        """Every shard, one after another; `shard` is 1-D, in host memory. Between exchanges; all ranks call it."""
        ...

    def control_group(self) -> Any:
        """The process group over host memory, for libraries that want one; None where there is but one rank."""
        ...


class Axis(Comm, Protocol):
    """A `Comm` of one axis, of which others can be made."""

    def mean(self, values: Tensor) -> Finish | None:
        """Put the mean over ranks of `values` (1-D) in its place: the same bits on all of them."""
        ...


class CollectiveComm:
    """What a `Comm` of one axis that moves everything by collectives does for memory that ranks see: nothing."""

    reads_parts = False

    def expose(self, shard: Tensor) -> Tensor:
        return shard

    expose_whole = expose

    def before_change(self) -> None:
        pass

    def changed(self, shard: Tensor) -> None:
        pass

    def expect_reductions(self, shard_bytes: int) -> None:
        pass

    def mean_of_replicas(self, shard: Tensor) -> Finish | None:
        return None


class _GroupComm(CollectiveComm):
    """What gloo and NCCL worlds share: set-up broadcasts and the control plane, which is always gloo.

    Args:
        families: ranks that form a world; all those that make one at the same time.
        planes: those that it will be asked for.
        watch: over its waits, where it is a part of a world that has one.
    """

    backend: str
    replica = 0
    num_replicas = 1

    def __init__(self, families: Families, planes: tuple[str, ...] = PLANES, watch: WaitWatch | None = None) -> None:
        self._planes = groups_of(families, self.backend, planes)
        group = self._planes[planes[0]]
        self._root = dist.get_global_rank(group, 0)
        self.rank = self.shard = dist.get_rank(group)
        self.num_ranks = self.num_shards = dist.get_world_size(group)
        self.peers = self.first_peers = tuple(range(self.num_ranks))
        self.peer_group = group
        self.refreshes: Refreshes = self._planes["order"]
        self.watch: WaitWatch = watch or self._planes["watch"]
        self.plane = self.watch.plane

    def all_gather(self, whole: Tensor, shard: Tensor) -> Finish | None:
        return self._gather(whole, shard, self._planes["data"])

    def refresh(self, whole: Tensor, shard: Tensor) -> Finish | None:
        return self._gather(whole, shard, self._planes["refresh"])

    def _gather(self, whole: Tensor, shard: Tensor, group: Any) -> Finish | None:
        raise NotImplementedError

    def total(self, value: Tensor) -> Tensor:
        every = value.new_zeros(self.num_ranks)
        Ticket(self.all_gather(every, value.reshape(1))).wait()
        return every.sum()

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(_as_bytes(tensor), self._root, group=self._planes["data"])

    def exchange(self, message: Sequence[int]) -> list[list[int]]:
        words = array("q", message)
        return [list(array("q", told)) for told in self.begin_exchange(words.tobytes())()]

    def begin_exchange(self, message: bytes) -> Callable[[], list[bytes]]:
        sent = torch.frombuffer(bytearray(message), dtype=torch.int64)
        received = torch.empty(self.num_ranks * len(sent), dtype=torch.int64, device="cpu")
        with self._explained():
            work = _all_gather(received, sent, group=self._planes["control"], async_op=True)

        def finish() -> list[bytes]:
            self._wait(work, is_message=True)
            told = array("q", received.tolist()).tobytes()
            return [told[start : start + len(message)] for start in range(0, len(told), len(message))]

        return finish

    def _wait(self, work: Any, is_message: bool = False) -> None:
        with self._explained():
            self.watch.wait(work, is_message=is_message)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OrderMismatchError:
            raise
        except RuntimeError as error:
            raise OrderMismatchError(
                f"rank {self.rank}: another rank left, or did not come to the same point of the step; every rank must "
                f"run as many forwards, backwards and steps ({error})"
            ) from error

    def exchange_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._planes["control"])
        return values

    def ask(self) -> None:
        self.watch.ask()

    def gather_on_host(self, shard: Tensor) -> Tensor:
        whole = shard.new_empty(self.num_ranks * shard.numel())
        with self._explained():
            work = _all_gather(_as_bytes(whole), _as_bytes(shard), group=self._planes["control"], async_op=True)
        self._wait(work, is_message=True)
        return whole

    def control_group(self) -> Any:
        return self._planes["control"]


class GlooComm(_GroupComm):
    """Several ranks on CPUs. See [Note: The order of a sum]."""

    backend = "gloo"

    def _gather(self, whole: Tensor, shard: Tensor, group: Any) -> Finish | None:
        work = _all_gather(_as_bytes(whole), _as_bytes(shard), group=group, async_op=True)
        return Pending(partial(self._wait, work), work.is_completed)

    def reduce_scatter(self, shard: Tensor, *parts: Tensor) -> Finish | None:
        whole = joined(parts)
        rows = torch.empty_like(whole)
        work = dist.all_to_all_single(rows, whole, group=self._planes["reduction"], async_op=True)
        return self._mean(shard, rows, work)

    def mean(self, values: Tensor) -> Finish | None:
        rows = values.new_empty(self.num_ranks * values.numel())
        work = _all_gather(_as_bytes(rows), _as_bytes(values), group=self._planes["reduction"], async_op=True)
        return self._mean(values, rows, work)

    def _mean(self, target: Tensor, rows: Tensor, work: Any) -> Pending:
        """Put the mean of every rank's row, once they are there, into `target`."""

        def finish() -> None:
            self._wait(work)
            mean_of_rows(target, rows.view(self.num_ranks, -1))

        return Pending(finish, work.is_completed)


class NcclComm(_GroupComm):
    """Several ranks on GPUs; collectives run on the current stream, straight from and into the flat buffers."""

    backend = "nccl"

    def _gather(self, whole: Tensor, shard: Tensor, group: Any) -> Finish | None:
        _all_gather(_as_bytes(whole), _as_bytes(shard), group=group)
        return None

    def reduce_scatter(self, shard: Tensor, *parts: Tensor) -> Finish | None:
        _reduce_scatter(shard, joined(parts), op=dist.ReduceOp.AVG, group=self._planes["reduction"])
        return None

    def mean(self, values: Tensor) -> Finish | None:
        dist.all_reduce(values, op=dist.ReduceOp.AVG, group=self._planes["reduction"])
        return None


def joined(parts: Sequence[Tensor]) -> Tensor:
    """What lies in `parts`, in one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, 1-D: what is only moved may have any dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def start() -> bool:
    """Initialize torch.distributed when torchrun started this process and the script did not do it: on the GPU of
    this process's local rank where there are GPUs, else on CPU. Whether it is initialized now."""
    if not dist.is_initialized() and dist.is_torchelastic_launched():
        join(local_rank=dist.get_node_local_rank())
    return dist.is_initialized()


def join(
    backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    num_ranks: int = -1,
    local_rank: int = 0,
    is_alone: bool = False,
) -> None:
    """Initialize torch.distributed as told, unless it is.

    Args:
        local_rank: the GPU to use, where there are GPUs: of those that this process sees, it may have one of its own.
        backend: torch's name of it; None is gloo, and NCCL beside it where there are GPUs.
        timeout, init_method, rank, num_ranks: as for `torch.distributed.init_process_group`.
        is_alone: this process is the only rank; nobody has to be met.
    """
    if dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    name = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    name = "cpu:gloo,cuda:nccl" if name == "nccl" else name  # ranks exchange small messages over host memory
    if is_alone:
        store = dist.HashStore()  # type: ignore[attr-defined]  # its stub does not say that it is exported
        dist.init_process_group(name, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(name, timeout=timeout, init_method=init_method, rank=rank, world_size=num_ranks)


def default_device() -> torch.device:
    """torch's default device if the caller set one; else where ranks communicate: this process's GPU under NCCL, or
    CPU."""
    chosen = torch.get_default_device()
    if chosen.type != "cpu" or not dist.is_initialized():
        return chosen
    uses_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if uses_gpu else torch.device("cpu")
