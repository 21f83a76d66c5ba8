"""Owns the order in which updated weights are sent to the other ranks, where updates run beside the computation.

[Note: Who launches collectives]
Only the thread that trains. The worker updates this rank's part, and copies it to where it is read from; then the
thread that trains sends it, at the latest when the unit is needed, and with each unit that is needed whatever else is
ready. Updates are sent in the order in which they were started, which is the same on all ranks. Were the worker to send
them, one rank could while another has taken torch.distributed down already: a script may end right after its last step.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from onefold.streams import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """Updated weights that will be sent."""

    owner: object
    """The unit that they belong to."""
    update: Ticket
    """Of the update; raises what that raised."""
    is_ready: Callable[[], bool]
    """Whether they are where they are sent from."""
    send: Callable[[], None]


class Refreshes:
    """Those of one model that were not sent yet, oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[Refresh] = deque()

    def add(self, refresh: Refresh) -> None:
        """Send it after those that were added before."""
        self._waiting.append(refresh)

    def finish(self, owner: object) -> None:
        """Wait for the updates of `owner`, and send them. Whatever an update raised is raised here."""
        while any(refresh.owner is owner for refresh in self._waiting):
            refresh = self._waiting.popleft()
            refresh.update.wait()
            refresh.send()

    def send_ready(self) -> None:
        """Send what can be sent without waiting."""
        while self._waiting and self._waiting[0].is_ready():
            self._waiting.popleft().send()
