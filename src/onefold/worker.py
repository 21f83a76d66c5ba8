"""Owns the thread that updates host state while the computation goes on.

[Note: The gated step]
`optimizer.step()` decides everything an update depends on - gradients, norm, factors, hyper-parameters, step numbers -
and hands it to one worker, unit by unit in forward order. It returns while the worker still updates. A unit whose
update is under way is hidden: whoever needs it first - its forward, a gather, code that touches one of its parameters -
waits for that unit alone. So nothing ever sees an old weight, and training is bit for bit what it would be if the step
had waited. Whoever reads all state (`gathered`, `state_dict`, a second step, a backward) waits for all of it.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class Worker:
    """Runs jobs one after another on a thread of its own, which starts with the first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(1, "onefold-update", self._begin)

    def submit(self, job: Callable[[], None]) -> "Future[None]":
        """Queue `job`; its exception is raised by the future's `result()`."""
        return self._pool.submit(_without_grad, job)

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)


def _without_grad(job: Callable[[], None]) -> None:
    with torch.no_grad():
        job()
