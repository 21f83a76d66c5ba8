"""Owns what a mesh means: which ranks share one set of shards, and which hold the same shard again.

A mesh of one axis shards over it. One of two axes keeps replicas: what a plan partitions is cut over the shard axis
only, and every replica holds all parts. So gathers stay inside a replica - a host, say - and between replicas only
means of shards travel. Nobody else asks how many axes there are.

[Note: Replicas]
Replicas hold the same bits: they start from rank 0's weights, and apply the same means and the same norm. A reduction
is a mean over the shard axis, in the dtype of the gradients, and then the mean of that over the replicate axis, which
all replicas get. On gloo each of the two is summed in rank order, in at least fp32. So on one mesh all plans agree to
the bit. (1, S) has all bits of one axis of S ranks. (R, 1) has the gradients of one axis of R ranks to the bit, and its
norm up to the order of the fp64 sum. Other meshes of as many ranks agree to rounding: (a + b) + (c + d) is not
((a + b) + c) + d.
"""

from typing import Any

import torch
from torch import Tensor

from onefold.comm.comm import Axis, Comm, GlooComm, NcclComm
from onefold.comm.local import LocalComm
from onefold.comm.process_groups import PLANES, Families, all_ranks
from onefold.comm.wrappers import OverComm
from onefold.errors import ShardError
from onefold.memory.streams import Chain, Finish

_REPLICATE, _SHARD = ("replicate", "dp_replicate"), ("shard", "dp_shard")


class GridComm(OverComm[Comm]):
    """Replicas of shards: a `Comm` made of two axes, and of one that is all ranks. See [Note: Replicas].

    Args:
        everyone: all ranks.
        shards: the ranks of this replica.
        replicas: the ranks that hold the same shard as this one.
    """

    def __init__(self, everyone: Comm, shards: Axis, replicas: Axis) -> None:
        super().__init__(everyone)
        self._shards = shards
        self._replicas = replicas
        self.shard, self.num_shards = shards.rank, shards.num_ranks
        self.replica, self.num_replicas = replicas.rank, replicas.num_ranks
        places = [tuple(place) for place in everyone.exchange([self.replica, self.shard])]
        self.peers, self.first_peers = (
            tuple(places.index((replica, shard)) for shard in range(self.num_shards)) for replica in (self.replica, 0)
        )
        self.peer_group, self.refreshes = shards.peer_group, shards.refreshes

    def all_gather(self, whole: Tensor, shard: Tensor) -> Finish | None:
        return self._shards.all_gather(whole, shard)

    def refresh(self, whole: Tensor, shard: Tensor) -> Finish | None:
        return self._shards.refresh(whole, shard)

    def reduce_scatter(self, shard: Tensor, *parts: Tensor) -> Finish | None:
        return Chain(
            lambda: self._shards.reduce_scatter(shard, *parts),
            lambda: self.mean_of_replicas(shard),
        )

    def mean_of_replicas(self, shard: Tensor) -> Finish | None:
        return self._replicas.mean(shard)

    def total(self, value: Tensor) -> Tensor:
        # Replicas may run on other processors, which sum squares in another order.
        total = self._shards.total(value)
        self._replicas.broadcast(total)
        return total

    def gather_on_host(self, shard: Tensor) -> Tensor:
        every = self.inner.gather_on_host(shard).view(self.num_ranks, -1)
        return every[list(self.peers)].view(-1)

    def broadcast(self, tensor: Tensor) -> None:
        self._replicas.broadcast(tensor)
        self._shards.broadcast(tensor)


def connect(device: torch.device, mesh: Any = None) -> Comm:
    """The `Comm` over the ranks of `mesh` (None: all ranks) for buffers on `device`.

    Raises:
        ShardError: the mesh has axes that mean nothing here, or other ranks than this one.
    """
    world = all_ranks()
    if world is None:
        return LocalComm()
    axis = NcclComm if device.type == "cuda" else GlooComm
    if mesh is None:
        return axis((world,))
    if mesh.ndim == 1:
        return axis((tuple(mesh.mesh.tolist()),))
    rows = rows_of(mesh)
    data, reduction, refresh, control = PLANES
    everyone = GlooComm((tuple(sorted(rank for row in rows for rank in row)),), (control,))
    return GridComm(
        everyone,
        axis(rows, (data, reduction, refresh), everyone.watch),
        axis(tuple(zip(*rows, strict=True)), (data, reduction), everyone.watch),
    )


def rows_of(mesh: Any) -> Families:
    """The ranks of a mesh of two axes, replica by replica.

    Raises:
        ShardError: it has more axes, or names that do not tell which is which, or ranks in no order.
    """
    what = 'init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))'
    names = mesh.mesh_dim_names
    if mesh.ndim != 2:
        raise ShardError(f"mesh has {mesh.ndim} axes {names or ''}; give one axis to shard over, or two: {what}")
    is_turned = bool(names) and names[0] in _SHARD and names[1] in _REPLICATE
    if names and not is_turned and not (names[0] in _REPLICATE and names[1] in _SHARD):
        raise ShardError(f"the axes of mesh are called {names}: which keeps replicas, and which shards? Give {what}")
    rows = (mesh.mesh.t() if is_turned else mesh.mesh).tolist()
    # torch numbers the ranks of a group in rising order, and with them the shards.
    if any(list(line) != sorted(line) for line in (*rows, *zip(*rows, strict=True))):
        raise ShardError(f"mesh has ranks {rows}, which do not rise along each axis; give {what}")
    return tuple(map(tuple, rows))
