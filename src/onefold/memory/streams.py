"""Owns streams and events: the lanes on which gathers and reductions run beside the computation.

[Note: Lanes and tickets]
Work on a lane is ordered against the computation only through tickets. A `Ticket` is a value: it says when something
is done and holds a reference to every tensor that must stay alive until then. Three rules follow:
1. Code that reads what a lane wrote calls `ticket.wait()` first, on the stream that will read.
2. Code that frees or rewrites what a lane reads keeps the ticket until it has waited on it.
3. Memory of the gather lane is given back to it only after `order_gather` made it wait for the last reader, so the
   allocator never gives it out early. `record_stream` is never used.
On CPU a lane runs its work at once; what is asynchronous there is the collective itself, finished by `wait`.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

Finish = Callable[[], None]
"""Completes an asynchronous operation; None stands for an operation that is already ordered on its stream."""


class Pending:
    """A `Finish` that can tell whether it would have to wait."""

    __slots__ = ("_finish", "is_done")

    def __init__(self, finish: Finish, is_done: Callable[[], bool]) -> None:
        self._finish = finish
        self.is_done = is_done

    def __call__(self) -> None:
        self._finish()


class Chain(Pending):
    """Operations one after another, each launched when the one before is found done: while it is polled, it never
    waits. Each step starts an operation and returns how to finish it."""

    __slots__ = ("_current", "_steps")

    def __init__(self, *steps: Callable[[], Finish | None]) -> None:
        super().__init__(self._run, self._poll)
        self._steps = list(steps)
        self._current = self._steps.pop(0)()

    def _run(self) -> None:
        self._go_on()
        while self._steps:
            self._current = self._steps.pop(0)()
            self._go_on()

    def _poll(self) -> bool:
        while not isinstance(self._current, Pending) or self._current.is_done():
            self._go_on()
            if not self._steps:
                return True
            self._current = self._steps.pop(0)()
        return False

    def _go_on(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current()


class Ticket:
    """When something is done, and what stays alive until then."""

    __slots__ = ("_finish", "_finish_on_host", "_keep", "is_done")

    def __init__(
        self,
        finish: Finish | None = None,
        keep: Sequence[Any] = (),
        is_done: Callable[[], bool] | None = None,
        finish_on_host: Finish | None = None,
    ) -> None:
        self._finish = finish
        self._finish_on_host = finish_on_host
        self._keep = keep
        self.is_done = is_done
        """Tells without waiting whether the work is done; None where that cannot be told."""

    @property
    def is_pending(self) -> bool:
        """Whether waiting would do anything."""
        return self._finish is not None

    def copy(self) -> "Ticket":
        """Another ticket for the same work, to be waited on elsewhere; this one keeps things alive."""
        return Ticket(self._finish, (), self.is_done, self._finish_on_host)

    def wait(self) -> None:
        """Order the current stream (on CPU: the caller) after the work, then let go of what was kept alive. An error is
        raised once; after a KeyboardInterrupt the work is still to be waited for."""
        if self._finish is not None:
            try:
                self._finish()
            except Exception:
                self._finish = None
                raise
            self._finish = None
        self._keep = ()

    def wait_on_host(self) -> None:
        """Hold up the calling thread until the work is done: its results can be read from host memory."""
        if self._finish_on_host is not None:
            self._finish_on_host()
        self.wait()


class StreamTicket(Ticket):
    """A ticket for a stream's work. One that is dropped before it was waited on (a model that goes in mid-step) still
    orders the current stream after the work, or memory that it kept would be given out again too early."""

    __slots__ = ()

    def __del__(self) -> None:
        if self._keep and not sys.is_finalizing():
            self.wait()


Started = tuple[Ticket, int]
"""Work under way, and the bytes that it holds until it was waited for."""


def wait_for_all(started: list[Started]) -> None:
    """Wait on the oldest, then the next."""
    while started:
        started.pop(0)[0].wait()


def wait_for_oldest(started: list[Started], limit_bytes: int) -> None:
    """Wait on the oldest until what is left holds at most `limit_bytes`."""
    held_bytes = sum(nbytes for _, nbytes in started)
    while held_bytes > limit_bytes:
        ticket, nbytes = started.pop(0)
        ticket.wait()
        held_bytes -= nbytes


def poll_oldest(started: list[Started], limit_bytes: int, patience_s: float = 0.1) -> None:
    """Let go of the oldest that are done until what is left holds at most `limit_bytes`; give up when one is not done
    in time. Never makes a stream wait, so what another rank needs from this one is not held up."""
    held_bytes = sum(nbytes for _, nbytes in started)
    deadline = time.monotonic() + patience_s
    while held_bytes > limit_bytes and started[0][0].is_done is not None:
        if started[0][0].is_done():
            ticket, nbytes = started.pop(0)
            ticket.wait()
            held_bytes -= nbytes
        elif time.monotonic() > deadline:
            return


class Lane(Protocol):
    """A queue of work beside the computation."""

    def run(
        self,
        launch: Callable[[], Finish | None],
        *,
        after: Sequence[Ticket] = (),
        keep: Sequence[Any] = (),
    ) -> Ticket:
        """Queue `launch` once every ticket of `after` is done."""
        ...


class Lanes(Protocol):
    """The lanes of one device and the marks that order them against its computation."""

    gather: Lane
    reduce: Lane
    up: Lane
    """Copies from host memory."""
    down: Lane
    """Copies to host memory."""

    def mark(self) -> Ticket:
        """A ticket for all computation queued so far on the current stream."""
        ...

    def order_gather(self) -> None:
        """Let the gather lane go on only after all computation queued so far: it rewrites memory that was read
        there."""
        ...

    def allocate_for_gather(self) -> AbstractContextManager[Any]:
        """Inside, memory is taken for (and later reused by) the gather lane."""
        ...


class HostLane:
    """Runs on the calling thread; collectives finish when their ticket is waited on."""

    def run(
        self,
        launch: Callable[[], Finish | None],
        *,
        after: Sequence[Ticket] = (),
        keep: Sequence[Any] = (),
    ) -> Ticket:
        for ticket in after:
            ticket.wait()
        finish = launch()
        return Ticket(finish, keep, finish.is_done if isinstance(finish, Pending) else None)


class HostLanes:
    """Lanes of a CPU."""

    def __init__(self) -> None:
        self.gather: Lane = HostLane()
        self.reduce: Lane = HostLane()
        self.up: Lane = HostLane()
        self.down: Lane = HostLane()

    def mark(self) -> Ticket:
        return Ticket()

    def order_gather(self) -> None:
        pass

    def allocate_for_gather(self) -> AbstractContextManager[Any]:
        return nullcontext()


class StreamLane:
    """Runs on a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._index = self.stream.device_index

    def run(
        self,
        launch: Callable[[], Finish | None],
        *,
        after: Sequence[Ticket] = (),
        keep: Sequence[Any] = (),
    ) -> Ticket:
        with _Current(self.stream):
            for ticket in after:
                ticket.wait()
            finish = launch()
            if finish is not None:
                finish()
            event = self.stream.record_event()
        return StreamTicket(partial(_order_after, event, self._index), keep, event.query, event.synchronize)


class StreamLanes:
    """Lanes of a CUDA device: one stream each for gathers, reductions and the two ways over the host link."""

    def __init__(self, device: torch.device) -> None:
        gather = StreamLane(device)
        self.gather: Lane = gather
        self.reduce: Lane = StreamLane(device)
        self.up: Lane = StreamLane(device)
        self.down: Lane = StreamLane(device)
        self._gather_stream = gather.stream
        self._index = gather.stream.device_index

    def mark(self) -> Ticket:
        event = torch.cuda.current_stream(self._index).record_event()
        return Ticket(partial(_order_after, event, self._index))

    def order_gather(self) -> None:
        self._gather_stream.wait_event(torch.cuda.current_stream(self._index).record_event())

    def allocate_for_gather(self) -> AbstractContextManager[Any]:
        return _Current(self._gather_stream)


class _Current:
    """Makes a stream, and its device, the current ones. torch.cuda.stream takes several times the host's time for that,
    and every unit comes here several times a step. Each use needs one of its own."""

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        self._before = torch.cuda.current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_stream(self._before)
        if self._device != self._stream.device_index:
            torch.cuda.set_device(self._device)


def _order_after(event: torch.cuda.Event, index: int) -> None:
    """Let the current stream of a device wait for `event`. By number, since looking up the device costs more."""
    event.wait(torch.cuda.current_stream(index))


def lanes_for(device: torch.device) -> Lanes:
    """The lanes of `device`."""
    return StreamLanes(device) if device.type == "cuda" else HostLanes()
