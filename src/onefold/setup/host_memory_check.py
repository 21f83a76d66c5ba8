"""Owns the refusal, before any is taken, of what the memory of a host cannot hold."""

import logging
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from onefold.comm.comm import Comm
from onefold.errors import HostMemoryError
from onefold.plan.table import NAMED_PLANS, Plan, Tier
from onefold.setup.offload_fraction import UnitStates, device_bytes, on_tier
from onefold.tiers.tier import available_bytes

_GIB = 2**30
_MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Need:
    """Of one rank, in bytes."""

    machine: str
    at_once: int
    """For what `shard` takes."""
    with_adam: int
    """And with Adam's state, which its optimizer would take."""
    available: int
    """On its machine."""
    present: int
    """Parameters that are in host memory now, and will be moved."""


def check_host(plan: Plan, units: Sequence[UnitStates], comm: Comm, device: torch.device, present: int) -> None:
    """Raise, on every rank, unless each machine has the memory that `plan` takes there for its ranks; warn where Adam's
    state would not fit any more. `present`: bytes of this rank's parameters that are in host memory, and will be moved.

    Raises:
        HostMemoryError: how much was asked for, how much there is, and what would fit.
    """
    if Tier.HOST not in plan.tiers:
        return
    at_once, moments = on_tier(plan, units, comm.num_shards, Tier.HOST)
    needs = comm.exchange_objects(Need(platform.node(), at_once, at_once + moments, available_bytes(), present))
    for machine in sorted({need.machine for need in needs}):
        here = [need for need in needs if need.machine == machine]
        available = min(need.available for need in here) + sum(need.present for need in here)
        if sum(need.with_adam for need in here) <= available:
            continue
        is_short = sum(need.at_once for need in here) > available
        told = _told(plan, machine, here, available, _fitting(units, comm, device, available // len(here)))
        if is_short:
            raise HostMemoryError(told)
        logging.getLogger("onefold").warning("%s", told)


def _told(plan: Plan, machine: str, here: Sequence[Need], available: int, fitting: str) -> str:
    name = next((name.upper() for name, each in NAMED_PLANS.items() if each == plan), str(plan))
    with_adam, at_once = sum(need.with_adam for need in here), sum(need.at_once for need in here)
    ranks = f"{len(here)} rank{'s' * (len(here) > 1)}"
    return (
        f"{name} keeps {with_adam:,} bytes ({with_adam / _GIB:.2f} GiB) of host memory for this model and {ranks} on "
        f"{machine} with Adam's state, {at_once:,} without it, and {available:,} ({available / _GIB:.2f} GiB) are "
        f"available there. {fitting}"
    )


def _fitting(units: Sequence[UnitStates], comm: Comm, device: torch.device, host: int) -> str:
    """What would fit, states alone: with `host` bytes of host memory and one device a rank."""
    room = {Tier.DEVICE: device_bytes(device)[0], Tier.HOST: host}
    now = [name.upper() for name, plan in NAMED_PLANS.items() if _fits(plan, units, comm.num_shards, room)]
    if now:
        return f"What would fit with as many ranks, activations not counted: {', '.join(now)}"
    for plan, num_ranks in _more(comm.num_shards):
        if _fits(NAMED_PLANS[plan], units, num_ranks, room):
            return f"{plan.upper()} would fit over {num_ranks} such ranks"
    return f"No named plan fits over {_MOST_RANKS} such ranks"


def _more(num_ranks: int) -> Iterable[tuple[str, int]]:
    while num_ranks < _MOST_RANKS:
        num_ranks *= 2
        yield from ((plan, num_ranks) for plan in ("zero_3", "offload_3"))


def _fits(plan: Plan, units: Sequence[UnitStates], num_shards: int, room: dict[Tier, int]) -> bool:
    is_there = plan.tiers <= room.keys()
    return is_there and all(sum(on_tier(plan, units, num_shards, tier)) <= most for tier, most in room.items())
