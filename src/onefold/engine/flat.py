"""Owns a flat buffer with its parameters: their compute weights, and what training keeps beside them."""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from onefold.engine.gradients import Gradients
from onefold.memory.buffer import Buffer, Master
from onefold.memory.streams import Lanes, Ticket
from onefold.plan.layout import Layout, Piece
from onefold.tiers.tier import Storehouse

_NUM_FACTORS = 1021  # a prime: what moves by whole rows moves to other factors


@dataclass(slots=True, kw_only=True)
class Trained:
    """What a flat buffer has only if its parameters are trained."""

    master: Master
    gradients: Gradients
    numel: int
    """Elements this rank updates."""
    rest: Storehouse
    """Where optimizer state rests."""
    weight: Tensor
    """The compute weights as the update writes them: the flat's `weight`, or a twin of it where the update runs."""
    has_twin: bool

    @property
    def itemsize(self) -> int:
        """Bytes an element of what keeps the weights exact, and of the twin."""
        return self.master.itemsize + (self.weight.element_size() if self.has_twin else 0)


@dataclass(slots=True, kw_only=True)
class Flat:
    """Parameters of one unit with one dtype, all trained or all frozen, in one flat buffer."""

    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    buffer: Buffer
    weight: Tensor
    """The compute weights this rank keeps: its shard, a view of its range, or the whole buffer."""
    start: int
    """Index in the flat buffer of the first of them."""
    trained: Trained | None
    rest: Storehouse
    """Where `weight` rests."""
    version: int = 0
    """Updates so far."""
    arrival: Ticket = field(default_factory=Ticket)
    """When the latest copy of weights to the device is done: before, nobody reads there, nor writes where they rest."""
    checksum: Tensor | None = None
    """Of `weight` (0-dim, int64) when the twin last held the same."""
    versions: tuple[int, ...] = ()
    """Of the parameters, as autograd counts what is done to them in place, after the latest update."""
    current: Ticket = field(default_factory=Ticket)
    """When `weight` has the values of the latest update."""
    shown: Ticket = field(default_factory=Ticket)
    """The same, for those that read it beside the lanes."""
    update: Ticket = field(default_factory=Ticket)
    """When the latest update is done, see [Note: The gated step]."""
    late: Ticket | None = None
    """When an update is done whose weights nobody has seen yet, see [Note: The delayed update]."""

    @property
    def layout(self) -> Layout:
        return self.buffer.layout

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of parameters that `weight` holds; they are those that this rank updates."""
        return self.layout.pieces_between(self.start, self.start + self.weight.numel())

    @property
    def has_twin(self) -> bool:
        """Whether updates write a twin of `weight`, so that one can be made while the weights before it are in use."""
        return self.trained is not None and self.trained.has_twin

    def publish(self, lanes: Lanes, after: Ticket) -> Ticket:
        """After an update: bring the twin's values to `weight`, once `after` is done."""
        if self.trained is None or not self.has_twin:
            return after
        self.arrival = self.trained.rest.deliver(self.trained.weight, self.weight, after)

        def watch() -> None:
            self.checksum = checksum(self.weight)

        return lanes.up.run(watch, keep=[self.weight])

    def finish_update(self) -> None:
        """Wait for the update that is under way; its exception is raised here."""
        self.update.wait()

    @property
    def is_updating(self) -> bool:
        return self.update.is_pending and self.update.is_done is not None and not self.update.is_done()

    def note_versions(self) -> None:
        """What was done to the parameters in place until now was done by an update, or taken over."""
        if self.has_twin:
            self.versions = tuple(param._version for param in self.params)

    def written_since(self) -> Tensor | None:
        """Whether `weight` was written since the twin last held the same (0-dim bool); None without a twin.

        Autograd counts what is written to a parameter, but not what is written to its `.data`."""
        if self.checksum is None:
            return None
        if any(param._version != noted for param, noted in zip(self.params, self.versions, strict=True)):
            return torch.ones_like(self.checksum, dtype=torch.bool)
        return self.checksum != checksum(self.weight)

    def take_written(self) -> None:
        """Let the twin, and the exact weights behind it, have what was written into `weight`."""
        if self.trained is not None and self.has_twin:
            self.trained.rest.store(self.trained.weight, self.weight).wait_on_host()
            self.trained.master.store(self.trained.master.load())
            self.checksum = checksum(self.weight)
            self.note_versions()

    @property
    def resting_bytes(self) -> int:
        """Bytes of parameters that this rank holds between steps."""
        return self.buffer.nbytes if self.is_open else self.weight.nbytes

    @property
    def is_open(self) -> bool:
        """Whether `weight` is memory of the parameters themselves: it rests whole, and whoever uses the model can write
        there."""
        return bool(self.weight.untyped_storage()._cdata == self.buffer.storage_id)


def checksum(values: Tensor) -> Tensor:
    """A number that changes when any bits of `values` (1-D, whole words of 8 bytes) do, or the places they are in, but
    for unlikely coincidences; 0-dim, int64, on their device."""
    words, factors = values.view(torch.int64), _factors(values.device)
    in_rows = len(words) // _NUM_FACTORS * _NUM_FACTORS
    rest = words[in_rows:]
    total = (rest * factors[: len(rest)]).sum()
    # Column by column: one pass over the values, and no memory as large as they are.
    return total + (words[:in_rows].view(-1, _NUM_FACTORS).sum(0) * factors).sum() if in_rows else total


@cache
def _factors(device: torch.device) -> Tensor:
    """Odd: none makes a word's difference vanish."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (_NUM_FACTORS,), generator=generator, device="cpu")
    return (2 * drawn + 1).to(device)
