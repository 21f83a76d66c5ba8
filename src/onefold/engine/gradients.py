"""Owns the gradients of one flat buffer, from autograd's tensors to the averaged shard.

A backward pass first adds the parameters' own gradients into `local` (this rank's sum). A reduction turns it into the
mean over ranks and adds that to `reduced`, which rests as the plan says. Invariant: padding is zero in both.

| grads / optim | `reduced` holds                     | elements on the wire |
|---------------|-------------------------------------|----------------------|
| part / part   | this rank's shard, on its tier      | n                    |
| whole / part  | whole, this rank's range averaged   | n                    |
| whole / whole | whole, all of it averaged           | 2 n                  |
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from onefold.comm.comm import Comm
from onefold.comm.reductions import exact_squares, squares
from onefold.engine.grad_accumulator import LocalSum
from onefold.memory.buffer import views
from onefold.memory.streams import Chain, Finish, Lanes, Ticket
from onefold.plan.layout import Layout
from onefold.plan.table import Tier
from onefold.tiers.tier import Storehouse


class Keep(Protocol):
    """How reduced gradients rest."""

    tier: Tier
    """Where they rest."""
    takes_parts: bool
    """Whether the local sum may come in parts: no other method needs it whole."""
    start: int
    """Index in the flat buffer of the first element that `kept` tensors hold."""
    reserved: Sequence[Tensor]
    """Memory that is held even while there is no gradient."""
    lent: Ticket
    """When an update that reads `kept` is done: before, nobody writes there."""
    left: Ticket
    """When `kept` can be read where it rests."""
    squares: Tensor | None
    """The sum of the squares of this rank's averaged range (0-dim, fp64), where it was taken as the range passed."""

    def lend(self, until: Ticket) -> None:
        """An update reads `kept` until then."""
        ...

    def add_buffer(self) -> None:
        """Take memory so that another gradient can come while an update reads the last one."""
        ...

    def target(self, parts: Sequence[Tensor]) -> Tensor:
        """Where the mean of this rank's range goes, given the local sum, of which the first part is `local` below."""
        ...

    def finish(self, local: Tensor, own: Tensor) -> Finish | None:
        """What else the wire must do once `own` is the mean."""
        ...

    def add(self, kept: Tensor | None, local: Tensor, own: Tensor) -> Tensor:
        """`kept` with the new mean added."""
        ...

    def updated(self, kept: Tensor) -> Tensor:
        """The averaged gradients of the elements this rank updates."""
        ...

    def on_device(self, kept: Tensor) -> Tensor:
        """The averaged range of this rank, [shard_numel], where the computation can read it."""
        ...


class _DeviceKeep:
    """What rests on the device."""

    tier = Tier.DEVICE
    reserved: Sequence[Tensor] = ()
    left = Ticket()  # what is on the device can be read in the order of the computation
    lent = Ticket()
    squares: Tensor | None = None

    def lend(self, until: Ticket) -> None:
        self.lent = until

    def add_buffer(self) -> None:
        """Updates off the device read a copy of what rests on it."""

    def finish(self, local: Tensor, own: Tensor) -> Finish | None:
        return None


class PartKeep(_DeviceKeep):
    """Only this rank's shard is kept."""

    takes_parts = True

    def __init__(self, layout: Layout, comm: Comm) -> None:
        self._layout = layout
        self.start = layout.shard_range(comm.shard)[0]

    def target(self, parts: Sequence[Tensor]) -> Tensor:
        numel = self._layout.shard_numel
        is_all = len(parts) == 1 and parts[0].numel() == numel
        return parts[0] if is_all else parts[0].new_empty(numel)

    def add(self, kept: Tensor | None, local: Tensor, own: Tensor) -> Tensor:
        kept = own if kept is None else kept.add_(own)
        self.squares = squares(kept)
        return kept

    def updated(self, kept: Tensor) -> Tensor:
        return kept

    def on_device(self, kept: Tensor) -> Tensor:
        return kept


class AwayKeep(PartKeep):
    """Only this rank's shard is kept, off the device: it leaves as soon as it is averaged. One that is to be added to
    comes back for it."""

    def __init__(self, layout: Layout, comm: Comm, dtype: torch.dtype, rest: Storehouse) -> None:
        super().__init__(layout, comm)
        self.tier = rest.tier
        self._rest = rest
        self._dtype = dtype
        self._buffers = [rest.allocate(layout.shard_numel, dtype)]
        self._readers = [Ticket()]
        self._filled = self._next = 0

    @property
    def reserved(self) -> Sequence[Tensor]:  # type: ignore[override]
        return self._buffers

    def add_buffer(self) -> None:
        if len(self._buffers) > 1:  # for an optimizer before
            return
        self._buffers.append(self._rest.allocate(self._layout.shard_numel, self._dtype))
        self._readers.append(Ticket())

    def lend(self, until: Ticket) -> None:
        super().lend(until)
        self._readers[self._filled] = until.copy()
        self._next = (self._filled + 1) % len(self._buffers)

    def add(self, kept: Tensor | None, local: Tensor, own: Tensor) -> Tensor:
        self.left.wait()
        self._readers[self._next].wait()
        if kept is not None:
            before, ticket = self._rest.fetch(kept)
            ticket.wait()
            own += before
        self.squares = squares(own)
        self._filled = self._next
        self.left = self._rest.store(self._buffers[self._filled], own)
        return self._buffers[self._filled]

    def on_device(self, kept: Tensor) -> Tensor:
        here, ticket = self._rest.fetch(kept)
        ticket.wait()
        return here


class WholeKeep(_DeviceKeep):
    """The whole buffer is kept, this rank's range of it averaged."""

    takes_parts = False
    start = 0

    def __init__(self, layout: Layout, comm: Comm) -> None:
        self._range = slice(*layout.shard_range(comm.shard))

    def target(self, parts: Sequence[Tensor]) -> Tensor:
        (local,) = parts
        return local[self._range]

    def add(self, kept: Tensor | None, local: Tensor, own: Tensor) -> Tensor:
        if kept is None:
            kept = local
        else:
            kept[self._range] += own
        self.squares = squares(kept[self._range])
        return kept

    def updated(self, kept: Tensor) -> Tensor:
        return kept[self._range]

    def on_device(self, kept: Tensor) -> Tensor:
        return kept[self._range]


class ReplicatedKeep(WholeKeep):
    """The whole buffer is kept, averaged everywhere: every rank updates every element."""

    def __init__(self, layout: Layout, comm: Comm) -> None:
        super().__init__(layout, comm)
        self._comm = comm

    def finish(self, local: Tensor, own: Tensor) -> Finish | None:
        return self._comm.all_gather(local, own)

    def add(self, kept: Tensor | None, local: Tensor, own: Tensor) -> Tensor:
        kept = local if kept is None else kept.add_(local)
        self.squares = squares(kept[self._range])
        return kept

    def updated(self, kept: Tensor) -> Tensor:
        return kept


class Gradients:
    """Gradients of the parameters in one flat buffer."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, keep: Keep, comm: Comm) -> None:
        self.layout = layout
        self.dtype = dtype
        self.keep = keep
        self.local = LocalSum(layout, dtype, device, may_be_loose=comm.reads_parts and keep.takes_parts)
        self.reduced: Tensor | None = None  # as `keep` says
        self._device = device
        self._comm = comm
        self.others = frozenset(range(comm.num_ranks)) - {comm.rank}
        """Ranks that may have given to a mean to which this one gave nothing."""

    @property
    def whole_bytes(self) -> int:
        """Bytes of one sum of all gradients."""
        return self.layout.numel * self.dtype.itemsize

    def reduce(self, lanes: Lanes) -> Ticket:
        """Start turning `local` into the mean over ranks, added to `reduced`."""
        parts = self.local.take()
        own = self.keep.target(parts)

        def add() -> None:
            self.reduced = self.keep.add(self.reduced, parts[0], own)

        def launch() -> Finish:
            return Chain(
                lambda: self._comm.reduce_scatter(own, *parts),
                lambda: self.keep.finish(parts[0], own),
                add,
            )

        return lanes.reduce.run(launch, after=[lanes.mark()], keep=[own, *parts])

    def clear(self, slot: int) -> None:
        """Forget the gradient of one parameter."""
        self.local.clear(slot)
        self.clear_kept(slot)

    def clear_kept(self, slot: int) -> None:
        """Forget what was averaged of it, but not what is to be reduced next."""
        for part, _ in self._kept_of(slot):
            part.zero_()

    def assign(self, slot: int, values: Tensor) -> None:
        """Replace the averaged gradient of one parameter; `values` has its shape and is the same on every rank."""
        for part, first in self._kept_of(slot):
            part.copy_(values.reshape(-1)[first : first + len(part)])

    def multiply(self, factor: float) -> None:
        """Multiply whatever is held."""
        self._open()
        self.local.multiply(factor)
        if self.reduced is not None:
            self.reduced.mul_(factor)

    def _open(self) -> None:
        """What is kept is about to be changed where it rests."""
        self.keep.left.wait_on_host()
        self.keep.lent.wait()
        self.keep.squares = None

    def updated_at(self, rest: Storehouse) -> tuple[Tensor, Ticket]:
        """The averaged gradients of the elements this rank updates, where the updates of state that rests at `rest` can
        read them, and when they can. `reduced` must be there."""
        if self.reduced is None:
            raise RuntimeError("no reduced gradient")
        grad = self.keep.updated(self.reduced)
        return (grad, self.keep.left) if rest.tier == self.keep.tier else rest.bring(grad)

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes held now, by tier."""
        reserved = self.keep.reserved or (() if self.reduced is None else (self.reduced,))
        held = {Tier.DEVICE: self.local.nbytes}
        held[self.keep.tier] = held.get(self.keep.tier, 0) + sum(tensor.nbytes for tensor in reserved)
        return held

    def squares_of(self, slots: set[int], is_exact: bool = False) -> Tensor:
        """The sum of the squares of the gradients of some parameters, over this rank's averaged range (0-dim, fp64).

        `is_exact`: summed in fp64 throughout.
        """
        if self.reduced is None:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        is_all = len(slots) == len(self.layout.slots)
        if is_all and self.keep.squares is not None and not is_exact:
            return self.keep.squares
        own = self.keep.on_device(self.reduced)
        pieces = self.layout.pieces(self._comm.shard)
        parts = [own] if is_all else [own[piece.start : piece.stop] for piece in pieces if piece.slot in slots]
        take = exact_squares if is_exact else squares
        return sum(map(take, parts), torch.zeros((), dtype=torch.float64, device=self._device))

    def _kept_of(self, slot: int) -> list[tuple[Tensor, int]]:
        """The part of one parameter's averaged gradient that is kept here, to be changed, and the index of its first
        element."""
        if self.reduced is None:
            return []
        self._open()
        start = self.keep.start
        pieces = self.layout.pieces_between(start, start + len(self.reduced))
        return [(self.reduced[piece.start : piece.stop], piece.slot_start) for piece in pieces if piece.slot == slot]

    def drop(self) -> None:
        """Forget all gradients and free their memory."""
        self.local.drop()
        self.reduced = None

    def whole(self) -> list[Tensor]:
        """The averaged gradients, one per slot in the parameter's shape; a collective. `reduced` must be there."""
        if self.reduced is None:
            raise RuntimeError("no reduced gradient")
        whole = torch.empty(self.layout.numel, dtype=self.dtype, device=self._device)
        Ticket(self._comm.all_gather(whole, self.keep.on_device(self.reduced).contiguous())).wait()
        return views(whole, self.layout)
