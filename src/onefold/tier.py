"""Owns the seam between state and the place where it rests.

Nothing above knows which tier it talks to: it allocates, fetches before use and stores after a change. The device tier
is where the arithmetic is, so its fetch and store have nothing to do.
"""

from typing import Protocol

import torch
from torch import Tensor

from onefold.errors import PlanError
from onefold.plan import Placement, Tier
from onefold.streams import Ticket


class Storehouse(Protocol):
    """A place where flat tensors rest."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of zeros that rests here."""
        ...

    def fetch(self, resting: Tensor) -> tuple[Tensor, Ticket]:
        """The values of `resting` where arithmetic can reach them, and when they are there."""
        ...

    def store(self, resting: Tensor, changed: Tensor) -> Ticket:
        """Put `changed` back into `resting`."""
        ...


class Device:
    """Accelerator memory, or plain memory when training on CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def fetch(self, resting: Tensor) -> tuple[Tensor, Ticket]:
        return resting, Ticket()

    def store(self, resting: Tensor, changed: Tensor) -> Ticket:
        if changed.data_ptr() != resting.data_ptr():
            resting.copy_(changed)
        return Ticket()


def storehouse(placement: Placement, device: torch.device) -> Storehouse:
    """The storehouse a placement names.

    Raises:
        PlanError: this version has no such tier.
    """
    if placement.tiers != (Tier.DEVICE,):
        raise PlanError(
            f"this version of Onefold places state on the DEVICE tier only, not on {placement}; "
            "ZERO_2 and ZERO_3 are the nearest plans that run"
        )
    return Device(device)
