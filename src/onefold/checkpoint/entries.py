"""Owns what a checkpoint holds of a model and its optimizer, as tensors of which each rank has some elements.

Names in a checkpoint: `model.NAME` (exact weights: the master where there is one), `optimizer.STATE.NAME`,
`ema.NAME`, `buffer.NAME`, `extra.N`. Shapes are the user's; what rank, plan, tier or unit they came from does not show.

[Note: Whose elements]
Saving, every element is written by one rank: one of those whose shard it lies in, whatever the plan keeps besides.
Replicas of a shard write a part of it each. Loading, a rank reads every element that it updates. Both are ranges of
flattened parameters, so both are read off the layout. Where a plan keeps more, it comes from the other ranks as after
an update.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import prod

import torch
from torch import Tensor, nn

from onefold.comm.comm import Comm
from onefold.engine.flat import Flat, Trained
from onefold.engine.session import Session
from onefold.files.names import all_tensors
from onefold.memory.buffer import Master, OwnMaster, exact_dtype
from onefold.optim.ema import EMA
from onefold.optim.optimizer import Optimizer
from onefold.optim.update import FlatUpdate
from onefold.plan.layout import Layout, boxes
from onefold.plan.table import Tier


class Reading(Enum):
    """When a save beside training reads, by who may change the memory meanwhile."""

    AT_ONCE = "before `save` returns: a forward, or the user, may write there at any time"
    BEFORE_STEP = "before the next update, or another operation of ours that says so, changes it"
    IN_PLACE = "as BEFORE_STEP, but from where it rests, on the host, into files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Elements [start, stop) of one tensor of the checkpoint, in row-major order, which this rank writes or reads."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    read: Callable[[int, int], Tensor]
    """The values of elements [a, b) of the tensor: 1-D, on any device, perhaps the resting memory itself."""
    write: Callable[[int, Tensor], None]
    """Put values (1-D, on the host) where the elements from the given one on rest."""
    reading: Reading

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


def own_entries(session: Session, optimizer: Optimizer | None, ema: EMA | None) -> Iterator[Entry]:
    """What this rank writes: its shard of everything, or its part where replicas have the same."""
    for flat, entry, slot in _entries(session, optimizer, ema):
        low, high = _written(flat.layout, session.comm)
        where = flat.layout.slots[slot]
        start, stop = max(entry.start, low - where.start), min(entry.stop, high - where.start)
        if start < stop:
            yield replace(entry, start=start, stop=stop)


def _written(layout: Layout, comm: Comm) -> tuple[int, int]:
    """The range of a flat buffer that this rank writes."""
    first, last = (at * layout.shard_numel // comm.num_replicas for at in (comm.replica, comm.replica + 1))
    low, _ = layout.shard_range(comm.shard)
    return low + first, low + last


def kept_entries(session: Session, optimizer: Optimizer | None, ema: EMA | None) -> Iterator[Entry]:
    """What this rank reads: all that it updates."""
    return (entry for _, entry, _ in _entries(session, optimizer, ema))


def param_entries(flat: Flat, slot: int, optimizer: Optimizer | None) -> Iterator[Entry]:
    """What this rank keeps of one parameter: its exact weights, and its optimizer state."""
    updates = () if optimizer is None else optimizer.updates
    yield from (entry for place, entry in _weights(flat) if place == slot)
    for update in updates:
        if update.flat is flat:
            yield from (entry for place, entry in _states(update) if place == slot)


def buffer_entries(buffers: Mapping[str, Tensor]) -> Iterator[Entry]:
    """Buffers by name: whole, and the same on every rank."""
    return (whole_entry(f"buffer.{name}", buffer) for name, buffer in buffers.items() if buffer.numel())


def whole_entry(key: str, tensor: Tensor) -> Entry:
    """A tensor that a rank has whole."""

    def read(start: int, stop: int) -> Tensor:
        values = tensor.detach()
        if values.is_contiguous():
            return values.view(-1)[start:stop]
        places = [
            tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))
            for box in boxes(shape, start, stop)
        ]
        return torch.cat([values[place].reshape(-1) for place in places])  # and never all of it

    def write(start: int, values: Tensor) -> None:
        whole = tensor.detach().reshape(-1).clone()
        whole[start : start + len(values)] = values.to(whole.device)
        tensor.detach().copy_(whole.view(tensor.shape))

    shape = tuple(tensor.shape)
    return Entry(
        key=key,
        shape=shape,
        dtype=tensor.dtype,
        start=0,
        stop=prod(shape),
        read=read,
        write=write,
        reading=Reading.AT_ONCE,
    )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a state dict has, by their first names."""
    return {named.names[0]: named.tensor for named in all_tensors(model) if not named.is_param}


def flats_of(session: Session) -> list[Flat]:
    """All flat buffers of a model."""
    return [flat for unit in session.runtime.units for flat in unit.flats]


def param_names(session: Session) -> dict[int, str]:
    """The names of parameters, by their ids."""
    return {id(param): name for flat in flats_of(session) for name, param in zip(flat.names, flat.params, strict=True)}


def _entries(session: Session, optimizer: Optimizer | None, ema: EMA | None) -> Iterator[tuple[Flat, Entry, int]]:
    """Flat buffer, entry and slot of everything that this rank updates, unit by unit."""
    updates = {} if optimizer is None else {id(update.flat): update for update in optimizer.updates}
    averages = {} if ema is None else {id(flat): average for flat, average in ema.averages}
    for flat in flats_of(session):
        for slot, entry in _weights(flat):
            yield flat, entry, slot
        if id(flat) in updates:
            for slot, entry in _states(updates[id(flat)]):
                yield flat, entry, slot
        if id(flat) in averages and flat.trained is not None:
            for slot, entry in _averages(flat, flat.trained, averages[id(flat)]):
                yield flat, entry, slot


def _weights(flat: Flat) -> Iterator[tuple[int, Entry]]:
    trained = flat.trained
    master: Master = OwnMaster(flat.weight) if trained is None else trained.master
    is_open = flat.is_open and not flat.has_twin
    reading = Reading.AT_ONCE if is_open else _hidden((flat if trained is None else trained).rest.tier)
    for piece in flat.pieces:
        yield (
            piece.slot,
            Entry(
                key=f"model.{flat.names[piece.slot]}",
                shape=flat.layout.slots[piece.slot].shape,
                dtype=flat.weight.dtype if trained is None else exact_dtype(flat.weight.dtype),
                start=piece.slot_start,
                stop=piece.slot_start + piece.numel,
                read=_master_reader(master, piece.start - piece.slot_start),
                write=_master_writer(master, piece.start - piece.slot_start),
                reading=reading,
            ),
        )


def _states(update: FlatUpdate) -> Iterator[tuple[int, Entry]]:
    flat = update.flat
    for part in update.parts():
        key, shape = f"optimizer.{part.name}.{flat.names[part.slot]}", flat.layout.slots[part.slot].shape
        yield part.slot, _part_entry(key, shape, part.tensor, part.first, update.tier)


def _averages(flat: Flat, trained: Trained, average: Tensor) -> Iterator[tuple[int, Entry]]:
    for piece in flat.pieces:
        key, shape = f"ema.{flat.names[piece.slot]}", flat.layout.slots[piece.slot].shape
        part = average[piece.start : piece.stop]
        yield piece.slot, _part_entry(key, shape, part, piece.slot_start, trained.rest.tier)


def _part_entry(key: str, shape: tuple[int, ...], part: Tensor, first: int, tier: Tier) -> Entry:
    """Elements from `first` on, which `part` (1-D) holds."""

    def write(start: int, values: Tensor) -> None:
        part[start - first : start - first + len(values)].copy_(values)

    return Entry(
        key=key,
        shape=shape,
        dtype=part.dtype,
        start=first,
        stop=first + part.numel(),
        read=part_reader(part, first),
        write=write,
        reading=_hidden(tier),
    )


def _hidden(tier: Tier) -> Reading:
    """Of memory that nobody finds but through us."""
    return Reading.IN_PLACE if tier == Tier.HOST else Reading.BEFORE_STEP


def _master_reader(master: Master, offset: int) -> Callable[[int, int], Tensor]:
    return lambda start, stop: master.part(offset + start, offset + stop).load()


def _master_writer(master: Master, offset: int) -> Callable[[int, Tensor], None]:
    def write(start: int, values: Tensor) -> None:
        part = master.part(offset + start, offset + start + len(values))
        part.store(values.to(part.load().device))

    return write


def copy_of(entry: Entry, copy: Tensor) -> Entry:
    """What can be written from `copy`, the entry's values (1-D) in memory of the host's that nothing changes."""
    return replace(entry, read=part_reader(copy, entry.start), write=read_only, reading=Reading.IN_PLACE)


def read_only(start: int, values: Tensor) -> None:
    """Of what is there to be read.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("it is a copy, or a file, that is only read")


def part_reader(tensor: Tensor, first: int) -> Callable[[int, int], Tensor]:
    """Reads elements of a tensor of which `tensor` (1-D) holds those from `first` on."""
    return lambda start, stop: tensor[start - first : stop - first]
