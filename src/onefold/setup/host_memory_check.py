"""Owns the refusal, before any is taken, of what the memory of a host cannot hold."""

import logging
import platform
from dataclasses import replace

from onefold.errors import HostMemoryError
from onefold.plan.budget import Budget
from onefold.plan.table import NAMED_PLANS, Plan, Tier
from onefold.setup.free_memory import Demand, device_bytes
from onefold.tiers.tier import available_bytes

_GIB = 2**30
_MOST_RANKS = 1024


def check_host(plan: Plan, demand: Demand) -> None:
    """Raise, on every rank, unless each machine has the memory that `plan` takes there for its ranks; warn where Adam's
    state would not fit any more.

    Raises:
        HostMemoryError: how much was asked for, how much there is, and what would fit.
    """
    if Tier.HOST not in plan.tiers:
        return
    without = replace(demand, units=[replace(unit, state=0) for unit in demand.units])
    at_once, with_adam = (each.under(plan).tier_bytes[Tier.HOST] for each in (without, demand))
    mine = (at_once, with_adam, demand.present.get("cpu", 0), available_bytes())
    machines: dict[str, list[tuple[int, int, int, int]]] = {}
    for machine, told in demand.comm.exchange_objects((platform.node(), mine)):
        machines.setdefault(machine, []).append(told)
    for machine, ranks in sorted(machines.items()):
        at_once, with_adam, present = (sum(each) for each in list(zip(*ranks, strict=True))[:3])
        available = present + min(told[-1] for told in ranks)
        if with_adam <= available:
            continue
        name = next((name.upper() for name, each in NAMED_PLANS.items() if each == plan), str(plan))
        text = (
            f"{name} keeps {with_adam:,} bytes ({with_adam / _GIB:.2f} GiB) of host memory for this model and "
            f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {machine} with Adam's state, {at_once:,} without it, and "
            f"{available:,} ({available / _GIB:.2f} GiB) are available there. "
            f"{_fitting(demand, available // len(ranks))}"
        )
        if at_once > available:
            raise HostMemoryError(text)
        logging.getLogger("onefold").warning("%s", text)


def _fitting(demand: Demand, host: int) -> str:
    """What would fit, states alone: with `host` bytes of host memory and one device a rank."""
    room = {Tier.DEVICE: device_bytes(demand.device)[0], Tier.HOST: host, Tier.DISK: 0}

    def fits(plan: Plan, num_shards: int) -> bool:
        held = Budget.at_rest(plan, demand.units, num_shards).tier_bytes
        return all(held[tier] <= room[tier] for tier in Tier)

    num_ranks = demand.comm.num_shards
    now = [name.upper() for name, plan in NAMED_PLANS.items() if fits(plan, num_ranks)]
    if now:
        return f"What would fit with as many ranks, activations not counted: {', '.join(now)}"
    while num_ranks < _MOST_RANKS:
        num_ranks *= 2
        for name in ("zero_3", "offload_3"):
            if fits(NAMED_PLANS[name], num_ranks):
                return f"{name.upper()} would fit over {num_ranks} such ranks"
    return f"No named plan fits over {_MOST_RANKS} such ranks"
