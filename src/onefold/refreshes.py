"""Owns the order in which updated weights are sent to the other ranks, where updates run beside the computation.

[Note: Who launches collectives]
Only the thread that trains. The worker updates this rank's part, and copies it to where it is read from; then the
thread that trains sends it, at the latest when the unit is needed, and with each unit that is needed whatever else is
ready. Were the worker to send, one rank could while another has taken torch.distributed down already: a script may end
right after its last step.

What is ready differs between ranks, so the order must not follow from it: updates are sent in the order in which they
were started, over all models that share a process group. That of a model which is gone, or which failed on one rank, is
sent all the same: another rank may have sent its part. The order keeps what it needs of that model until then.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from onefold.streams import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """Updated weights that will be sent."""

    owner: object
    """The unit that they belong to."""
    update: Ticket
    """Of the update. What that raised is raised by whoever waits for the unit."""
    send: Callable[[], None]


class Refreshes:
    """Those of one process group that were not sent yet, oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[Refresh] = deque()

    def add(self, refresh: Refresh) -> None:
        """Send it after those that were added before."""
        self._waiting.append(refresh)

    def finish(self, owner: object) -> None:
        """Wait for the updates of `owner` and those before them, and send them."""
        while any(refresh.owner is owner for refresh in self._waiting):
            self._send_first()

    def finish_all(self) -> None:
        """Wait for all updates, and send them."""
        while self._waiting:
            self._send_first()

    def send_ready(self) -> None:
        """Send what can be sent without waiting."""
        while self._waiting and self._waiting[0].update.is_done is not None and self._waiting[0].update.is_done():
            self._send_first()

    def _send_first(self) -> None:
        with suppress(Exception):
            self._waiting[0].update.wait()
        self._waiting.popleft().send()
