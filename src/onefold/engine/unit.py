"""Owns a unit: the parameters of one module that are gathered, reduced and released together.

[Note: Version counters]
Parameters are bound by `param.data = view`, so each keeps a version counter of its own: refilling the flat buffer is
not a modification that autograd could see. What autograd should see - an update between forward and backward - is
counted in `Flat.version` and checked where saved weights are unpacked.

[Note: Logical and physical release]
`is_gathered` is logical: it changes at points of the program that are the same on every rank, and decides whether a use
needs a collective. The storage behind it may outlive a release as long as somebody holds a view (buffer.py).
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from threading import RLock
from weakref import ref

import torch
from torch import Tensor, nn

from onefold.comm.comm import Comm
from onefold.comm.pending_gathers import Refresh
from onefold.engine.flat import Flat, Trained
from onefold.engine.released import Owner, ReleasedParameter, metadata_only
from onefold.memory.streams import Finish, Lanes, Ticket
from onefold.memory.trace_labels import label
from onefold.plan.table import Tier

Gather = Callable[[Tensor, Tensor], Finish | None]


class Use:
    """Counts the saved tensors of one forward pass that still point into a unit."""

    __slots__ = ("views",)

    def __init__(self) -> None:
        self.views: set[ref[object]] = set()
        """Those tensors' addresses, as long as autograd keeps them."""

    @property
    def is_over(self) -> bool:
        """Whether none of them is left."""
        return not self.views


class Unit:
    """One unit whose parameters rest whole: always gathered. `PartUnit` is the partitioned kind."""

    def __init__(self, name: str, index: int, flats: Sequence[Flat], comm: Comm, lanes: Lanes) -> None:
        self.name = name
        self.index = index
        self.flats = tuple(flats)
        self.is_gathered = True
        self.is_used = True
        """Whether computation asked for it since it was gathered (prefetched units were not asked for yet)."""
        self.is_resting = False
        """Whether it stayed gathered after a forward, and backward has not asked for it yet."""
        self.depth = 0
        """Forwards of its modules that are running."""
        self.pins = 0
        """`gathered` contexts that hold it."""
        self.use = Use()
        self.open_uses: set[Use] = set()
        self._comm = comm
        self._lanes = lanes
        self._refreshes = comm.refreshes
        self._tickets: list[Ticket] = []
        self._params = [param for flat in self.flats for param in flat.params]
        self._classes = [type(param) for param in self._params]
        self._lock = RLock()
        """Of whoever waits for values to be there: other threads than the one that trains may read weights, too."""
        self._is_watched = False
        """Whether somebody may read the newest values without asking for them, so that the step must wait."""

    @property
    def trained_flats(self) -> list[tuple[Flat, Trained]]:
        return [(flat, flat.trained) for flat in self.flats if flat.trained is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered unit."""
        return sum(flat.buffer.nbytes for flat in self.flats)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the largest shard of gradients that a reduction gives."""
        shards = [flat.layout.shard_numel * trained.gradients.dtype.itemsize for flat, trained in self.trained_flats]
        return max(shards, default=0)

    def adopt(self, owner: Owner) -> None:
        """Tie every parameter to the runtime that answers for it."""
        for flat in self.flats:
            for param in flat.params:
                param._onefold_owner = ref(owner)  # type: ignore[attr-defined]

    def gather(self) -> None:
        """Start making all parameters whole."""

    def gather_on_host(self, is_wanted: bool) -> None:
        """Gather over host memory, apart from all other traffic; for ranks that do not want it only there."""

    def wait(self) -> None:
        """Let the current stream read the gathered parameters."""
        self.finish_update()
        self._refreshes.send_ready()

    def release(self) -> None:
        """Let go of the whole parameters."""

    def rest(self) -> bool:
        """After a forward that a backward may follow: stay gathered until then. Whether it does."""
        return False

    def written(self) -> list[nn.Parameter]:
        """Parameters that were changed in place since they were gathered, and would lose that."""
        return []

    def keep_written(self) -> None:
        """What was changed in place until now has been taken over."""

    def try_free(self) -> bool:
        """Give memory of released parameters back; False if somebody still holds views of it."""
        return True

    def update(self, flat: Flat, compute: Callable[[], None]) -> None:
        """Start the update of one flat buffer, after which every rank's part comes to wherever it is read."""
        if flat.trained is not None:
            self._watch(flat)
            flat.update = flat.trained.rest.run(self._labelled(compute), partial(self.spread, flat))
            flat.trained.gradients.keep.lend(flat.update.copy())
            self._queue(flat)

    def update_late(self, flat: Flat, compute: Callable[[], None]) -> None:
        """Start the update of one flat buffer, whose result is only seen after `catch_up`."""
        if flat.trained is not None:
            flat.late = flat.trained.rest.run(self._labelled(compute), lambda _: None)
            flat.trained.gradients.keep.lend(flat.late.copy())

    def _labelled(self, compute: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with label("update", self.name):
                compute()

        return run

    def catch_up(self) -> None:
        """Wait for late updates, and let their results come to wherever they are read."""
        caught = [flat for flat in self.flats if flat.late is not None]
        for flat in caught:
            self._wait_late(flat)
            self._watch(flat)
            self._show_all(flat)
        if caught:  # else nothing is gathered again: rank 0 may be here alone, to save what all ranks have gathered
            self.refresh(caught)

    @property
    def is_late_elsewhere(self) -> bool:
        """Whether catching up takes other ranks, too: they have made parts of what is late."""
        return any(flat.late is not None and flat.weight.numel() < flat.layout.numel for flat in self.flats)

    def _wait_late(self, flat: Flat) -> None:
        """Wait for its late update, which stays late if the wait is interrupted."""
        try:
            if flat.late is not None:
                flat.late.wait()
        except Exception:
            flat.late = None
            raise
        flat.late = None

    def refresh(self, flats: Collection[Flat]) -> None:
        """The values of `flats` are being changed: hide them until they are there."""
        for flat in flats:
            flat.version += 1
            torch.autograd.graph.increment_version(flat.params)
            flat.note_versions()
        if any(self._is_coming(flat) for flat in flats):
            self.is_used = False
            self._hide()

    def _is_coming(self, flat: Flat) -> bool:
        """Whether new values of `flat` may still be on their way, from the worker or from other ranks."""
        return flat.update.is_pending or flat.arrival.is_pending or flat.weight.numel() < flat.layout.numel

    def show_stored(self, flats: Collection[Flat]) -> None:
        """Bring what was stored into `flats` between steps to wherever it is read; returns when it is there."""
        for flat in flats:
            self._show_all(flat)
        self.refresh(flats)
        self.finish_update()
        self.wait_tickets()

    def wait_refreshed(self) -> None:
        """Let the current stream read what `refresh` brought, unless it is still to come and nobody can tell."""
        if self.is_used:
            self.wait_tickets()
        elif self._is_watched:
            self.finish_update()
        self._is_watched = False

    def _watch(self, flat: Flat) -> None:
        """Before new values come: see who could read them without telling us. That is who holds a view of the weights
        (`param.data`, a state dict, an array), or calls what a parameter's own class has and a hidden one has not."""
        has_methods = any(cls is not nn.Parameter for cls in self._classes)
        self._is_watched = self._is_watched or has_methods or flat.buffer.is_watched

    def spread(self, flat: Flat, after: Ticket) -> None:
        """Once `after` is done: bring the updated values of one flat buffer to where this rank's weights are."""
        flat.current = flat.publish(self._lanes, after)
        flat.shown = flat.current.copy()

    def _show_all(self, flat: Flat) -> None:
        """Bring values that are where updates run to all ranks. They call it at the same point."""
        self.spread(flat, self._lanes.mark())
        self._send(flat, self._comm.all_gather)

    def _queue(self, flat: Flat) -> None:
        """Send an update that was started: now, if it is done. See [Note: Who launches collectives]."""
        if flat.update.is_pending:
            self._refreshes.add(
                Refresh(owner=self, update=flat.update.copy(), send=partial(self._send, flat, self._comm.refresh))
            )
        else:
            self._send(flat, self._comm.all_gather)

    def _send(self, flat: Flat, gather: Gather) -> Ticket:
        """Bring what was published to all ranks; what was there before, if the update failed: they wait for it."""
        ready = flat.current
        if flat.weight.numel() < flat.layout.numel:
            with label("refresh", self.name):
                launch = partial(gather, flat.buffer.whole, flat.weight)
                ready = self._lanes.gather.run(launch, after=[ready], keep=[flat.buffer.whole, flat.weight])
        self._tickets.append(ready)
        return ready.copy()

    def finish_update(self) -> None:
        """Wait for updates that are under way, and let parameters be read again."""
        with self._lock:
            self._refreshes.finish(self)
            for flat in self.flats:
                flat.finish_update()
            if not self.is_used:
                self.wait_tickets()
                self._show()
                self.is_used = True

    @property
    def is_updating(self) -> bool:
        """Whether the worker has not finished an update of it."""
        return any(flat.is_updating for flat in self.flats)

    def _hide(self) -> None:
        for param in self._params:
            param.__class__ = ReleasedParameter  # type: ignore[assignment]

    def _show(self) -> None:
        for param, cls in zip(self._params, self._classes, strict=True):
            param.__class__ = cls

    def wait_tickets(self) -> None:
        """Order the current stream after every gather that was started."""
        with self._lock:
            while self._tickets:
                self._tickets[0].wait()
                self._tickets.pop(0)

    def is_done(self) -> bool:
        """Whether nothing that autograd saved, and no running forward, needs the parameters any more."""
        return self.depth == 0 and self.pins == 0 and all(use.is_over for use in self.open_uses)


class PartUnit(Unit):
    """One unit whose parameters rest in shards: gathered for use, released after."""

    def __init__(self, name: str, index: int, flats: Sequence[Flat], comm: Comm, lanes: Lanes) -> None:
        super().__init__(name, index, flats, comm, lanes)
        self._versions: list[int] = []

    def gather(self) -> None:
        try:
            self.finish_update()
        finally:  # other ranks, where the update did not fail, wait for this one's part
            with label("gather", self.name):
                for flat in self.flats:
                    flat.buffer.grow()
                self._fill()
            self.is_gathered = True
            self.is_used = False

    def gather_on_host(self, is_wanted: bool) -> None:
        self.finish_update()
        for flat in self.flats:
            here = torch.empty_like(flat.weight, device="cpu")
            self._lanes.down.run(partial(_copy, here, flat.weight), after=[flat.shown.copy()]).wait_on_host()
            whole = self._comm.gather_on_host(here)
            if is_wanted:
                flat.buffer.grow()
                flat.buffer.whole.copy_(whole)
        if is_wanted:
            self.is_gathered = True
            self.is_used = False

    def _fill(self) -> None:
        for flat in self.flats:
            shard, fetched = flat.rest.fetch(flat.weight)
            flat.arrival = fetched if flat.rest.tier != Tier.DEVICE else flat.arrival
            launch = partial(self._comm.all_gather, flat.buffer.whole, shard)
            self._tickets.append(self._lanes.gather.run(launch, after=[fetched, flat.current], keep=[shard]))

    def wait(self) -> None:
        if self.is_used:
            return
        self.wait_tickets()
        self.is_used = True
        self._show()
        self.keep_written()

    def keep_written(self) -> None:
        self._versions = [param._version for param in self._params]

    def written(self) -> list[nn.Parameter]:
        if not self.is_used:
            return []
        with metadata_only():
            pairs = zip(self._params, self._versions, strict=True)
            return [param for param, version in pairs if param._version != version]

    def release(self) -> None:
        self._withdraw()
        self.is_gathered = False

    def _withdraw(self) -> None:
        self.wait_tickets()
        self.is_used = False
        self.open_uses = set()
        self._hide()

    def try_free(self) -> bool:
        freed = all([flat.buffer.shrink() for flat in self.flats])
        self._lanes.order_gather()
        return freed

    def refresh(self, flats: Collection[Flat]) -> None:
        for flat in flats:
            flat.version += 1
            self._comm.changed(flat.weight)
        if self.is_gathered:  # a `gathered` context shows it
            self.finish_update()
            self._fill()
            self.wait_tickets()

    def _watch(self, flat: Flat) -> None:
        """Whole values come when they are asked for."""

    def _queue(self, flat: Flat) -> None:
        """Other ranks gather it when they need it."""

    def _send(self, flat: Flat, gather: Gather) -> Ticket:
        """As `_queue`."""
        return Ticket()

    def finish_update(self) -> None:
        for flat in self.flats:
            flat.finish_update()


class KeptUnit(PartUnit):
    """One unit whose parameters rest in shards, but stay gathered between a forward and its backward: memory for the
    second gather. Meanwhile it is as one gathered ahead of its use."""

    def rest(self) -> bool:
        self._withdraw()
        self.is_resting = True
        return True

    def wait(self) -> None:
        super().wait()
        self.is_resting = False

    def release(self) -> None:
        super().release()
        self.is_resting = False


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
