"""Owns what a machine says about itself before a run is started on it: an address, a free port, its Onefold and torch.

The launcher sends the text of this file over ssh, as `python -c TEXT NAME`. Invariant: it needs nothing but Python's
own modules and imports nothing of Onefold, which may be missing there, or another one. What it prints is one line that
begins with `ANSWER_MARK`; a shell's greetings may stand before it.
"""

import importlib.util
import json
import socket
import sys
import zlib
from importlib import metadata
from pathlib import Path

ANSWER_MARK = "onefold-answer "


def about(name: str) -> dict[str, object]:
    """What this machine, which others call `name`, says."""
    spec = importlib.util.find_spec("onefold")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return {
        "address": _address(name),
        "port": _free_port(),
        "folder": "" if folder is None else str(folder),
        "code": 0 if folder is None else _digest(folder),
        "torch": _version("torch"),
    }


def _address(name: str) -> str:
    """An address for `name` that means something to other machines; an alias of ~/.ssh/config does not."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing; picks the interface that leads out of here
            return str(probe.getsockname()[0])
    return name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _digest(folder: Path) -> int:
    """A number that differs where the package's code does."""
    found = 0
    for path in sorted(folder.rglob("*.py")):
        found = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(folder)).encode(), found))
    return found


def _version(package: str) -> str:
    """Without the part that names a build."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    print(ANSWER_MARK + json.dumps(about(sys.argv[1])))
