"""Owns `Comm`s over another one: the base that passes everything on, and the one that counts."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from onefold.comm.comm import Axis, Comm
from onefold.memory.streams import Finish

Inner = TypeVar("Inner", bound=Comm)


class OverComm(Generic[Inner]):
    """A `Comm` that passes everything on to another one."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.rank, self.num_ranks = inner.rank, inner.num_ranks
        self.shard, self.num_shards = inner.shard, inner.num_shards
        self.replica, self.num_replicas = inner.replica, inner.num_replicas
        self.peers, self.first_peers, self.peer_group = inner.peers, inner.first_peers, inner.peer_group
        self.reads_parts = inner.reads_parts
        self.refreshes = inner.refreshes
        self.plane = inner.plane

    def expose(self, shard: Tensor) -> Tensor:
        return self.inner.expose(shard)

    def expose_whole(self, whole: Tensor) -> Tensor:
        return self.inner.expose_whole(whole)

    def before_change(self) -> None:
        self.inner.before_change()

    def changed(self, shard: Tensor) -> None:
        self.inner.changed(shard)

    def all_gather(self, whole: Tensor, shard: Tensor) -> Finish | None:
        return self.inner.all_gather(whole, shard)

    def refresh(self, whole: Tensor, shard: Tensor) -> Finish | None:
        return self.inner.refresh(whole, shard)

    def expect_reductions(self, shard_bytes: int) -> None:
        self.inner.expect_reductions(shard_bytes)

    def reduce_scatter(self, shard: Tensor, *parts: Tensor) -> Finish | None:
        return self.inner.reduce_scatter(shard, *parts)

    def mean_of_replicas(self, shard: Tensor) -> Finish | None:
        return self.inner.mean_of_replicas(shard)

    def total(self, value: Tensor) -> Tensor:
        return self.inner.total(value)

    def broadcast(self, tensor: Tensor) -> None:
        self.inner.broadcast(tensor)

    def exchange(self, message: Sequence[int]) -> list[list[int]]:
        return self.inner.exchange(message)

    def begin_exchange(self, message: bytes) -> Callable[[], list[bytes]]:
        return self.inner.begin_exchange(message)

    def exchange_objects(self, value: Any) -> list[Any]:
        return self.inner.exchange_objects(value)

    def ask(self) -> None:
        self.inner.ask()

    def gather_on_host(self, shard: Tensor) -> Tensor:
        return self.inner.gather_on_host(shard)

    def control_group(self) -> Any:
        return self.inner.control_group()


class CountingComm(OverComm[Axis]):
    """Counts the elements as the ZeRO paper does: a gather or a scatter of a buffer of n elements counts n, a mean that
    all ranks get 2 n (section 7)."""

    def __init__(self, inner: Axis) -> None:
        super().__init__(inner)
        self.gather_numel = 0
        self.reduce_numel = 0

    def all_gather(self, whole: Tensor, shard: Tensor) -> Finish | None:
        self.gather_numel += whole.numel()
        return super().all_gather(whole, shard)

    def refresh(self, whole: Tensor, shard: Tensor) -> Finish | None:
        self.gather_numel += whole.numel()
        return super().refresh(whole, shard)

    def reduce_scatter(self, shard: Tensor, *parts: Tensor) -> Finish | None:
        self.reduce_numel += sum(part.numel() for part in parts)
        return super().reduce_scatter(shard, *parts)

    def mean(self, values: Tensor) -> Finish | None:
        self.reduce_numel += 2 * values.numel()
        return self.inner.mean(values)

    def total(self, value: Tensor) -> Tensor:
        self.gather_numel += self.num_shards
        return super().total(value)
