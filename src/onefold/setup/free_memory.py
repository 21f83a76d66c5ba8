"""Owns what ranks know of memory before they place a model: what it takes, what is free, and what they leave free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from onefold.comm.comm import Comm
from onefold.plan.accounting import UnitBytes
from onefold.plan.budget import Budget
from onefold.plan.table import Plan
from onefold.tiers.tier import available_bytes

_ACTIVATIONS = Fraction(1, 4)
"""The part of the device's memory left for activations."""
_UNITS_AT_WORK = 9
"""Whole units that are alive in a backward beside the states: gradients on their way, gathered parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A model in bytes, with Adam's state (other rules keep less), and the ranks and the device that it is for."""

    units: Sequence[UnitBytes]
    comm: Comm
    device: torch.device
    present: Mapping[str, int]
    """Bytes of this rank's parameters that are there now and will be moved, by type of device."""

    def under(self, plan: Plan) -> Budget:
        """What one rank keeps under `plan`, without padding."""
        return Budget.at_rest(plan, self.units, self.comm.num_shards)

    def room(self) -> int:
        """Bytes that states, and units that stay gathered, may take on the device: what is free there, less an
        allowance for activations and for units at work; the least of all ranks. It may be negative."""
        total, free = device_bytes(self.device)
        told = self.comm.exchange([total, free + self.present.get("cuda", 0)])
        total, free = (min(each) for each in zip(*told, strict=True))
        return int(free - int(total * _ACTIVATIONS) - _UNITS_AT_WORK * max(unit.params for unit in self.units))


def device_bytes(device: torch.device) -> tuple[int, int]:
    """(total, free) bytes of the device's memory; free counts what torch's allocator holds without using it."""
    if device.type != "cuda":
        free = available_bytes()
        return free, free
    free, total = torch.cuda.mem_get_info(device)
    return total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
