"""Owns where checkpoints lie: how one appears at once, which is the newest, and which are removed.

[Note: A checkpoint appears at once]
It is written into a directory of another name beside its place, `.NAME.TOKEN.partial`, brought to the disk, and
renamed. One that is replaced changes names with it, and is then removed. Where names cannot be exchanged it is renamed
to `.NAME.replaced` before; should the process end then, it is still found under that name. Who writes holds a lock in
the directory until it stands in its place. So what processes that were killed left behind is recognized by a lock that
nobody holds any more; the next save beside it removes it, or brings it back.
"""

import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from onefold.checkpoint.files import Files, Lock, named
from onefold.checkpoint.manifest import MANIFEST, SHARED, read_manifest
from onefold.errors import CheckpointError
from onefold.system.atomic_replace import put_in_place

LATEST = "latest"
_LOCK = "lock"
_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<token>[0-9a-f]{16})\.(?P<kind>partial|trash)", re.DOTALL)
_REPLACED = re.compile(r"\.(?P<name>.+)\.replaced", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint by its place, and when it was saved: another may take its place."""

    path: Path
    saved_ns: int
    """0 if its manifest does not tell."""


def is_reserved(name: str) -> bool:
    """Whether a name is one that half-written and replaced checkpoints have: one saved under it would not last."""
    return any(pattern.fullmatch(name) for pattern in (_LEFT, _REPLACED))


class Damaged(CheckpointError):
    """The checkpoint is not whole; an older one may be."""


class Workplace:
    """Where rank 0 lets a checkpoint grow, until it is moved to `target`.

    Raises:
        CheckpointError: the system refuses.
    """

    def __init__(self, target: Path, files: Files) -> None:
        self.target = target
        self._files = files
        with named(target, "written"):
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(target.parent, files)
            self.path, self._lock = self._locked()

    def _locked(self) -> tuple[Path, Lock]:
        """A new directory. Somebody who cleans up may take it for a leftover before it is locked: then, another."""
        while True:
            path = self.target.with_name(f".{self.target.name}.{secrets.token_hex(8)}.partial")
            path.mkdir()
            with suppress(BlockingIOError, FileNotFoundError):
                return path, Lock(path / _LOCK)

    def commit(self, keep_last: int | None) -> None:
        """Let the checkpoint appear, then remove what is not wanted any more."""
        with named(self.target, "put in its place"):
            if self.target.exists() and _replaced(self.target).exists():
                remove(_replaced(self.target), self._files)
            put_in_place(self.path, self.target, _replaced(self.target), self._files)
            # Where two runs save to one name, the other's may stand there by now, and both get here.
            (self.target / _LOCK).unlink(missing_ok=True)
            self._lock.release()
            self._files.sync_directory(self.target.parent)
        # What was replaced has one of these names now.
        unwanted = [path for path in (self.path, _replaced(self.target)) if path.exists()]
        if keep_last is not None:
            mine = self.target.resolve()
            others = [found.path for found in checkpoints(self.target.parent) if found.path.resolve() != mine]
            unwanted += [path for path in others[keep_last - 1 :] if not path.is_symlink()]
        for path in unwanted:
            try:
                remove(path, self._files)
            except FileNotFoundError:
                """Another run removed it too."""
            except OSError as error:  # the new one is there all the same
                logging.getLogger("onefold").warning(
                    "%s is saved, but %s cannot be removed: %s", self.target, path, error.strerror or error
                )

    def abandon(self) -> None:
        """Remove what was written so far, as well as the system lets us: the next save removes the rest."""
        if (self.path / _LOCK).exists():  # else it is what was replaced already
            with suppress(OSError):
                self._files.remove_tree(self.path)
        self._lock.release()


def remove(path: Path, files: Files) -> None:
    """Remove a checkpoint, so that at no time half of one stands in its place."""
    hidden = _LEFT.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    name = hidden["name"] if hidden else path.name
    trash = path.with_name(f".{name}.{secrets.token_hex(8)}.trash")
    files.rename(path, trash)
    files.remove_tree(trash)


def remove_leftovers(parent: Path, files: Files) -> None:
    """Remove what processes that were killed left behind, and bring back what they were about to replace.

    What the system does not let go of stays for the next time, and the log says so.
    """
    busy = set()
    for path in list(parent.iterdir()):
        match = _LEFT.fullmatch(path.name)
        if match and path.is_dir():
            with _told(path):
                lock = Lock.take(path / _LOCK)
                if lock is None:
                    busy.add(match["name"])
                    continue
                files.remove_tree(path)
                lock.release()
    for path, target in _set_aside(parent):
        if target.name not in busy:
            with _told(path):
                if target.exists():
                    remove(path, files)
                else:
                    files.rename(path, target)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        """Another run found it too."""
    except OSError as error:
        logging.getLogger("onefold").warning("a leftover, %s, cannot be removed: %s", path, error.strerror or error)


def _set_aside(parent: Path) -> list[tuple[Path, Path]]:
    """Checkpoints that were about to be replaced, and the place of each."""
    if not parent.is_dir():
        return []
    matches = [(path, _REPLACED.fullmatch(path.name)) for path in parent.iterdir()]
    return [(path, parent / match["name"]) for path, match in matches if match]


def checkpoints(parent: Path) -> list[Found]:
    """The checkpoints in a directory whose manifests are whole, newest first."""
    return [found for found, problem in _looked_at(parent) if problem is None]


def _looked_at(parent: Path) -> Iterator[tuple[Found, str | None]]:
    if not parent.is_dir():
        return
    places = [path for path in parent.iterdir() if not path.name.startswith(".") and os.path.isdir(path)]
    places += [path for path, target in _set_aside(parent) if not target.exists()]
    found: list[tuple[Found, str | None]] = []
    for path in places:
        try:
            found.append((Found(path, read_manifest(path).saved_ns), None))
        except CheckpointError as error:
            if _may_be_one(path):
                found.append((Found(path, 0), str(error)))
    yield from sorted(found, key=lambda item: (-item[0].saved_ns, item[0].path.name))


def _may_be_one(path: Path) -> bool:
    """Whether a directory without a whole manifest is a checkpoint all the same, as far as this process may see."""
    try:
        return (path / MANIFEST).exists() or (path / SHARED).exists()
    except PermissionError:
        return True


def candidates(path: Path) -> tuple[list[Found], list[str]]:
    """The checkpoints that `path` may mean, best first, and what was passed over, with reasons.

    `path` is a checkpoint, or `DIRECTORY/latest` for the newest one in a directory (unless one has that name).

    Raises:
        CheckpointError: there is none, or the system does not let this process look for it.
    """
    with named(path, "read"):
        return _candidates(path)


def _candidates(path: Path) -> tuple[list[Found], list[str]]:
    parent = path.parent
    if path.name != LATEST or (path / MANIFEST).exists():
        if not path.exists():
            aside = _replaced(path)
            if aside.exists():
                return [_as_found(aside)], []
            near = ", ".join(sorted(found.path.name for found in checkpoints(parent))) or "none"
            raise CheckpointError(f"there is no checkpoint {path}; in {parent} there are: {near}")
        return [_as_found(path)], []
    found = list(_looked_at(parent))
    whole = [each for each, problem in found if problem is None]
    passed = [f"{each.path.name} ({problem})" for each, problem in found if problem is not None]
    if not whole:
        raise CheckpointError(f"there is no whole checkpoint in {parent}{': ' + '; '.join(passed) if passed else ''}")
    return whole, passed


def _as_found(path: Path) -> Found:
    try:
        return Found(path, read_manifest(path).saved_ns)
    except CheckpointError:  # whoever reads it says what is amiss
        return Found(path, 0)


def next_candidate(
    found: Sequence[Found], passed: Sequence[str], damaged: Mapping[Found, Damaged]
) -> tuple[Found, list[str]]:
    """The best of `candidates` that has not turned out to be damaged, and all that is passed over for it.

    Raises:
        CheckpointError: there is none left.
    """
    best = next((each for each in found if each not in damaged), None)
    # One that was replaced while it was read was not damaged, and is no more.
    over = {each: error for each, error in damaged.items() if best is None or each.path != best.path}
    every = [*passed, *(f"{each.path.name} ({error})" for each, error in over.items())]
    if best is not None:
        return best, every
    error = damaged[found[-1]]
    raise CheckpointError("; passed over: ".join([str(error), *every[:-1]])) from error


def tell_passed(did: str, path: Path, passed: Sequence[str]) -> None:
    """Put into the log what was passed over for `path`."""
    if passed:
        logging.getLogger("onefold").warning("%s %s; passed over: %s", did, path, "; ".join(passed))


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")
