"""Owns the wire: every collective Onefold runs goes through a `Comm`.

A `Comm` moves whole flat buffers and shards; it knows nothing of parameters. Reductions are means over the ranks, as in
DistributedDataParallel. Operations return a `Finish` to call before their result is read, or None where the current
stream already orders them.

[Note: The order of a sum]
Floating-point sums depend on their order. On gloo each shard's contributions are exchanged and then summed in rank
order, in at least fp32, so a gradient's bits depend neither on where a parameter lies in its buffer nor on the plan.
NCCL chooses its own order; there plans agree to rounding.
"""

import atexit
import pickle
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.errors import OrderMismatchError, ShardError
from onefold.streams import Finish, Pending

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Comm(Protocol):
    """The seam to the wire. `whole` is 1-D with `num_ranks` times the elements of `shard`; `shard` may be a view of
    it."""

    rank: int
    num_ranks: int

    def all_gather(self, whole: Tensor, shard: Tensor) -> Finish | None:
        """Put every rank's `shard` into `whole`, in rank order."""
        ...

    def refresh(self, whole: Tensor, shard: Tensor) -> Finish | None:
        """As `all_gather`, of updated weights; on a group of its own, since another thread may call it meanwhile."""
        ...

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish | None:
        """Put the mean over ranks of this rank's part of `whole` into `shard`."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Make `tensor` equal to rank 0's. For set-up only; returns when done."""
        ...

    def exchange(self, message: Sequence[int]) -> list[list[int]]:
        """Every rank's message (same length everywhere), by rank. Over host memory, apart from all other traffic."""
        ...

    def exchange_objects(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. For set-up and errors only."""
        ...

    def control_group(self) -> Any:
        """The process group over host memory, for libraries that want one; None where there is but one rank."""
        ...

    def conversation(self) -> "Conversation":
        """A new conversation, for work beside the loop. Every rank calls it."""
        ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """What rank 0 and the others tell each other beside the loop, apart from all other traffic.

    It needs nothing of `torch.distributed`'s own books: `destroy_process_group` in the meantime does not end it.
    """

    rank: int
    num_ranks: int
    _group: Any
    _tag: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on rank 0; nothing on the others.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self.rank:
            self._send(value, 0)
            return []
        return [value, *(self._receive(rank) for rank in range(1, self.num_ranks))]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value.

        Raises:
            RuntimeError: rank 0 is gone.
        """
        if self.rank:
            return self._receive(0)
        for rank in range(1, self.num_ranks):
            with suppress(RuntimeError):  # a rank that is gone need not be told; the others have to be
                self._send(value, rank)
        return value

    def _send(self, value: Any, rank: int) -> None:
        data = bytearray(pickle.dumps(value))
        for sent in (torch.tensor([len(data)], device="cpu"), torch.frombuffer(data, dtype=torch.uint8)):
            self._group.send([sent], rank, self._tag).wait()

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._group.recv([size], rank, self._tag).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._group.recv([data], rank, self._tag).wait()
        return pickle.loads(data.numpy().tobytes())


class LocalComm:
    """A world of one rank: no process group is needed."""

    rank = 0
    num_ranks = 1

    def all_gather(self, whole: Tensor, shard: Tensor) -> Finish | None:
        if whole.data_ptr() != shard.data_ptr():
            whole.copy_(shard)
        return None

    refresh = all_gather

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish | None:
        return self.all_gather(shard, whole)

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def exchange(self, message: Sequence[int]) -> list[list[int]]:
        return [list(message)]

    def exchange_objects(self, value: Any) -> list[Any]:
        return [value]

    def control_group(self) -> None:
        return None

    def conversation(self) -> "Conversation":
        return Conversation(self.rank, self.num_ranks, None, 0)


# Process groups belong to the process and cost threads, memory and (on GPUs) channels, so models over the same ranks
# share them; the entry goes when torch.distributed is shut down.
_made: WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], str], tuple[Any, ...]]] = WeakKeyDictionary()


_GRACE_S = 0.1
_PATIENCE = timedelta(hours=2)
"""How much longer one rank may write than another; one that is gone is noticed at once."""


def _linger() -> None:
    """A thread of gloo lets go of a collective's tensors a moment after everybody was told that it is done, and needs
    the interpreter for it: one that ends meanwhile makes it abort the process. Nothing tells when it has."""
    time.sleep(_GRACE_S)


def _groups(ranks: tuple[int, ...], backend: str) -> tuple[Any, ...]:
    """The groups for gathers, reductions, refreshes and control messages over `ranks`; made once."""
    atexit.unregister(_linger)
    atexit.register(_linger)
    made = _made.setdefault(dist.group.WORLD, {})
    if (ranks, backend) not in made:
        kinds = (backend, backend, backend, "gloo")
        made[ranks, backend] = tuple(dist.new_group(list(ranks), backend=kind) for kind in kinds)
    return made[ranks, backend]


class _GroupComm:
    """What gloo and NCCL worlds share: set-up broadcasts and the control plane, which is always gloo."""

    backend: str

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._root = ranks[0]
        self._data, self._reduction, self._refresh, self._control = _groups(tuple(ranks), self.backend)
        self.rank = dist.get_rank(self._data)
        self.num_ranks = len(ranks)

    def all_gather(self, whole: Tensor, shard: Tensor) -> Finish | None:
        return self._gather(whole, shard, self._data)

    def refresh(self, whole: Tensor, shard: Tensor) -> Finish | None:
        return self._gather(whole, shard, self._refresh)

    def _gather(self, whole: Tensor, shard: Tensor, group: Any) -> Finish | None:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(_as_bytes(tensor), self._root, group=self._data)

    def exchange(self, message: Sequence[int]) -> list[list[int]]:
        sent = torch.tensor(list(message), dtype=torch.int64, device="cpu")
        received = torch.empty(self.num_ranks * len(message), dtype=torch.int64, device="cpu")
        try:
            _all_gather(received, sent, group=self._control)
        except RuntimeError as error:
            raise OrderMismatchError(
                f"rank {self.rank}: another rank left, or did not come to the same point of the step; every rank must "
                f"run as many forwards, backwards and steps ({error})"
            ) from error
        return cast(list[list[int]], received.view(self.num_ranks, len(message)).tolist())

    def exchange_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._control)
        return values

    def control_group(self) -> Any:
        return self._control

    def conversation(self) -> Conversation:
        made = _made[dist.group.WORLD]
        if (self._ranks, "talk") not in made:
            # Made behind torch's back, which would end it with its own. A rendezvous of the same store may come again.
            store = dist.distributed_c10d.PrefixStore(
                f"onefold-{self.exchange_objects(secrets.token_hex(8))[0]}", dist.distributed_c10d._get_default_store()
            )
            group = dist.ProcessGroupGloo(store, self.rank, self.num_ranks, _PATIENCE)
            made[self._ranks, "talk"] = (group, count())
        group, tags = made[self._ranks, "talk"]
        return Conversation(self.rank, self.num_ranks, group, self.exchange_objects(next(tags))[0])


class GlooComm(_GroupComm):
    """Several ranks on CPUs. See [Note: The order of a sum]."""

    backend = "gloo"

    def _gather(self, whole: Tensor, shard: Tensor, group: Any) -> Finish | None:
        return _pending(_all_gather(_as_bytes(whole), _as_bytes(shard), group=group, async_op=True))

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish | None:
        parts = torch.empty_like(whole)
        work = dist.all_to_all_single(parts, whole, group=self._reduction, async_op=True)

        def finish() -> None:
            work.wait()
            rows = parts.view(self.num_ranks, -1)
            total = rows[0].to(torch.promote_types(whole.dtype, torch.float32), copy=True)
            for row in rows[1:]:
                total += row
            shard.copy_(total.div_(self.num_ranks))

        return Pending(finish, work.is_completed)


class NcclComm(_GroupComm):
    """Several ranks on GPUs; collectives run on the current stream, straight from and into the flat buffers."""

    backend = "nccl"

    def _gather(self, whole: Tensor, shard: Tensor, group: Any) -> Finish | None:
        _all_gather(_as_bytes(whole), _as_bytes(shard), group=group)
        return None

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish | None:
        _reduce_scatter(shard, whole, op=dist.ReduceOp.AVG, group=self._reduction)
        return None


class CountingComm:
    """Passes everything on to another `Comm` and counts the elements as the ZeRO paper does: a gather or a scatter of a
    buffer of n elements counts n (section 7)."""

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.num_ranks = inner.num_ranks
        self.gather_numel = 0
        self.reduce_numel = 0

    def all_gather(self, whole: Tensor, shard: Tensor) -> Finish | None:
        self.gather_numel += whole.numel()
        return self.inner.all_gather(whole, shard)

    def refresh(self, whole: Tensor, shard: Tensor) -> Finish | None:
        self.gather_numel += whole.numel()
        return self.inner.refresh(whole, shard)

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish | None:
        self.reduce_numel += whole.numel()
        return self.inner.reduce_scatter(shard, whole)

    def broadcast(self, tensor: Tensor) -> None:
        self.inner.broadcast(tensor)

    def exchange(self, message: Sequence[int]) -> list[list[int]]:
        return self.inner.exchange(message)

    def exchange_objects(self, value: Any) -> list[Any]:
        return self.inner.exchange_objects(value)

    def control_group(self) -> Any:
        return self.inner.control_group()

    def conversation(self) -> Conversation:
        return self.inner.conversation()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, 1-D: what is only moved may have any dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def _pending(work: Any) -> Pending:
    def finish() -> None:
        work.wait()

    return Pending(finish, work.is_completed)


def start() -> None:
    """Initialize torch.distributed when a launcher started this process and the script did not do it: on the GPU of
    this process's local rank where there are GPUs, else on CPU."""
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def default_device() -> torch.device:
    """torch's default device if the caller set one; else where ranks communicate: this process's GPU under NCCL, or
    CPU."""
    chosen = torch.get_default_device()
    if chosen.type != "cpu" or not dist.is_initialized():
        return chosen
    uses_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if uses_gpu else torch.device("cpu")


def connect(device: torch.device, mesh: Any = None) -> Comm:
    """The `Comm` over the ranks of `mesh` (None: all ranks) for buffers on `device`.

    Raises:
        ShardError: the mesh has more than one axis.
    """
    if not dist.is_initialized():
        return LocalComm()
    if mesh is not None and mesh.ndim != 1:
        raise ShardError(f"mesh has {mesh.ndim} axes; give the one axis to shard over, e.g. mesh['shard']")
    ranks = range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist()
    return NcclComm(list(ranks)) if device.type == "cuda" else GlooComm(list(ranks))
