"""Owns a run on several machines, attempt by attempt: which take part in each, and whether there is another.

A rank that fails, or a machine that is lost, ends an attempt on all machines. The next one starts on those that answer
then: a machine that is gone is left out, one that has come back takes part again. Invariant: ranks are numbered in the
order of the hostfile, and meet on the first machine that takes part, so that any machine may be the one that is lost.

torchrun can replace machines itself. That is not used here: its ranks meet at a store on one of the machines, whose
loss ends the run, and it takes the better part of a minute to go on.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onefold.errors import LaunchError
from onefold.launch.cluster import preflight, ssh_run
from onefold.launch.cluster.preflight import Answer
from onefold.launch.launch import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A run on several machines.

    Attributes:
        parts: {host: its part}, in the order of the ranks, without what depends on which machines take part.
        ssh: the words that reach a machine.
        folder: where the run is started, on every machine.
        min_nodes: as long as so many machines answer, the run goes on.
        max_restarts: how often all ranks are started again.
        master: the address and the port where ranks meet, of the first host; None: found out.
    """

    parts: Mapping[str, Node]
    ssh: Sequence[str]
    folder: Path
    min_nodes: int
    max_restarts: int = 0
    master: tuple[str | None, int | None] = (None, None)


def run_attempts(cluster: Cluster) -> int:
    """Run to the end; the exit code of the last attempt.

    Raises:
        LaunchError: too few machines can take part, already in the first attempt.
    """
    commands = first_commands(cluster)
    for restart in range(1, cluster.max_restarts + 2):
        ended = ssh_run.run_attempt(commands, grace_s=_grace(cluster))
        sys.stderr.write(ended.words)
        if not ended.code or ended.signalled or ended.refused:
            return ended.code
        if restart > cluster.max_restarts:
            sys.stderr.write(_way_out(ended.lost))
            break
        print(f"onefold run: starting again, {restart} of {cluster.max_restarts}", file=sys.stderr, flush=True)
        try:
            commands = _commands(cluster, _answers(cluster), restart)
        except LaunchError as error:
            print(f"onefold run: cannot start again: {error}", file=sys.stderr)
            return ended.code
    return ended.code


def _way_out(lost: Sequence[str]) -> str:
    if not lost:
        return ""
    return (
        "To go on with the other machines from the latest checkpoint, give the same command and --exclude "
        f"{'@'.join(lost)}; with --max_restarts and --min_nodes that is done by itself.\n"
    )


def first_commands(cluster: Cluster) -> dict[str, list[str]]:
    """{host: the command that starts its part of the first attempt}.

    Raises:
        LaunchError: too few machines can take part.
    """
    return _commands(cluster, _answers(cluster), 0)


def _answers(cluster: Cluster) -> dict[str, Answer]:
    """The answers of the machines that take part, in order."""
    hosts = {host: node.environment for host, node in cluster.parts.items()}
    answers, reasons = preflight.ask(cluster.ssh, hosts, cluster.folder)
    if len(answers) < cluster.min_nodes:
        told = "".join(f"\n  {host}: {reason}" for host, reason in reasons.items())
        raise LaunchError(
            f"{len(answers)} of {len(cluster.parts)} machines can take part, and {cluster.min_nodes} must. Each is "
            f"reached by `{shlex.join(cluster.ssh)} NAME`, without a password, and has to have this Python, Onefold "
            f"and folder.{told}\nTo go on without a machine, leave it out with --exclude; with --max_restarts and "
            "--min_nodes that is done by itself"
        )
    for host, reason in reasons.items():
        print(f"onefold run: going on without {host}: {reason}", file=sys.stderr, flush=True)
    return answers


def _commands(cluster: Cluster, answers: Mapping[str, Answer], restarts: int) -> dict[str, list[str]]:
    first = next(iter(answers))
    address, port = answers[first].address, answers[first].port
    if first == next(iter(cluster.parts)):
        address, port = cluster.master[0] or address, cluster.master[1] or port
    second = [answer.address for answer in answers.values()][1:2]
    made = {}
    for rank, host in enumerate(answers):
        part = replace(
            cluster.parts[host],
            num_nodes=len(answers),
            min_nodes=len(answers),
            node_rank=rank,
            master=(address, port),
            peer=address if rank else next(iter(second), None),
            restarts=restarts,
        )
        made[host] = [
            *cluster.ssh,
            host,
            preflight.remote_line(ssh_run.node_words(part), part.environment, cluster.folder),
        ]
    return made


def _grace(cluster: Cluster) -> int:
    return max(node.grace_s for node in cluster.parts.values())
