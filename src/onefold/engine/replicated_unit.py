"""Owns units whose parameters rest whole on every rank: what an update gives of each part comes to all of them."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from onefold.comm.comm import Comm
from onefold.comm.pending_gathers import Refresh
from onefold.engine.flat import Flat
from onefold.engine.unit import Unit, UnitEvent
from onefold.memory.streams import Finish, Lanes, Ticket
from onefold.memory.trace_labels import label

Gather = Callable[[Tensor, Tensor], Finish | None]


class ReplicatedUnit(Unit):
    """One unit whose parameters rest whole: READABLE, or UPDATING."""

    def __init__(
        self, name: str, index: int, flats: Sequence[Flat], comm: Comm, lanes: Lanes, *, is_joined: bool = False
    ) -> None:
        super().__init__(name, index, flats, comm, lanes, is_joined=is_joined)
        self._pending = comm.refreshes
        self._has_readers = False
        """Whether the newest values may be read without asking for them, so that the step must wait."""

    def show(self) -> None:
        self.finish_updates()
        self._pending.send_ready()

    def finish_updates(self) -> None:
        with self._lock:
            self._pending.finish(self)
            super().finish_updates()
            if not self.is_readable:
                self.wait_gathers()
                self._unhide()
                self._go(UnitEvent.IS_SHOWN)

    def hide_updated(self, flats: Collection[Flat]) -> None:
        for flat in flats:
            flat.version += 1
            torch.autograd.graph.increment_version(flat.params)
            flat.note_versions()
        if any(_may_be_coming(flat) for flat in flats):
            self._go(UnitEvent.IS_UPDATED)
            self._hide()

    def show_updated(self) -> None:
        if self.is_readable:
            self.wait_gathers()
        elif self._has_readers:
            self.finish_updates()
        self._has_readers = False

    def _note_readers(self, flat: Flat) -> None:
        """Those are holders of a view of the weights (`param.data`, a state dict, an array), and callers of what a
        parameter's own class has and a hidden one has not."""
        has_methods = any(cls is not nn.Parameter for cls in self._classes)
        self._has_readers = self._has_readers or has_methods or flat.buffer.is_watched

    def _spread_now(self, flat: Flat) -> None:
        super()._spread_now(flat)
        self._send(flat, self._comm.all_gather)

    def _spread_later(self, flat: Flat) -> None:
        """Now, if the update is done already. See [Note: Who launches collectives]."""
        if flat.update.is_pending:
            self._pending.add(
                Refresh(owner=self, update=flat.update.copy(), send=partial(self._send, flat, self._comm.refresh))
            )
        else:
            self._send(flat, self._comm.all_gather)

    def _send(self, flat: Flat, gather: Gather) -> Ticket:
        """Bring what was delivered to all ranks; what was there before, if the update failed: they wait for it."""
        ready = flat.current
        if flat.weight.numel() < flat.layout.numel:
            with label("refresh", self.name):
                launch = partial(gather, flat.buffer.whole, flat.weight)
                ready = self._lanes.gather.run(launch, after=[ready], keep=[flat.buffer.whole, flat.weight])
        self._tickets.append(ready)
        return ready.copy()


def _may_be_coming(flat: Flat) -> bool:
    """Whether new values of `flat` may still be on their way, from the worker or from other ranks."""
    return flat.update.is_pending or flat.arrival.is_pending or flat.weight.numel() < flat.layout.numel
