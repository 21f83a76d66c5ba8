"""Owns finding out which machines a run can be started on, before anything is: each is asked over ssh, all at once.

Invariant: a machine that cannot take its part (not reached, a password wanted, no such folder, no Python, another
Onefold) is known with its reason, and nothing waits for it longer than `patience_s`.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from onefold.errors import LaunchError
from onefold.launch.cluster import probe

PATIENCE_S = 60.0
"""How long a machine may take to answer: Python starts there, perhaps from a slow file system."""
_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10", "ServerAliveCountMax=3")
"""ssh fails rather than ask, and notices within half a minute when a machine is gone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a machine said: the address by which others reach it, and a port that was free there."""

    address: str
    port: int


def ssh_words(command: str, port: int | None) -> list[str]:
    """The words that reach a machine: those of `command`, and for ssh itself what it leaves open (for ssh, what is said
    first holds).

    Raises:
        LaunchError: there are none.
    """
    words = shlex.split(command)
    if not words:
        raise LaunchError("--ssh_command is empty")
    if port is not None:
        words += ["-p", str(port)]
    if Path(words[0]).name == "ssh":
        words += [word for option in _SSH_OPTIONS for word in ("-o", option)]
    return words


def remote_line(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """One line for the shell at the other end, which takes it apart into `words` again, whatever is in them."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    return f"cd {shlex.quote(str(folder))} && exec {shlex.join(['env', *variables, *words])}"


def ask(
    ssh: Sequence[str],
    hosts: Mapping[str, Mapping[str, str]],
    folder: Path,
    *,
    patience_s: float = PATIENCE_S,
) -> tuple[dict[str, Answer], dict[str, str]]:
    """({host: its answer}, {host: why it cannot take part}), of `hosts` with the environment of each.

    Raises:
        LaunchError: there is no such program as `ssh`.
    """
    asked: dict[str, subprocess.Popen[str]] = {}
    answers: dict[str, Answer] = {}
    reasons: dict[str, str] = {}
    deadline = time.monotonic() + patience_s
    try:
        for host, environment in hosts.items():
            words = [sys.executable, "-c", _question(), host.rpartition("@")[2]]
            asked[host] = _start([*ssh, host, remote_line(words, environment, folder)])
        for host, process in asked.items():
            try:
                out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                reasons[host] = f"no answer within {patience_s:g} s"
                continue
            found = _understood(out, err, process.returncode)
            if isinstance(found, Answer):
                answers[host] = found
            else:
                reasons[host] = found
    finally:
        for process in asked.values():
            with process:
                process.kill()
    return answers, reasons


def _start(words: Sequence[str]) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    try:
        # A session of its own has no terminal, where ssh might ask for a password.
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot run {words[0]}: {error.strerror}; see --ssh_command") from error


def _understood(out: str, err: str, code: int) -> Answer | str:
    """A machine's answer, or why it is of no use."""
    line = next((line for line in out.splitlines() if line.startswith(probe.ANSWER_MARK)), "")
    if not line:
        said = "; ".join((err or out).strip().splitlines()[-3:])
        return f"{said or 'it said nothing'} (exit code {code})"
    said_there = json.loads(line.removeprefix(probe.ANSWER_MARK))
    here = _here()
    if not said_there["folder"]:
        return f"{sys.executable} finds no Onefold there"
    if said_there["code"] != here["code"]:
        return f"another Onefold is there, in {said_there['folder']}, than here, in {here['folder']}; install the same"
    if said_there["torch"] != here["torch"]:
        return f"torch {said_there['torch'] or 'is missing'} there, {here['torch']} here; install the same"
    return Answer(said_there["address"], said_there["port"])


@cache
def _question() -> str:
    return Path(probe.__file__).read_text(encoding="utf-8")


@cache
def _here() -> dict[str, object]:
    return probe.about("localhost")
