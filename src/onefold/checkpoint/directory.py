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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onefold.checkpoint.files import Files, named
from onefold.checkpoint.manifest import MANIFEST, SHARED, read_manifest
from onefold.errors import CheckpointError
from onefold.system.atomic_replace import (
    Workplace,
    is_reserved,
    remove,
    remove_leftovers,
    replaced_name,
    set_aside,
    told_if_stuck,
)

LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint by its place, and when it was saved: another may take its place."""

    path: Path
    saved_ns: int
    """0 if its manifest does not tell."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoint to read."""

    found: Found
    passed: Sequence[str]
    """What was passed over for it, with reasons."""


class Damaged(CheckpointError):
    """The checkpoint is not whole; an older one may be."""


@contextmanager
def damage() -> Iterator[None]:
    """Inside, what is amiss is the checkpoint's fault: an older one may do."""
    try:
        yield
    except CheckpointError as error:
        raise Damaged(str(error)) from error


def workplace_for(target: Path, files: Files) -> Workplace:
    """Where a checkpoint grows, until `commit` lets it appear as `target`.

    Raises:
        CheckpointError: no checkpoint can be there, or the system refuses.
    """
    with named(target, "written"):
        if target.is_symlink():
            raise CheckpointError(f"{target} is a symbolic link: give the path that it stands for, {target.resolve()}")
        if target.exists() and not (target / MANIFEST).exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"{target} is there and is no checkpoint: give a path of its own to each checkpoint")
        if is_reserved(target.name):
            raise CheckpointError(
                f"{target}: saves under way have such names, and are removed by the next; give another"
            )
        if target.parent.is_symlink() and not target.parent.exists():
            raise CheckpointError(f"{target.parent} is a link to {target.parent.readlink()}, which is not there")
        if (target.parent / MANIFEST).exists():
            raise CheckpointError(
                f"{target.parent} is a checkpoint: {target.name} within it would go when it is removed"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent, files)
        return Workplace(target, files)


def commit(workplace: Workplace, keep_last: int | None, files: Files) -> None:
    """Let a checkpoint appear, and keep so many, with this one, of those beside it; None is all.

    Raises:
        CheckpointError: the system refuses to let it appear.
    """
    target = workplace.target
    with named(target, "put in its place"):
        workplace.commit()
    if keep_last is not None:
        others = [found.path for found in checkpoints(target.parent) if found.path.resolve() != target.resolve()]
        for path in others[keep_last - 1 :]:
            if not path.is_symlink():
                with told_if_stuck(f"{target} is saved, but {path}"):
                    remove(path, files)


def checkpoints(parent: Path) -> list[Found]:
    """The checkpoints in a directory whose manifests are whole, newest first."""
    return [found for found, problem in _looked_at(parent) if problem is None]


def _looked_at(parent: Path) -> Iterator[tuple[Found, str | None]]:
    if not parent.is_dir():
        return
    places = [path for path in parent.iterdir() if not path.name.startswith(".") and os.path.isdir(path)]
    places += [path for path, target in set_aside(parent) if not target.exists()]
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
        parent = path.parent
        if path.name != LATEST or (path / MANIFEST).exists():
            if not path.exists():
                if replaced_name(path).exists():
                    return [_as_found(replaced_name(path))], []
                near = ", ".join(sorted(found.path.name for found in checkpoints(parent))) or "none"
                raise CheckpointError(f"there is no checkpoint {path}; in {parent} there are: {near}")
            return [_as_found(path)], []
        found = list(_looked_at(parent))
        whole = [each for each, problem in found if problem is None]
        passed = [f"{each.path.name} ({problem})" for each, problem in found if problem is not None]
        if not whole:
            raise CheckpointError(
                f"there is no whole checkpoint in {parent}{': ' + '; '.join(passed) if passed else ''}"
            )
        return whole, passed


def _as_found(path: Path) -> Found:
    try:
        return Found(path, read_manifest(path).saved_ns)
    except CheckpointError:  # whoever reads it says what is amiss
        return Found(path, 0)


def choose_checkpoint(path: Path, damaged: Mapping[Found, Damaged]) -> Choice:
    """The best checkpoint that `path` may mean, but for those that turned out to be damaged.

    Raises:
        CheckpointError: there is none left, or see `candidates`.
    """
    found, passed = candidates(path)
    best = next((each for each in found if each not in damaged), None)
    # One that was replaced while it was read was not damaged, and is no more.
    over = {each: error for each, error in damaged.items() if best is None or each.path != best.path}
    every = [*passed, *(f"{each.path.name} ({error})" for each, error in over.items())]
    if best is not None:
        return Choice(best, every)
    error = damaged[found[-1]]
    raise CheckpointError("; passed over: ".join([str(error), *every[:-1]])) from error


def tell_passed(did: str, choice: Choice) -> None:
    """Put into the log what was passed over for it."""
    if choice.passed:
        passed = "; ".join(choice.passed)
        logging.getLogger("onefold").warning("%s %s; passed over: %s", did, choice.found.path, passed)
