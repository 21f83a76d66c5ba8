"""Owns units whose parameters rest in shards: gathered for use, released after."""

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from onefold.comm.comm import Comm
from onefold.engine.flat import Flat
from onefold.engine.released import metadata_only
from onefold.engine.unit import Unit, UnitEvent
from onefold.memory.streams import Lanes
from onefold.memory.trace_labels import label
from onefold.plan.table import Tier


class ShardedUnit(Unit):
    """One unit whose parameters rest in shards: never UPDATING."""

    def __init__(
        self, name: str, index: int, flats: Sequence[Flat], comm: Comm, lanes: Lanes, *, is_joined: bool = False
    ) -> None:
        super().__init__(name, index, flats, comm, lanes, is_joined=is_joined)
        self._versions: list[int] = []

    def gather(self) -> None:
        try:
            self.finish_updates()
        finally:  # other ranks, where the update did not fail, wait for this one's part
            with label("gather", self.name):
                for flat in self.flats:
                    flat.buffer.grow()
                self._fill()
            self._go(UnitEvent.IS_GATHERED)

    def gather_on_host(self, is_wanted: bool) -> None:
        self.finish_updates()
        for flat in self.flats:
            here = torch.empty_like(flat.weight, device="cpu")
            self._lanes.down.run(partial(_copy, here, flat.weight), after=[flat.shown.copy()]).wait_on_host()
            whole = self._comm.gather_on_host(here)
            if is_wanted:
                flat.buffer.grow()
                flat.buffer.whole.copy_(whole)
        if is_wanted:
            self._go(UnitEvent.IS_GATHERED)

    def _fill(self) -> None:
        for flat in self.flats:
            shard, fetched = flat.rest.fetch(flat.weight)
            flat.arrival = fetched if flat.rest.tier != Tier.DEVICE else flat.arrival
            launch = partial(self._comm.all_gather, flat.buffer.whole, shard)
            self._tickets.append(self._lanes.gather.run(launch, after=[fetched, flat.current], keep=[shard]))

    def show(self) -> None:
        if not self.is_readable:
            self.wait_gathers()
            self._unhide()
            self._go(UnitEvent.IS_SHOWN)
            self.keep_written()

    def keep_written(self) -> None:
        self._versions = [param._version for param in self._params]

    def written(self) -> list[nn.Parameter]:
        if not self.is_readable:
            return []
        with metadata_only():
            pairs = zip(self._params, self._versions, strict=True)
            return [param for param, version in pairs if param._version != version]

    def release(self) -> None:
        self._withdraw(UnitEvent.IS_RELEASED)

    def _withdraw(self, event: UnitEvent) -> None:
        self.wait_gathers()
        self._go(event)
        self.open_uses = set()
        self._hide()

    def try_free(self) -> bool:
        freed = all([flat.buffer.shrink() for flat in self.flats])
        self._lanes.order_gather()
        return freed

    def hide_updated(self, flats: Collection[Flat]) -> None:
        for flat in flats:
            flat.version += 1
            self._comm.changed(flat.weight)
        if self.is_gathered:  # a `gathered` context shows it
            self.finish_updates()
            self._fill()
            self.wait_gathers()


class KeptUnit(ShardedUnit):
    """One unit whose parameters rest in shards, but stay gathered between a forward and its backward: memory for the
    second gather. Meanwhile it is as one gathered ahead of its use."""

    def keep(self) -> bool:
        self._withdraw(UnitEvent.IS_KEPT)
        return True


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
