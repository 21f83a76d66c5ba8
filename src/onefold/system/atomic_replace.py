"""Owns how something on the disk is replaced: the new one grows aside, is brought to the disk, and takes its name in
one step, once all of it is there.

A file grows beside its name (`replacing_file`). So does a directory, as `.NAME.TOKEN.partial`: one process writes it
(`replacing`), or several do (`Workplace`). Who lets it grow holds a lock in it until it has its name. So what processes
that were killed left behind is recognized by a lock that nobody holds any more, and the next replacement removes it.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL, c_char_p, c_int, c_uint, get_errno
from errno import EINVAL, ENOSYS
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_LOCK = "lock"
_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<token>[0-9a-f]{16})\.(?P<kind>partial|trash)", re.DOTALL)
_REPLACED = re.compile(r"\.(?P<name>.+)\.replaced", re.DOTALL)


class System:
    """The operating system, as far as names of directories go. Faults are injected by overriding a method."""

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def exchange(self, one: Path, other: Path) -> int:
        """Exchange two names in one step (renameat2, which Python does not offer). Returns 0, or the errno: some file
        systems cannot."""
        library = CDLL(None, use_errno=True)
        if not hasattr(library, "renameat2"):
            return ENOSYS
        call = library.renameat2
        call.argtypes, call.restype = [c_int, c_char_p, c_int, c_char_p, c_uint], c_int
        failed = call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
        return get_errno() if failed else 0

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def sync_directory(self, path: Path) -> None:
        """Come back when the names in a directory are on the disk."""
        _sync_one(path)


class Lock:
    """A file that is locked while this process writes into its directory, or removes it. The system lets go of it when
    the process ends, however it ends.

    Raises:
        BlockingIOError: somebody, perhaps on another machine, holds it.
        FileNotFoundError: there is no such directory, or it has just been removed.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._file.fileno()).st_nlink:
                raise FileNotFoundError(f"{path} was removed")
        except OSError:
            self._file.close()
            raise

    def release(self) -> None:
        self._file.close()


class Workplace:
    """Where a directory grows, until it takes the name of `target` or is abandoned.

    Attributes:
        path: the directory to write into.
    Raises:
        OSError: the system refuses.
    """

    def __init__(self, target: Path, system: System) -> None:
        self.target = target
        self._system = system
        while True:
            self.path = _hidden(target.name, target.parent, "partial")
            self.path.mkdir()
            # Somebody who cleans up may take it for a leftover before it is locked: then, another.
            with suppress(BlockingIOError, FileNotFoundError):
                self._lock = Lock(self.path / _LOCK)
                return

    def commit(self) -> None:
        """Give it the name of `target`, in one step; it is on the disk then, and a directory that had the name is
        removed.

        Where the file system cannot exchange two names (some network file systems), the old directory is set aside in
        between: a process killed between the two renames leaves it whole under another name (see `set_aside`).

        Raises:
            OSError: the file system refuses. `target` is as it was, or, should it refuse twice, set aside.
        """
        replaced = replaced_name(self.target)
        if self.target.exists() and replaced.exists():
            remove(replaced, self._system)
        self._put_in_place(replaced)
        # Where two processes replace one directory, the other's may stand there by now, and both get here.
        (self.target / _LOCK).unlink(missing_ok=True)
        self._lock.release()
        self._system.sync_directory(self.target.parent)
        for path in (self.path, replaced):  # what was replaced has one of these names now
            with told_if_stuck(f"{self.target} is there, but {path}"):
                remove(path, self._system)

    def _put_in_place(self, replaced: Path) -> None:
        if not self.target.exists():
            self._system.rename(self.path, self.target)
            return
        failure = self._system.exchange(self.path, self.target)
        if failure in (EINVAL, ENOSYS):
            self._system.rename(self.target, replaced)
            try:
                self._system.rename(self.path, self.target)
            except OSError:
                with suppress(OSError):  # the first failure is the one to tell
                    self._system.rename(replaced, self.target)
                raise
        elif failure:
            raise OSError(failure, os.strerror(failure), str(self.target))

    def abandon(self) -> None:
        """Remove what was written so far, as well as the system lets us: the next replacement removes the rest."""
        if (self.path / _LOCK).exists():  # else it is what was replaced already
            with suppress(OSError):
                self._system.remove_tree(self.path)
        self._lock.release()


def is_reserved(name: str) -> bool:
    """Whether a name is one that half-written and replaced directories have: one made under it would not last."""
    return any(pattern.fullmatch(name) for pattern in (_LEFT, _REPLACED))


def replaced_name(target: Path) -> Path:
    """What a directory is called that was set aside, and whose place is still empty."""
    return target.with_name(f".{target.name}.replaced")


def _hidden(name: str, parent: Path, kind: str) -> Path:
    return parent / f".{name}.{secrets.token_hex(8)}.{kind}"


def remove(path: Path, system: System) -> None:
    """Remove a directory, so that at no time half of one stands in its place."""
    hidden = _LEFT.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    trash = _hidden(hidden["name"] if hidden else path.name, path.parent, "trash")
    system.rename(path, trash)
    system.remove_tree(trash)


def remove_leftovers(parent: Path, system: System, only: str | None = None) -> None:
    """Remove what processes that were killed left in a directory, and bring back what they were about to replace.

    What the system does not let go of stays for the next time, and the log says so.

    Args:
        only: the name that they were to replace; None is any.
    """
    busy = set()
    for path in list(parent.iterdir()):
        match = _LEFT.fullmatch(path.name)
        if match and only in (None, match["name"]) and path.is_dir():
            with told_if_stuck(f"a leftover, {path},"):
                try:
                    lock = Lock(path / _LOCK)
                except BlockingIOError:
                    busy.add(match["name"])
                    continue
                system.remove_tree(path)
                lock.release()
    for path, target in set_aside(parent):
        if only in (None, target.name) and target.name not in busy:
            with told_if_stuck(f"a leftover, {path},"):
                if target.exists():
                    remove(path, system)
                else:
                    system.rename(path, target)


@contextmanager
def told_if_stuck(what: str) -> Iterator[None]:
    """Let the log say that something could not be removed; that somebody else removed it is no news."""
    try:
        yield
    except FileNotFoundError:
        """Another process found it too, or it never was."""
    except OSError as error:
        logging.getLogger("onefold").warning("%s cannot be removed: %s", what, error.strerror or error)


def set_aside(parent: Path) -> list[tuple[Path, Path]]:
    """Directories that were about to be replaced, and the place of each."""
    if not parent.is_dir():
        return []
    matches = [(path, _REPLACED.fullmatch(path.name)) for path in parent.iterdir()]
    return [(path, parent / match["name"]) for path, match in matches if match]


@contextmanager
def replacing(target: Path, is_replaced: Callable[[str], bool]) -> Iterator[Path]:
    """Inside, write the new directory into the path given; at the end it is on disk and is `target`.

    If the body raises, what was written is removed and `target` is as it was.

    Args:
        target: a directory that is or is not there; its parents are made.
        is_replaced: whether an entry of the old directory, by name, is of the kind that the new one brings; others are
            carried over, unless the new one has the name too.
    Raises:
        OSError: the file system refuses, `target` is a file, or holds one called `lock`, or this process works in it.
    """
    target, system = target.resolve(), System()
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; give the name of a directory")
    if Path.cwd().is_relative_to(target):
        raise OSError(f"{target} is around the directory that this process works in; give another")
    if (target / _LOCK).exists() and (target / _LOCK).stat().st_size:  # ours are empty
        raise FileExistsError(f"{target / _LOCK} has the name of a file that a replacement needs; give it another")
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent, system, target.name)
    workplace = Workplace(target, system)
    try:
        yield workplace.path
        if target.exists():
            workplace.path.chmod(target.stat().st_mode)
            _carry(target, workplace.path, is_replaced)
        _sync(workplace.path)
        workplace.commit()
    except BaseException:
        workplace.abandon()
        raise


@contextmanager
def replacing_file(target: Path) -> Iterator[Path]:
    """Inside, write the new file at the path given; at the end it is on disk and is `target`.

    If the body raises, what was written is removed and `target` is as it was.

    Raises:
        OSError: the file system refuses.
    """
    fresh = target.with_name(f".{target.name}.partial")
    try:
        yield fresh
        _sync_one(fresh)
        fresh.replace(target)
        _sync_one(target.parent)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


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
