"""Owns `save`'s work: a place to write, copies to write from, and the writing, now or beside the next steps."""

import logging
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.checkpoint.bar import bar
from onefold.checkpoint.contents import Contents, merge_states
from onefold.checkpoint.copies import Copies, new_room, room_bytes
from onefold.checkpoint.directory import Workplace, is_reserved
from onefold.checkpoint.entries import Entry
from onefold.checkpoint.files import Files
from onefold.checkpoint.manifest import MANIFEST
from onefold.comm.agreement import together
from onefold.comm.local import LocalComm
from onefold.comm.side_channel import Conversation
from onefold.engine.session import Session
from onefold.errors import CheckpointError, HostMemoryError, OnefoldError
from onefold.tiers.tier import available_bytes

if TYPE_CHECKING:
    from onefold.checkpoint.storage import Part


class Saving:
    """A save that may be under way.

    Attributes:
        path: where the checkpoint will be.
        stall_s: seconds that this rank's loop was kept waiting so far: in `save`, and later until what is copied could
            be changed (in the next `optimizer.step`, say), whether or not the device still computed what was queued.
            That a forward or backward beside copies may be slower is not in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stall_s = 0.0
        self._ended: threading.Event | None = None
        self._problem: BaseException | None = None
        self._free = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ended is None or self._ended.is_set()

    def wait(self) -> None:
        """Come back when the checkpoint is there.

        Raises:
            CheckpointError: it could not be written, here or on another rank; those before it are as they were.
        """
        if self._ended is not None:
            self._ended.wait()  # a thread is not joined: interrupted, Python would take it for one that has ended
        problem, self._problem = self._problem, None  # one of those who wait hears it
        if problem is not None:
            raise problem

    def free(self) -> None:
        """What is saved is not read where it rests any more."""
        self._free.set()

    def wait_until_free(self) -> None:
        """Come back when what is saved may be changed, or the save has ended, well or not."""
        begun = time.perf_counter()
        try:
            if self._ended is not None:  # else interrupted before it began
                self._free.wait()
        finally:
            self.stall_s += time.perf_counter() - begun

    def start(self, work: Callable[[], None]) -> None:
        """Do the work on a thread of its own; here, if the system has no more threads: other ranks do theirs."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._problem = error
                logging.getLogger("onefold").error("%s", error)  # it is raised later, perhaps much later
            finally:
                self.free()
                ended.set()

        self._ended = ended = threading.Event()
        try:
            threading.Thread(target=run, name=f"onefold save {self.path.name}").start()
        except RuntimeError as error:
            logging.getLogger("onefold").warning("%s is not saved beside training: %s", self.path, error)
            run()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What `save` was asked for, beside what to save."""

    keep_last: int | None
    asynchronous: bool
    progress: bool
    files: Files

    def __post_init__(self) -> None:
        if self.keep_last is not None and (not isinstance(self.keep_last, int) or self.keep_last < 1):
            raise CheckpointError(
                f"keep_last={self.keep_last!r}: give how many checkpoints to keep, 1 or more, or None"
            )


def save(session: Session, target: Path, collect: Callable[[], Contents], wishes: Wishes) -> Saving:
    """Write what `collect` gives to `target`, now or beside the next steps; see `onefold.save`."""
    begun = time.perf_counter()
    agree = partial(together, session.comm, kind=CheckpointError, did="could not save")
    agree(partial(as_ours, session.wait_for_saves))
    session.come_to_rest("onefold.save")
    found: Contents = agree(partial(as_ours, collect))
    merge_states(session, found.shared)
    talk, saving = session.comm.conversation(), Saving(target)
    workplace: Workplace | None = agree(partial(as_ours, lambda: _workplace(session, target, wishes.files)))
    try:
        directory = Path(session.comm.exchange_objects(str(workplace.path) if workplace else None)[0])
        agree(lambda: _see(directory, session.comm.rank))
        more = _by_machine(session, _more_room(session, room_bytes(found.entries)) if wishes.asynchronous else 0)
        make = partial(_copies, session, found.entries, more) if wishes.asynchronous else _nothing
        copies: Copies | None = agree(partial(as_ours, make))
    except BaseException:
        if workplace is not None:
            workplace.abandon()
        raise
    work = _Work(target=target, directory=directory, workplace=workplace, contents=found, talk=talk, wishes=wishes)
    if copies is not None:
        contents = replace(found, entries=copies.entries)
        work = replace(work, contents=contents, prepare=partial(_copy_beside, copies, saving), release=saving.free)
        session.saves.append(saving.wait)
        session.readers.append(saving.wait_until_free)
        saving.start(work.run)
    else:
        work.run()
    saving.stall_s += time.perf_counter() - begun
    return saving


def _copies(session: Session, entries: Sequence[Entry], all_more: Mapping[str, int]) -> Copies:
    """For a save beside training: copies of all that is not read in place, of which those that cannot wait are made.

    Args:
        all_more: see `_by_machine`.
    Raises:
        CheckpointError: there is not so much memory.
    """
    here, free = platform.node(), available_bytes()
    if all_more[here] > free:
        raise CheckpointError(
            f"copies for a save beside training take {all_more[here]:,} more bytes of memory on {here}, and {free:,} "
            "are available; save with asynchronous=False, which makes none"
        )
    nbytes = room_bytes(entries)
    if _more_room(session, nbytes):
        session.room = None  # first: both together may be too much
    session.room = session.room or new_room(nbytes, session.device, -(-session.num_threads // 2))
    copies = Copies(entries, session.device, session.lanes, session.room)
    try:
        copies.make_at_once()
    except HostMemoryError as error:
        raise CheckpointError(f"{error}; or save with asynchronous=False, which makes no copies") from error
    return copies


def _more_room(session: Session, nbytes: int) -> int:
    """How much larger than the room that there is one of so many bytes is."""
    return max(nbytes - (0 if session.room is None else len(session.room.whole)), 0)


def _by_machine(session: Session, more: int) -> dict[str, int]:
    """How many more bytes of memory all ranks of each machine need, if this one needs so many."""
    needed: dict[str, int] = {}
    for machine, nbytes in session.comm.exchange_objects((platform.node(), more)):
        needed[machine] = needed.get(machine, 0) + nbytes
    return needed


def _copy_beside(copies: Copies, saving: Saving) -> None:
    copies.make_beside()
    if copies.are_all:
        saving.free()


def _nothing() -> None:
    """For contents that can be read as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What is to be done on one rank for one checkpoint, once its contents are known."""

    target: Path
    directory: Path
    """Where it grows."""
    workplace: Workplace | None
    """Rank 0's hold on that."""
    contents: Contents
    talk: Conversation
    wishes: Wishes
    prepare: Callable[[], None] = _nothing
    """Makes the contents readable."""
    release: Callable[[], None] = _nothing
    """Told once they have been read, perhaps long before they are on the disk."""
    title: str = "saving"

    def run(self) -> None:
        """Write this rank's part, hear how the others fared, and let rank 0 make a checkpoint of all parts.

        Raises:
            CheckpointError: on every rank, if any failed; nothing is left of the checkpoint then.
        """
        try:
            self._run()
        except BaseException:
            if self.workplace is not None:
                self.workplace.abandon()
            raise

    def _run(self) -> None:
        problem: BaseException | None = None
        try:
            self.prepare()
            mine: Part | str = self._write()
        except BaseException as error:  # to be raised once the others know
            mine, problem = str(error) or repr(error), error
        try:
            stories = self.talk.broadcast(self._finished(mine))
        except RuntimeError as error:
            stories = {self.talk.rank: f"rank 0 is gone, and whether the checkpoint is there is not known ({error})"}
        if problem is not None and not isinstance(problem, Exception):
            raise problem
        if stories:
            told = "; ".join(f"rank {rank}: {story}" for rank, story in sorted(stories.items()))
            what = f"the checkpoint {self.target.name!r} was not written (this is rank {self.talk.rank})"
            raise CheckpointError(f"{what}. {told}") from problem

    def _write(self) -> "Part":
        from onefold.checkpoint.writing import write_part  # half a second, the first time: not while training waits

        rank, total = self.talk.rank, sum(entry.nbytes for entry in self.contents.entries)
        left = total

        def progress(nbytes: int) -> None:
            nonlocal left
            left -= nbytes
            advance(nbytes)
            if not left:
                self.release()

        with bar(self.title, total, self.wishes.progress and rank == 0) as advance:
            return write_part(self.directory, rank, self.contents, self.wishes.files, progress)

    def _finished(self, mine: "Part | str") -> dict[int, str]:
        """What went wrong, by rank, as rank 0 sees it; nothing if the checkpoint is there."""
        try:
            parts = self.talk.gather(mine)
            stories = {rank: each for rank, each in enumerate(parts) if isinstance(each, str)}
            if self.workplace is not None and not stories:
                from onefold.checkpoint.storage import hold_together

                hold_together(self.directory, self.contents.shared, parts, self.wishes.files)
                self.workplace.commit(self.wishes.keep_last)
        except Exception as error:
            return {self.talk.rank: str(error) or repr(error)}
        return stories


def write_alone(target: Path, contents: Contents, title: str, wishes: Wishes) -> None:
    """Write to `target` what this process has all of, whatever other processes do.

    Raises:
        CheckpointError: it cannot be written, or what was to be written cannot be read; nothing is left of it.
    """
    place: Workplace = as_ours(lambda: _vacant(target, wishes.files))
    talk = LocalComm().conversation()
    work = _Work(
        target=target,
        directory=place.path,
        workplace=place,
        contents=contents,
        talk=talk,
        wishes=wishes,
        title=title,
    )
    work.run()


def as_ours(attempt: Callable[[], Any], kind: type[CheckpointError] = CheckpointError) -> Any:
    """Let whatever goes wrong be an error of ours, so that other ranks hear of it."""
    try:
        return attempt()
    except Exception as error:
        if isinstance(error, OnefoldError) and not isinstance(error, CheckpointError):
            raise
        raise (error if isinstance(error, kind) else kind(str(error) or repr(error))) from error


def _workplace(session: Session, target: Path, files: Files) -> Workplace | None:
    return None if session.comm.rank else _vacant(target, files)


def _vacant(target: Path, files: Files) -> Workplace:
    if target.is_symlink():
        raise CheckpointError(f"{target} is a symbolic link: give the path that it stands for, {target.resolve()}")
    if target.exists() and not (target / MANIFEST).exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there and is no checkpoint: give a path of its own to each checkpoint")
    if is_reserved(target.name):
        raise CheckpointError(f"{target}: saves under way have such names, and are removed by the next; give another")
    if target.parent.is_symlink() and not target.parent.exists():
        raise CheckpointError(f"{target.parent} is a link to {target.parent.readlink()}, which is not there")
    if (target.parent / MANIFEST).exists():
        raise CheckpointError(f"{target.parent} is a checkpoint: {target.name} within it would go when it is removed")
    return Workplace(target, files)


def _see(directory: Path, rank: int) -> None:
    if not directory.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see {directory}, which rank 0 made: save to a file system that all ranks share"
        )
