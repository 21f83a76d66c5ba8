"""Owns the thread that updates host state while the computation goes on.

[Note: The gated step]
`optimizer.step()` decides everything an update depends on - gradients, norm, factors, hyper-parameters, step numbers -
and hands it to one worker, unit by unit in forward order. It returns while the worker still updates. A unit whose
update is under way is hidden: what needs it first - its forward, a gather, code that touches one of its parameters -
waits for that unit alone. So nothing ever sees an old weight, and training is bit for bit what it would be if the step
had waited. What reads all state (`gathered`, `state_dict`, a second step, a backward) waits for all of it.

[Note: The delayed update]
ZeRO-Offload's one-step delayed parameter update (section 5.2 of the paper; off by default, since it changes what is
computed): the update of step t runs beside forward and backward of step t + 1, which still use the weights of step
t - 1. Its result is shown when step t + 1 starts to update, or earlier to what reads all state. It is written to the
twin of the weights, and gradients of the next step go to a second buffer, so neither side sees a half-made value. State
on the device is never late.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from onefold.errors import OnefoldError
from onefold.memory.streams import Ticket
from onefold.system.cores import bind_thread


class HostWorker:
    """Runs jobs one after another on a thread of its own, which starts with the first and stays on `cores`.

    Attributes:
        busy_s: seconds that jobs took so far.
        waited_s: seconds that other threads waited for jobs so far.
    """

    def __init__(self, device: torch.device, cores: Sequence[int]) -> None:
        self.busy_s = self.waited_s = 0.0
        # The thread keeps its initializer for life: a method of this object would keep the object, and so the thread.
        self._pool = ThreadPoolExecutor(1, "onefold-update", _begin, (device, cores))

    def submit(self, job: Callable[[], None]) -> Ticket:
        """Queue `job`; its exception is raised where the ticket is waited with."""
        future, process = self._pool.submit(self._run, job), os.getpid()

        def wait() -> None:
            if os.getpid() != process:
                raise OnefoldError(
                    "this process was forked while an update on the host was under way, by a thread that is not here. "
                    "Read weights in the process that trains; or start others (workers of a data loader) before the "
                    "step, or inside `with onefold.gathered(model):`, which waits for it"
                )
            start = time.perf_counter()
            try:
                future.result()
            finally:
                self.waited_s += time.perf_counter() - start

        return Ticket(wait, is_done=future.done)

    def _run(self, job: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            with torch.no_grad():
                job()
        finally:
            self.busy_s += time.perf_counter() - start


def _begin(device: torch.device, cores: Sequence[int]) -> None:
    bind_thread(cores)
    if device.type == "cuda":
        torch.cuda.set_device(device)
