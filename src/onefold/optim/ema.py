"""Owns exponential moving averages of the weights: 4 bytes a parameter, held as optimizer state is.

[Note: Averages on the shards]
An average covers the elements that a rank updates, and rests where their state rests. It is taken where the update ran
and after it, so it does not keep `step` from returning early. To look at averaged weights, shards and averages change
places, one flat buffer at a time: no second model, no copy of the weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from onefold.engine.flat import Flat, Trained
from onefold.engine.session import Session, session_of
from onefold.errors import OptimizerError
from onefold.memory.buffer import exact_dtype
from onefold.memory.streams import Ticket


class EMA:
    """A moving average of the exact weights of a sharded model: `average = decay * average + (1 - decay) * weight`.

    Args:
        model: what `onefold.shard` returned; the average starts from its weights now.
        decay: in [0, 1); 0.999 looks back about a thousand steps.

    Raises:
        OptimizerError: `decay` is not in [0, 1).
        HostMemoryError: it rests on the host and does not fit.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise OptimizerError(f"decay={decay!r}: give a number in [0, 1), such as 0.999")
        self.decay = decay
        self._session = session_of(model, "an EMA")
        self._session.catch_up()
        self._averages: list[tuple[Flat, Trained, Tensor]] = []
        self._tickets: list[Ticket] = []
        for flat, trained in (pair for unit in self._session.runtime.units for pair in unit.trained_flats):
            average = trained.rest.allocate(trained.numel, exact_dtype(flat.weight.dtype))
            average.copy_(trained.master.load())
            self._averages.append((flat, trained, average))

    def is_of(self, session: Session) -> bool:
        """Whether it averages that session's model."""
        return self._session is session

    @property
    def averages(self) -> list[tuple[Flat, Tensor]]:
        """Each flat buffer and the average of the elements that this rank updates, [numel], up to date."""
        self._wait()
        return [(flat, average) for flat, _, average in self._averages]

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after `optimizer.step()` into the average.

        Raises:
            OptimizerError: inside `applied`, where the weights are the average.
        """
        self._session.finish_readers()  # a save since the step reads the average
        self._tickets = [
            trained.rest.run(partial(_average, trained, average, self.decay), _nothing)
            for _, trained, average in self._averages
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model's weights are the averages: evaluate, read, export. Every rank enters and leaves.

        Raises:
            OptimizerError: inside, from whatever would change the weights.
        """
        self._session.runtime.settle()
        self._session.wait_for_readers()
        self._swap()
        self._session.readers.append(_refuse)
        self._session.exchanged.append(self)
        try:
            yield
        finally:
            self._session.readers.remove(_refuse)
            try:
                self._session.wait_for_readers()  # a save that began inside reads the averages
            except BaseException:  # interrupted: the weights are still the averages
                self._session.readers.insert(0, _refuse)
                raise
            self._session.exchanged.remove(self)
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Let weights and averages change places."""
        self._wait()
        self._session.catch_up()
        for flat, trained, average in self._averages:
            flat.arrival.wait_on_host()
            exact = trained.master.load().clone()
            trained.master.store(average.clone())
            average.copy_(exact)
        for unit in self._session.runtime.units:
            unit.show_stored([flat for flat, _ in unit.trained_flats])

    def _wait(self) -> None:
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()


def _average(trained: Trained, average: Tensor, decay: float) -> None:
    average.mul_(decay).add_(trained.master.load(), alpha=1 - decay)


def _nothing(_: Ticket) -> None:
    """An average is read by nobody who would have to be told."""


def _refuse() -> None:
    raise OptimizerError(
        "the model's weights are averages now, inside `with ema.applied():`; leave it before optimizer.step(), "
        "ema.update(), load, or gathered(write=True)"
    )
