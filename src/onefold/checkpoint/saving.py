"""Owns `save`'s work: what ranks agree on before, copies to write from, and the writing, now or beside the next steps.

All ranks meet, tell each other once what they are about to do, and tell rank 0 how it went. What goes wrong on a rank
travels in the same messages, and every rank raises.
"""

import logging
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from onefold.checkpoint.agreeing import Opening, all_or_none, attempt, conversation, opening
from onefold.checkpoint.bar import bar
from onefold.checkpoint.contents import Contents
from onefold.checkpoint.copies import Copies, new_room, room_bytes
from onefold.checkpoint.directory import commit, workplace_for
from onefold.checkpoint.entries import Entry
from onefold.checkpoint.files import Files
from onefold.checkpoint.storage import Part, hold_together, write_part
from onefold.comm.local import LocalComm
from onefold.comm.side_channel import Conversation
from onefold.engine.session import Session
from onefold.errors import CheckpointError, HostMemoryError
from onefold.system.atomic_replace import Workplace
from onefold.tiers.tier import available_bytes


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What one rank tells the others before they save together."""

    machine: str
    needed: int
    """Bytes of memory for copies, beside what this rank has for them already."""
    free: int
    """Bytes of memory that the machine has."""
    directory: Path | None
    """Where the checkpoint grows, on rank 0."""
    opening: Opening


def save(
    session: Session, target: Path, given: Mapping[str, bool], collect: Callable[[], Contents], wishes: Wishes
) -> Saving:
    """Write what `collect` gives to `target`, now or beside the next steps; see `onefold.save`."""
    begun = time.perf_counter()
    comm, workplace = session.comm, None
    session.come_to_rest("onefold.save")  # ranks may have to do that together: before one of them can fail

    def prepare() -> tuple[Contents, _Offer]:
        nonlocal workplace
        session.wait_for_saves()
        contents = collect()
        workplace = None if comm.rank else workplace_for(target, wishes.files)
        return contents, _Offer(
            machine=platform.node(),
            needed=_more_room(session, contents) if wishes.asynchronous else 0,
            free=available_bytes(),
            directory=None if workplace is None else workplace.path,
            opening=opening(),
        )

    try:
        contents, offers = all_or_none(comm, prepare, given, "could not save")
        _check_memory(offers)
        talk = conversation(comm, offers[0].opening)
    except BaseException:
        if workplace is not None:
            workplace.abandon()
        raise
    saving = Saving(target)
    work = _Work(target, offers[0].directory or target, workplace, contents, talk, wishes)
    if wishes.asynchronous:
        _start(session, saving, work)
    else:
        work.run()
    saving.stall_s += time.perf_counter() - begun
    return saving


def _check_memory(offers: Sequence[_Offer]) -> None:
    """Whether each machine has the memory that its ranks need for copies: the same answer on every rank.

    Raises:
        CheckpointError: one has not.
    """
    for machine in dict.fromkeys(offer.machine for offer in offers):
        here = [offer for offer in offers if offer.machine == machine]
        needed, free = sum(offer.needed for offer in here), min(offer.free for offer in here)
        if needed > free:
            raise CheckpointError(
                f"copies for a save beside training take {needed:,} more bytes of memory on {machine}, and {free:,} "
                "are available; save with asynchronous=False, which makes none"
            )


def _start(session: Session, saving: Saving, work: "_Work") -> None:
    """Save beside training. A copy that fails is told where the save is waited for, like all that goes wrong later."""
    copies, problem = attempt(partial(_copies, session, work.contents.entries))
    if problem is not None:
        work = replace(work, prepare=partial(_fail, problem))
    else:
        contents = replace(work.contents, entries=copies.entries)
        work = replace(work, contents=contents, prepare=partial(_copy_beside, copies, saving), release=saving.free)
    session.saves.append(saving.wait)
    session.readers.append(saving.wait_until_free)
    saving.start(work.run)
    if problem is not None and not isinstance(problem, Exception):
        raise problem


def _copies(session: Session, entries: Sequence[Entry]) -> Copies:
    """Copies of all that is not read in place, of which those that cannot wait are made."""
    nbytes = room_bytes(entries)
    if session.room is not None and len(session.room.whole) < nbytes:
        session.room = None  # first: both together may be too much
    session.room = session.room or new_room(nbytes, session.device, -(-session.num_threads // 2))
    copies = Copies(entries, session.device, session.lanes, session.room)
    try:
        copies.make_at_once()
    except HostMemoryError as error:
        raise CheckpointError(f"{error}; or save with asynchronous=False, which makes no copies") from error
    return copies


def _more_room(session: Session, contents: Contents) -> int:
    """How much larger than the room that there is one for copies of the contents is."""
    return max(room_bytes(contents.entries) - (0 if session.room is None else len(session.room.whole)), 0)


def _copy_beside(copies: Copies, saving: Saving) -> None:
    copies.make_beside()
    if copies.are_all:
        saving.free()


def _fail(problem: BaseException) -> NoReturn:
    raise problem


def _nothing() -> None:
    """For contents that can be read as they are."""


@dataclass(frozen=True, slots=True)
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
    title: str = "saving"
    prepare: Callable[[], None] = _nothing
    """Makes the contents readable."""
    release: Callable[[], None] = _nothing
    """Told once they have been read, perhaps long before they are on the disk."""

    def run(self) -> None:
        """Write this rank's part, hear how the others fared, and let rank 0 make a checkpoint of all parts.

        Raises:
            CheckpointError: on every rank, if any failed; nothing is left of the checkpoint then.
        """
        try:
            part, problem = attempt(self._write)
            try:
                stories = self.talk.broadcast(self._finished(part or str(problem) or repr(problem)))
            except RuntimeError as error:
                stories = {
                    self.talk.rank: f"rank 0 is gone, and whether the checkpoint is there is not known ({error})"
                }
            if problem is not None and not isinstance(problem, Exception):
                raise problem
            if stories:
                told = "; ".join(f"rank {rank}: {story}" for rank, story in sorted(stories.items()))
                what = f"the checkpoint {self.target.name!r} was not written (this is rank {self.talk.rank})"
                raise CheckpointError(f"{what}. {told}") from problem
        except BaseException:
            if self.workplace is not None:
                self.workplace.abandon()
            raise

    def _write(self) -> Part:
        self.prepare()
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{self.directory}, which rank 0 made, is not there: save to a file system that all ranks share"
            )
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

    def _finished(self, mine: Part | str) -> dict[int, str]:
        """What went wrong, by rank, as rank 0 sees it; nothing if the checkpoint is there."""
        try:
            parts = self.talk.gather(mine)
            stories = {rank: each for rank, each in enumerate(parts) if isinstance(each, str)}
            if self.workplace is not None and not stories:
                hold_together(self.directory, self.contents.shared, parts, self.wishes.files)
                commit(self.workplace, self.wishes.keep_last, self.wishes.files)
        except Exception as error:
            return {self.talk.rank: str(error) or repr(error)}
        return stories


def write_alone(target: Path, contents: Contents, title: str, wishes: Wishes) -> None:
    """Write to `target` what this process has all of, whatever other processes do.

    Raises:
        CheckpointError: it cannot be written, or what was to be written cannot be read; nothing is left of it.
    """
    workplace = workplace_for(target, wishes.files)
    _Work(target, workplace.path, workplace, contents, conversation(LocalComm(), opening()), wishes, title).run()
