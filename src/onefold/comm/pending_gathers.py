"""Owns the order in which updated weights are sent to the other ranks, where updates run beside the computation.

[Note: Who launches collectives]
The thread that trains. The worker updates this rank's part, and copies it to where it is read from; then the thread
that trains sends it, at the latest when the unit is needed, and with each unit that is needed whatever else is ready.
Were the worker to send, one rank could while another has taken torch.distributed down already: a script may end right
after its last step.

Only where that thread does something else for a while does another one send what is ready: this rank may be waiting at
a barrier for what a rank does alone, an evaluation or a save, which waits for this one's part.

What is ready differs between ranks, so the order must not follow from it: updates are sent in the order in which they
were started, over all models that share a process group, by whichever thread. That of a model which is gone, or which
failed on one rank, is sent all the same: another rank may have sent its part. The order keeps what it needs of that
model until then.

A script may end right after its last step, while another rank still reads weights, to save them, say. So a process that
ends sends what is left, and stays until the others have it (`leave`).
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from threading import RLock, Timer

import torch

from onefold.memory.streams import Ticket

_PATIENCE_S = 1.0
"""How long the thread that trains may leave what is ready unsent: longer than it is away between two units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """Updated weights that will be sent."""

    owner: object
    """The unit that they belong to."""
    update: Ticket
    """Of the update. What that raised is raised by whoever waits for the unit."""
    send: Callable[[], Ticket]
    """Starts it; the ticket is for all ranks' parts to be here."""


class Refreshes:
    """Those of one process group that were not sent yet, oldest first.

    Args:
        is_up: tells whether the group can still be used.
    """

    def __init__(self, is_up: Callable[[], bool]) -> None:
        self._is_up = is_up
        self._waiting: deque[Refresh] = deque()
        self._lock = RLock()
        self._timer: Timer | None = None
        self._num_sent = 0

    def add(self, refresh: Refresh) -> None:
        """Send it after those that were added before."""
        with self._lock:
            self._waiting.append(refresh)
            if self._timer is None:
                self._look_again()

    def finish(self, owner: object) -> None:
        """Wait for the updates of `owner` and those before them, and send them."""
        with self._lock:
            while any(refresh.owner is owner for refresh in self._waiting):
                self._send_first()

    def finish_all(self) -> list[Ticket]:
        """Wait for all updates, and send them."""
        with self._lock:
            return [self._send_first() for _ in range(len(self._waiting))]

    def send_ready(self) -> None:
        """Send what can be sent without waiting."""
        with self._lock:
            while self._waiting and self._is_first_ready():
                self._send_first()

    def _look_again(self) -> None:
        self._timer = Timer(_PATIENCE_S, self._send_late, [self._num_sent])
        self._timer.daemon = True
        self._timer.start()

    def _send_late(self, num_sent: int) -> None:
        """Send what is ready, if nothing was sent since there were `num_sent`; look again while something is left."""
        with self._lock, torch.no_grad():
            self._timer = None
            if self._waiting and num_sent == self._num_sent and self._is_up():
                self.send_ready()
            if self._waiting and self._is_up():
                self._look_again()

    def _is_first_ready(self) -> bool:
        is_done = self._waiting[0].update.is_done
        return is_done is not None and is_done()

    def _send_first(self) -> Ticket:
        with suppress(Exception):
            self._waiting[0].update.wait()
        self._num_sent += 1
        return self._waiting.popleft().send()


def leave(orders: Iterable[Refreshes]) -> None:
    """This process ends: send what is left of each, and stay until the others have it, or have gone."""
    tickets: list[Ticket] = []
    with torch.no_grad():
        for order in orders:
            with suppress(Exception):
                tickets += order.finish_all()
        for ticket in tickets:
            with suppress(Exception):
                ticket.wait_on_host()
