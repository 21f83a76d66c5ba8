"""Owns the manifest of a checkpoint, and the suspicion with which files of one are read.

Invariant: whatever stands in a file, reading it gives what was meant or a `CheckpointError` that names the file.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from onefold.checkpoint.files import AT_ONCE, Files, read_file
from onefold.errors import CheckpointError

FORMAT, VERSION = "onefold checkpoint", 2
MANIFEST, SHARED, OWN = "manifest.json", "checkpoint.json.gz", "json.gz"
_NAME = re.compile(r"rank-[0-9]{5,9}\.(data|sums|json[.]gz)")
_AMISS = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError, MemoryError)
"""What reading values that are not what they should be may raise; deep nesting raises a RuntimeError."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the checkpoint, in the manifest."""

    name: str
    nbytes: int
    checksum: int | None
    """CRC-32 of all of it; None where blocks have checksums of their own."""
    block: int | None = None
    """Bytes of such blocks."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is made of, by name of the file."""

    saved_ns: int
    files: Mapping[str, FileRecord]


def file_of(rank: int, kind: str) -> str:
    return f"rank-{rank:05d}.{kind}"


def manifest_text(manifest: Manifest) -> bytes:
    """What stands in the file."""
    files = {
        record.name: {"bytes": record.nbytes, "crc32": record.checksum, "block": record.block}
        for record in manifest.files.values()
    }
    body = {"format": FORMAT, "version": VERSION, "saved_ns": manifest.saved_ns, "files": files}
    return json.dumps({**body, "crc32": _checksum(body)}, indent=1).encode()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint, checked by itself.

    Raises:
        CheckpointError: there is none, or it is damaged, or of a version that this one cannot read.
    """
    path = directory / MANIFEST
    try:
        text = understood(path, lambda: read_file(Files(), path))
    except CheckpointError as error:
        raise CheckpointError(f"{directory} is not a whole checkpoint: {error}") from error
    return understood(path, lambda: _parse(path, text))


def _parse(path: Path, text: bytes) -> Manifest:
    body = json.loads(text)
    checksum = body.pop("crc32")
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']!r}")
    if body["version"] != VERSION:
        raise CheckpointError(f"{path} is of version {body['version']}, and this Onefold reads version {VERSION}")
    if checksum != _checksum(body):
        raise ValueError("its checksum is wrong")
    files = {}
    for name, record in body["files"].items():
        nbytes, sum_, block = record["bytes"], record["crc32"], record["block"]
        if name != SHARED and not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a file of a checkpoint")
        if type(nbytes) is not int or nbytes < 0 or type(sum_) not in (int, type(None)):
            raise ValueError(f"{nbytes!r} bytes with checksum {sum_!r} in {name!r}")
        if (sum_ is None) == (block is None) or not (block is None or _is_block(block)):
            raise ValueError(f"checksum {sum_!r} and blocks of {block!r} bytes in {name!r}")
        files[name] = FileRecord(name, nbytes, sum_, block)
    if SHARED not in files or type(body["saved_ns"]) is not int:
        raise ValueError("it is incomplete")
    return Manifest(body["saved_ns"], files)


def _is_block(nbytes: object) -> bool:
    return type(nbytes) is int and nbytes > 0 and AT_ONCE % nbytes == 0


def _checksum(body: Mapping[str, Any]) -> int:
    return crc32(json.dumps(body, sort_keys=True).encode())


def understood(path: Path, parse: Callable[[], Result]) -> Result:
    """What `parse` makes of the file.

    Raises:
        CheckpointError: (naming it) it makes nothing of it.
    """
    try:
        return parse()
    except _AMISS as error:
        told = str(error) if isinstance(error, CheckpointError) else repr(error)
        if str(path.parent) in told:
            raise  # it says what is amiss by itself
        raise CheckpointError(f"{path} is damaged, or no file of an Onefold checkpoint: {told}") from error
