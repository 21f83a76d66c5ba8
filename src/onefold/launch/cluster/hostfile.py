"""Owns which machines and slots a run uses: hostfiles, and DeepSpeed's `--include` and `--exclude`.

A slot is a place for one rank: the GPU of that number, or any process on a machine without GPUs. Invariant: a `Machine`
has at least one slot, and hosts and slots keep the order of the hostfile, so ranks are numbered the same way each time.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onefold.errors import LaunchError

_LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>[0-9]{1,4})")
_SPEC = "NAME or NAME:SLOT,SLOT,..., several joined by @ (worker-0@worker-1:0,2)"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as the hostfile names it (what ssh is given), and the slots to use there, ascending."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: Path) -> list[Machine]:
    """The hosts of a file of lines `NAME slots=NUMBER`; `#` begins a comment, empty lines count for nothing.

    Raises:
        LaunchError: the file cannot be read, names no host, or has a line that is wrong; file and line are named.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the hostfile {path}: {error}") from error
    hosts: dict[str, Machine] = {}
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        host = _host(text, f"{path}, line {number}")
        if host.name in hosts:
            raise LaunchError(
                f"{path}, line {number}: {host.name} is there twice, first in line {seen[host.name]}; add the slots up "
                "in one line"
            )
        hosts[host.name], seen[host.name] = host, number
    if not hosts:
        raise LaunchError(f"the hostfile {path} names no host; write one a line, e.g. `worker-0 slots=8`")
    return list(hosts.values())


def _host(text: str, where: str) -> Machine:
    match = _LINE.fullmatch(text)
    if match is None:
        raise LaunchError(f"{where}: expected `NAME slots=NUMBER`, e.g. `worker-0 slots=8`; found {text!r}")
    if match["name"].startswith("-"):  # ssh would take it for an option
        raise LaunchError(f"{where}: a host's name cannot begin with -; found {match['name']!r}")
    if not int(match["slots"]):
        raise LaunchError(f"{where}: {match['name']} has no slots; leave it out, or give it at least one")
    return Machine(match["name"], tuple(range(int(match["slots"]))))


def choose(
    hosts: Sequence[Machine],
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> list[Machine]:
    """The hosts and slots to use: all of `hosts`, or those that `include` names, or those that `exclude` does not, or
    the first `num_nodes` hosts with their first `num_gpus` slots.

    Raises:
        LaunchError: the selections contradict each other, name what is not there, or leave nothing.
    """
    if include and exclude:
        raise LaunchError("--include and --exclude cannot both be given; say one or the other")
    if (include or exclude) and (num_nodes is not None or num_gpus is not None):
        raise LaunchError(
            "--num_nodes, --num_gpus and --nproc count hosts and slots from the first on, --include and --exclude name "
            "them; give one kind only"
        )
    if include:
        return _included(hosts, _named(hosts, include, "--include"))
    if exclude:
        return _excluded(hosts, _named(hosts, exclude, "--exclude"), exclude)
    if num_nodes is not None and not 1 <= num_nodes <= len(hosts):
        raise LaunchError(f"--num_nodes {num_nodes}: there are {len(hosts)} hosts: {_listed(hosts)}")
    return [_first(host, num_gpus) for host in hosts[:num_nodes]]


def _first(host: Machine, num_gpus: int | None) -> Machine:
    if num_gpus is None:
        return host
    if not 1 <= num_gpus <= len(host.slots):
        raise LaunchError(f"--num_gpus {num_gpus}: {host.name} has {len(host.slots)} slots; correct one of the two")
    return Machine(host.name, host.slots[:num_gpus])


def _named(hosts: Sequence[Machine], text: str, option: str) -> dict[str, set[int]]:
    """{host: slots} that a selection names; the slots of a host named alone are all it has."""
    known = {host.name: host for host in hosts}
    found: dict[str, set[int]] = {}
    for spec in text.split("@"):
        name, colon, slots = (part.strip() for part in spec.partition(":"))
        if not name or (colon and re.fullmatch(r"[0-9]{1,9}(\s*,\s*[0-9]{1,9})*", slots) is None):
            raise LaunchError(f"{option} {text}: expected {_SPEC}; found {spec!r}")
        if name not in known:
            raise LaunchError(f"{option} {text}: there is no host {name}; the hosts are {_listed(hosts)}")
        wanted = [int(slot) for slot in slots.split(",")] if colon else list(known[name].slots)
        for slot in wanted:
            if slot not in known[name].slots:
                raise LaunchError(f"{option} {text}: {name} has no slot {slot}; it has {_range(known[name].slots)}")
        found.setdefault(name, set()).update(wanted)
    return found


def _included(hosts: Sequence[Machine], named: Mapping[str, set[int]]) -> list[Machine]:
    return [Machine(host.name, tuple(sorted(named[host.name]))) for host in hosts if host.name in named]


def _excluded(hosts: Sequence[Machine], named: Mapping[str, set[int]], text: str) -> list[Machine]:
    kept = [
        Machine(host.name, tuple(slot for slot in host.slots if slot not in named.get(host.name, ()))) for host in hosts
    ]
    left = [host for host in kept if host.slots]
    if not left:
        raise LaunchError(f"--exclude {text} leaves nothing to run on")
    return left


def _listed(hosts: Sequence[Machine]) -> str:
    return ", ".join(host.name for host in hosts)


def _range(slots: Sequence[int]) -> str:
    return f"slot {slots[0]}" if len(slots) == 1 else f"slots {slots[0]} to {slots[-1]}"
