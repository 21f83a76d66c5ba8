"""Owns the seam between state and the place where it rests.

Nothing above knows which tier it talks to: it allocates, fetches what the computation will read and stores what it
produced. The device tier is where the computation is, so its fetch and store have nothing to do. The host tier is on
the other side of a link, and counts what crosses it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Protocol
from weakref import finalize

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from onefold.errors import HostMemoryError, PlanError
from onefold.memory.pinned import pinned
from onefold.memory.streams import Lanes, Ticket
from onefold.plan.table import Plan, Tier
from onefold.tiers.host_worker import HostWorker

_MOST_LEAVING = 3
"""Copies to the host that may be under way at once, each of one unit's gradients."""


class Storehouse(Protocol):
    """A place where flat tensors rest."""

    tier: Tier

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of zeros that rests here.

        Raises:
            HostMemoryError: there is not so much memory.
        """
        ...

    def fetch(self, resting: Tensor) -> tuple[Tensor, Ticket]:
        """The values of `resting` where the computation can read them, and when they are there."""
        ...

    def deliver(self, resting: Tensor, into: Tensor, after: Ticket) -> Ticket:
        """Put the values of `resting` into `into`, memory of the computation, once `after` is done."""
        ...

    def store(self, resting: Tensor, changed: Tensor) -> Ticket:
        """Put `changed`, which the computation produced, into `resting`."""
        ...

    def bring(self, tensor: Tensor) -> tuple[Tensor, Ticket]:
        """The values of `tensor`, which the computation produced, where this tier's updates run; `tensor` itself if
        they can read it."""
        ...

    def run(self, update: Callable[[], None], then: Callable[[Ticket], None]) -> Ticket:
        """Run an update of state that rests here, after all computation queued so far, and beside what comes next where
        that is possible; then `then`, with what orders the updated values. Returns when the update is done. See
        [Note: The gated step]."""
        ...


class Device:
    """Accelerator memory, or plain memory when training on CPU."""

    tier = Tier.DEVICE

    def __init__(self, device: torch.device, lanes: Lanes) -> None:
        self.device = device
        self._lanes = lanes

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def fetch(self, resting: Tensor) -> tuple[Tensor, Ticket]:
        return resting, Ticket()

    def deliver(self, resting: Tensor, into: Tensor, after: Ticket) -> Ticket:
        return self.store(into, resting)

    def store(self, resting: Tensor, changed: Tensor) -> Ticket:
        if changed.data_ptr() != resting.data_ptr():
            resting.copy_(changed)
        return Ticket()

    def bring(self, tensor: Tensor) -> tuple[Tensor, Ticket]:
        return tensor, Ticket()

    def run(self, update: Callable[[], None], then: Callable[[Ticket], None]) -> Ticket:
        update()  # beside the next forward it would take as much from that as it takes by itself
        then(self._lanes.mark())
        return Ticket()


class Host:
    """Host memory: pinned, in exact sizes, where the computation is on a GPU.

    Attributes:
        up_bytes, down_bytes: what crossed the link so far, to and from the device.
        worker: runs the updates.
    """

    tier = Tier.HOST

    def __init__(self, device: torch.device, lanes: Lanes, cores: Sequence[int]) -> None:
        self.device = device
        self.up_bytes = 0
        self.down_bytes = 0
        self._lanes = lanes
        self._cores = cores
        self.worker = HostWorker(device, cores)
        # What moves, and the memory here that it needs: a ticket lets go of that once a stream is ordered after it.
        self._leaving: list[tuple[Ticket, Tensor]] = []
        self._arriving: list[tuple[Ticket, Tensor]] = []
        self._lock = Lock()
        finalize(self, _let_all_arrive, self._arriving, self._leaving)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes, free = numel * dtype.itemsize, available_bytes()
        if nbytes > free:
            raise HostMemoryError(
                f"the host tier needs {nbytes:,} more bytes of host memory and {free:,} are available; use more ranks "
                "on more hosts, a plan that keeps less on the host (ZERO_3), or a smaller model"
            )
        if self.device.type == "cuda" and nbytes:
            return pinned(numel, dtype, len(self._cores))
        return torch.zeros(numel, dtype=dtype, device="cpu")

    def fetch(self, resting: Tensor) -> tuple[Tensor, Ticket]:
        target = torch.empty_like(resting, device=self.device)
        return target, self.deliver(resting, target, self._lanes.mark())

    def deliver(self, resting: Tensor, into: Tensor, after: Ticket) -> Ticket:
        self.up_bytes += resting.nbytes
        ticket = self._lanes.up.run(_copy(into, resting), after=[after], keep=[into, resting])
        with self._lock:  # the worker delivers too
            self._arriving[:] = [each for each in self._arriving if _is_moving(each[0])]
            self._arriving.append((ticket, resting))
        return ticket

    def store(self, resting: Tensor, changed: Tensor) -> Ticket:
        self.down_bytes += changed.nbytes
        ticket = self._lanes.down.run(_copy(resting, changed), after=[self._lanes.mark()], keep=[resting, changed])
        self._leaving.append((ticket, resting))
        self._let_go()
        return ticket

    def _let_go(self) -> None:
        """Free device memory whose copy has left; what leaves never piles up."""
        while self._leaving:
            if len(self._leaving) <= _MOST_LEAVING and _is_moving(self._leaving[0][0]):
                return
            self._leaving.pop(0)[0].wait_on_host()

    def bring(self, tensor: Tensor) -> tuple[Tensor, Ticket]:
        here = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.device.type == "cuda")
        return here, self.store(here, tensor)

    def run(self, update: Callable[[], None], then: Callable[[Ticket], None]) -> Ticket:
        mark = self._lanes.mark()

        def job() -> None:
            update()
            then(mark)

        return self.worker.submit(job)


def _is_moving(ticket: Ticket) -> bool:
    return ticket.is_done is not None and not ticket.is_done()


def _let_all_arrive(*moving: list[tuple[Ticket, Tensor]]) -> None:
    """A model can go while its last copies are under way; the memory that they touch must not."""
    for copies in moving:
        for ticket, _ in copies:
            ticket.wait_on_host()


def _copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    def launch() -> None:
        target.copy_(source, non_blocking=True)

    return launch


def available_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory that this process can still take: what the machine has, or what its control group leaves."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= int(counts["active_file"]) + int(counts["inactive_file"])  # of files that were read: given up first
    except (OSError, ValueError, KeyError):
        return free
    return free if limit == "max" else min(free, int(limit) - used)


def storehouses(plan: Plan, device: torch.device, lanes: Lanes, cores: Sequence[int]) -> dict[Tier, Storehouse]:
    """A storehouse for each tier that a plan names; updates on the host run on `cores`.

    Raises:
        PlanError: this version has no such tier.
    """
    if Tier.DISK in plan.tiers:
        raise PlanError(
            f"this version of Onefold places state on DEVICE and on HOST, not on DISK as {plan} does; OFFLOAD_3 is the "
            "nearest plan that runs"
        )
    made: dict[Tier, Storehouse] = {Tier.DEVICE: Device(device, lanes)}
    if Tier.HOST in plan.tiers:
        made[Tier.HOST] = Host(device, lanes, cores)
    return made
