"""Owns the replacement of a directory: a new one is written beside it, and takes its name only when it is whole.

Files of the old directory that the new one does not mean to replace (a tokenizer, say) are carried over. What a killed
process leaves beside the target is one directory of a known name, and the next replacement removes it.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL, c_char_p, c_int, c_uint, get_errno
from errno import EINVAL, ENOSYS
from pathlib import Path
from typing import Protocol

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replacing(target: Path, is_replaced: Callable[[str], bool]) -> Iterator[Path]:
    """Inside, write the new directory into the path given; at the end it is on disk and is `target`.

    If the body raises, what was written is removed and `target` is as it was.

    Args:
        target: a directory that is or is not there; its parents are made.
        is_replaced: whether an entry of the old directory, by name, is of the kind that the new one brings; others are
            carried over, unless the new one has the name too.
    Raises:
        OSError: the file system refuses, `target` is a file, or this process works in it.
    """
    target = target.resolve()
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; give the name of a directory")
    if Path.cwd().is_relative_to(target):
        raise OSError(f"{target} is around the directory that this process works in; give another")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh, aside = target.with_name(f".{target.name}.unfinished"), target.with_name(f".{target.name}.old")
    if aside.exists() and not target.exists():  # a process was killed between the renames
        aside.rename(target)
    for left in (fresh, aside):
        if left.exists():
            shutil.rmtree(left)
    fresh.mkdir()
    try:
        yield fresh
        if target.exists():
            fresh.chmod(target.stat().st_mode)
            _carry(target, fresh, is_replaced)
        _sync(fresh)
        put_in_place(fresh, target, aside, _System())
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    _sync_one(target.parent)
    if fresh.exists():  # now the old one
        shutil.rmtree(fresh)


def _carry(old: Path, fresh: Path, is_replaced: Callable[[str], bool]) -> None:
    """Let `fresh` have the other files of `old` too, without copying them."""
    for entry in old.iterdir():
        new = fresh / entry.name
        if is_replaced(entry.name) or new.exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new, symlinks=True, copy_function=_link)
        else:
            _link(entry, new)


def _link(source: "Path | str", new: "Path | str") -> None:
    os.link(source, new, follow_symlinks=False)


def _sync(directory: Path) -> None:
    """Wait until every file and name below `directory` is on disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                _sync_one(path)
        _sync_one(Path(folder))


def _sync_one(path: Path) -> None:
    """Wait until a directory's names, or a file's contents, are on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class System(Protocol):
    """What a change of names needs."""

    def rename(self, source: Path, target: Path) -> None: ...

    def exchange(self, one: Path, other: Path) -> int:
        """Exchange two names in one step. Returns 0, or the errno."""
        ...


def put_in_place(fresh: Path, target: Path, aside: Path, system: System) -> None:
    """Give `fresh` the name of `target`, in one step; a directory that had it gets the name of `fresh`.

    Where the file system cannot exchange two names (some network file systems), the old directory is set aside in
    between: a process killed between the two renames leaves it whole as `aside`, which must not be there.

    Raises:
        OSError: the file system refuses. `target` is as it was, or, should it refuse twice, is `aside`.
    """
    if not target.exists():
        system.rename(fresh, target)
        return
    failure = system.exchange(fresh, target)
    if failure in (EINVAL, ENOSYS):
        system.rename(target, aside)
        try:
            system.rename(fresh, target)
        except OSError:
            with suppress(OSError):  # the first failure is the one to tell
                system.rename(aside, target)
            raise
        with suppress(OSError):  # it is in nobody's way: who replaces next removes it
            system.rename(aside, fresh)
    elif failure:
        raise OSError(failure, os.strerror(failure), str(target))


class _System:
    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def exchange(self, one: Path, other: Path) -> int:
        return exchange(one, other)


def exchange(one: Path, other: Path) -> int:
    """Exchange two names in one step (renameat2, which Python does not offer). Returns 0, or the errno."""
    library = CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return ENOSYS
    call = library.renameat2
    call.argtypes, call.restype = [c_int, c_char_p, c_int, c_char_p, c_uint], c_int
    failed = call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return get_errno() if failed else 0
