"""Owns what tests know of Onefold's insides: the one door for those that no public name can serve.

Invariant: what is put in the place of a part of Onefold is taken out again.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

import onefold
from onefold.comm.wrappers import CountingComm
from onefold.engine.session import Session, session_of
from onefold.optim.kernels.host import TorchKernel

PACKAGE = Path(onefold.__file__).parent


def insides(model: nn.Module) -> Session:
    """What a sharded model's parts know each other by."""
    return session_of(model, "the test")


def units_of(model: nn.Module) -> list[Any]:
    """The units of a sharded model, the root first."""
    return list(insides(model).runtime.units)


def finish_updates(model: nn.Module) -> None:
    """Wait until updated weights are there, as whatever reads them does."""
    insides(model).runtime.finish_updates()


@contextmanager
def opened_when_waited_for(open_it: Callable[[], None]) -> Iterator[None]:
    """Call `open_it` once this thread waits inside of Onefold for what is held back, or when it has gone on without."""
    here, ended = threading.get_ident(), threading.Event()

    def watch() -> None:
        places: list[Any] = []
        while not ended.wait(0.002):
            places = [*places[-9:], _place(sys._current_frames()[here])]
            if len(places) == 10 and places[0] is not None and len(set(places)) == 1:
                break
        open_it()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _place(frame: FrameType | None) -> tuple[int, int] | None:
    """Where a thread is in a function of Onefold that waits; None where it is in none."""
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            return (id(frame), frame.f_lasti) if "wait" in frame.f_code.co_name else None
        frame = frame.f_back
    return None


@contextmanager
def kernel_on_the_host(make: Callable[..., TorchKernel]) -> Iterator[None]:
    """Let optimizers that are made inside update on the host by the kernel that `make(num_threads)` gives."""
    module = sys.modules["onefold.optim.optimizer"]
    usual, module.host_kernel = module.host_kernel, make
    try:
        yield
    finally:
        module.host_kernel = usual


def counted(model: nn.Module, plan: onefold.Plan, **options: Any) -> tuple[nn.Module, CountingComm]:
    """A sharded model, and the `CountingComm` on its wire."""
    module, made = sys.modules["onefold.setup.shard"], []
    connect = module.connect

    def connect_counted(*args):
        made.append(CountingComm(connect(*args)))
        return made[-1]

    module.connect = connect_counted
    try:
        return onefold.shard(model, plan, **options), made[0]
    finally:
        module.connect = connect


def noticed_views(model: nn.Module) -> tuple[list[bool], list[bool]]:
    """Of each flat buffer whether somebody is seen to hold views of it: when nobody does, and when somebody does."""
    buffers = [flat.buffer for unit in units_of(model) for flat in unit.flats]
    alone = [buffer.is_watched for buffer in buffers]
    views = [param.data for param in model.parameters()]
    held = [buffer.is_watched for buffer in buffers]
    del views
    return alone, held


class BrokenKernel(TorchKernel):
    """Fails in every update."""

    def update(self, run: Any, step: Any) -> None:
        raise ZeroDivisionError("the worker's own")


__all__ = [
    "BrokenKernel",
    "TorchKernel",
    "counted",
    "finish_updates",
    "insides",
    "kernel_on_the_host",
    "noticed_views",
    "opened_when_waited_for",
    "units_of",
]
