"""Owns the global L2 norm of the gradients: squares are summed in fp64 over the shards, in their order, so it does not
depend on which rank holds what, and is the same on all of them.

Where gradients are in host memory, each rank's sum travels with what it tells the others at a step anyway. Where they
are on a GPU, ranks tell each other first, while the GPU still works, and sum on it.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from onefold.comm.comm import Comm
from onefold.engine.grad_report import Told

Squares = Callable[[bool], Tensor]
"""The sum of squares of this rank's range (0-dim); its argument asks for fp64 throughout."""


class Norm(Protocol):
    """The norm of one step's gradients, loss scale included."""

    def told(self) -> float:
        """The sum of squares that the other ranks are told."""
        ...

    def of(self, told: Told, is_changed: bool) -> float:
        """The norm. `told` is what ranks told, and `is_changed` says that their gradients are others since."""
        ...


class DeviceNorm:
    """Sums on the device."""

    def __init__(self, comm: Comm, squares: Squares) -> None:
        self._comm = comm
        self._squares = squares

    def told(self) -> float:
        return 0.0

    def of(self, told: Told, is_changed: bool) -> float:
        norm = self._total(is_exact=False)
        # Finite gradients can overflow a sum that was taken quickly.
        return norm if norm < float("inf") else self._total(is_exact=True)

    def _total(self, is_exact: bool) -> float:
        return float(self._comm.total(self._squares(is_exact)).sqrt())


class HostNorm(DeviceNorm):
    """Sums on the host, of what ranks told."""

    def told(self) -> float:
        return float(self._squares(False))

    def of(self, told: Told, is_changed: bool) -> float:
        if is_changed:
            return super().of(told, is_changed)
        squares = [told.reports[rank].squares for rank in self._comm.first_peers]
        norm = float(torch.tensor(squares, dtype=torch.float64, device="cpu").sum().sqrt())
        return norm if norm < float("inf") else self._total(is_exact=True)
