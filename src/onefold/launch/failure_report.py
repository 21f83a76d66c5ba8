"""Owns what a run says when a rank ends it: which rank was first, its exit code, and its own last words.

When one rank fails the others soon do too, for want of it; what helps is the traceback of the first. Invariant: a
`Failure` names the rank that failed first, as far as its last write tells, and an exit code that is not 0.
"""

import json
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FAILURE_MARK = b"\x1eonefold-failure "
"""Begins the line by which a node tells the launcher of its failure; no program prints it by chance."""

_TRACEBACK = re.compile(r"^[ \t]*(?:\+ Exception Group )?Traceback \(most recent call last\):$", re.MULTILINE)
_CHAINED = re.compile(
    r"(During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\s*\Z"
)
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""What torch puts before each line of a traceback once there is a process group."""
_AFTERMATH = re.compile(r"^(terminate called |\[[WEF]\d{4} )", re.MULTILINE)
"""How C++ libraries begin what they still say when Python has ended with an exception."""
_TAIL_BYTES = 256 * 1024
_QUIET_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank's end.

    Attributes:
        rank: the global rank.
        code: what a shell would show: the exit code, or 128 plus the number of the signal.
        signal: the number of the signal that ended it; 0: it exited.
        ago_s: seconds between the rank's last words and now.
        words: its traceback, or the last lines that it wrote to stderr; empty when they are on the screen already.
    """

    rank: int
    code: int
    signal: int = 0
    ago_s: float
    words: str

    def encode(self) -> bytes:
        """One line, for the launcher at the other end of ssh."""
        return FAILURE_MARK + json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "Failure":
        """The failure that `encode` wrote."""
        return cls(**json.loads(line.removeprefix(FAILURE_MARK)))

    def text(self, where: str = "") -> str:
        """What to print last: which rank failed and how, then its traceback."""
        how = f"was ended by {_signal_name(self.signal)}" if self.signal else f"exited with code {self.code}"
        hint = " (often the system, for want of memory: see `dmesg`)" if self.signal == signal.SIGKILL else ""
        head = f"onefold run: rank {self.rank}{where} {how}{hint}"
        if not self.words:
            return f"{head}\n"
        told = "its traceback" if _TRACEBACK.search(self.words) else "no traceback; the last lines of its stderr"
        return f"{head}; {told}:\n{self.words}\n"


def first(ended: Mapping[int, tuple[int, Path | None]]) -> Failure:
    """The first failure among `ended`: {global rank: (exit code as `subprocess` tells it, its stderr or None)}, those
    that were noticed first coming first.

    Peers that fail in the wake of the first write their tracebacks after it; those that were ended on its account have
    SIGTERM as their code, and were noticed after it.
    """
    rank = next(iter(ended))
    if ended[rank][0] != -signal.SIGTERM:
        own = {rank: end for rank, end in ended.items() if end[0] != -signal.SIGTERM}
        rank = min(own, key=lambda each: (_last_write(own[each][1]), each))
    code, path = ended[rank]
    return Failure(
        rank=rank,
        code=shell_code(code),
        signal=max(0, -code),
        ago_s=time.time() - _last_write(path),
        words=last_words(path),
    )


def shell_code(code: int) -> int:
    """A `subprocess` return code as a shell shows it."""
    return 128 - code if code < 0 else code


def last_words(path: Path | None) -> str:
    """The last traceback in a file, with the exceptions that it chains to; without one, the last lines."""
    if path is None or not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = _TORCH_PREFIX.sub("", file.read().decode(errors="replace")).rstrip()
    starts = [match.start() for match in _TRACEBACK.finditer(text)]
    if not starts:
        return "\n".join(text.splitlines()[-_QUIET_LINES:])
    begin = len(starts) - 1
    while begin and _CHAINED.search(text[starts[begin - 1] : starts[begin]]):
        begin -= 1
    return _AFTERMATH.split(text[starts[begin] :])[0].rstrip()


def _last_write(path: Path | None) -> float:
    return path.stat().st_mtime if path is not None and path.exists() else time.time()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
