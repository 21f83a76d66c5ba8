"""Owns where checkpoints lie: how one appears at once, which is the newest, and which are removed.

[Note: A checkpoint appears at once]
It is written into a directory of another name beside its place, `.NAME.TOKEN.partial`, brought to the disk, and
renamed. One that is replaced is first renamed to `.NAME.replaced`, and removed when the new one is there; should the
process end between the two renames, the old one is still found under that name. Directories of processes that were
killed are recognized by a lock that nobody holds any more, and removed by the next save beside them.
"""

import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onefold.checkpoint.files import Files, Lock
from onefold.checkpoint.storage import MANIFEST, read_manifest
from onefold.errors import CheckpointError

LATEST = "latest"
_LOCK = "lock"
_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<token>[0-9a-f]{16})\.(partial|trash)")
_REPLACED = re.compile(r"\.(?P<name>.+)\.replaced")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is whole, as far as its manifest tells."""

    path: Path
    saved_ns: int


class Workplace:
    """Where rank 0 lets a checkpoint grow, until it is moved to `target`.

    Raises:
        OSError: the system refuses.
    """

    def __init__(self, target: Path, files: Files) -> None:
        self.target = target
        self._files = files
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target, files)
        remove_leftovers(target.parent, files)
        self.path = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
        self.path.mkdir()
        self._lock = Lock(self.path / _LOCK)

    def commit(self, keep_last: int | None) -> None:
        """Let the checkpoint appear, then remove what is not wanted any more."""
        (self.path / _LOCK).unlink()
        replaced = _replaced(self.target)
        if self.target.exists():
            self._files.rename(self.target, replaced)
        self._files.rename(self.path, self.target)
        self._lock.release()
        self._files.sync_directory(self.target.parent)
        if replaced.exists():
            remove(replaced, self._files)
        if keep_last is not None:
            mine = self.target.resolve()
            others = [found for found in checkpoints(self.target.parent) if found.path.resolve() != mine]
            for found in others[keep_last - 1 :]:
                remove(found.path, self._files)

    def abandon(self) -> None:
        """Remove what was written so far, as well as the system lets us: the next save removes the rest."""
        self._lock.release()
        if self.path.exists():
            with suppress(OSError):
                self._files.remove_tree(self.path)


def recover(target: Path, files: Files) -> None:
    """Bring back a checkpoint that was about to be replaced when its process ended."""
    replaced = _replaced(target)
    if replaced.exists():
        if target.exists():
            remove(replaced, files)
        else:
            files.rename(replaced, target)


def remove(path: Path, files: Files) -> None:
    """Remove a checkpoint, so that at no time half of one stands in its place."""
    name = path.name.removeprefix(".").removesuffix(".replaced")
    trash = path.with_name(f".{name}.{secrets.token_hex(8)}.trash")
    files.rename(path, trash)
    files.remove_tree(trash)


def remove_leftovers(parent: Path, files: Files) -> None:
    """Remove what processes that were killed left behind."""
    for path in list(parent.iterdir()):
        if _LEFT.fullmatch(path.name) and path.is_dir() and not Lock.is_held(path / _LOCK):
            with suppress(FileNotFoundError):  # another run found it too
                files.remove_tree(path)


def checkpoints(parent: Path) -> list[Found]:
    """The checkpoints in a directory whose manifests are whole, newest first."""
    return [found for found, problem in _looked_at(parent) if problem is None]


def _looked_at(parent: Path) -> Iterator[tuple[Found, str | None]]:
    if not parent.is_dir():
        return
    found: list[tuple[Found, str | None]] = []
    for path in parent.iterdir():
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            found.append((Found(path, read_manifest(path)["saved_ns"]), None))
        except CheckpointError as error:
            if (path / MANIFEST).exists():
                found.append((Found(path, path.stat().st_mtime_ns), str(error)))
    yield from sorted(found, key=lambda item: (-item[0].saved_ns, item[0].path.name))


def candidates(path: Path) -> tuple[list[Path], list[str]]:
    """The checkpoints that `path` may mean, best first, and what was passed over, with reasons.

    `path` is a checkpoint, or `DIRECTORY/latest` for the newest one in a directory (unless one has that name).

    Raises:
        CheckpointError: there is none.
    """
    parent = path.parent
    if path.name != LATEST or (path / MANIFEST).exists():
        if not path.exists():
            aside = _replaced(path)
            if aside.exists():
                return [aside], []
            near = ", ".join(sorted(found.path.name for found in checkpoints(parent))) or "none"
            raise CheckpointError(f"there is no checkpoint {path}; in {parent} there are: {near}")
        return [path], []
    for aside in parent.glob(".*.replaced") if parent.is_dir() else ():
        match = _REPLACED.fullmatch(aside.name)
        if match and not (parent / match["name"]).exists():
            return [*(found.path for found in checkpoints(parent)), aside], []
    found = list(_looked_at(parent))
    whole = [each.path for each, problem in found if problem is None]
    passed = [f"{each.path.name} ({problem})" for each, problem in found if problem is not None]
    if not whole:
        raise CheckpointError(f"there is no whole checkpoint in {parent}{': ' + '; '.join(passed) if passed else ''}")
    return whole, passed


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")
