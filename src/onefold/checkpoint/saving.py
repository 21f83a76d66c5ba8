"""Owns `save`'s work: a place to write, copies to write from, and the writing, now or beside the next steps."""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from onefold.agree import together
from onefold.checkpoint.bar import Progress, bar
from onefold.checkpoint.contents import Contents, merge_states
from onefold.checkpoint.copies import copied, room_for
from onefold.checkpoint.directory import Workplace
from onefold.checkpoint.entries import Entry
from onefold.checkpoint.files import Files
from onefold.checkpoint.manifest import MANIFEST
from onefold.checkpoint.plans import EntrySavePlanner
from onefold.checkpoint.storage import Writer
from onefold.errors import CheckpointError, OnefoldError
from onefold.session import Session


class Saving:
    """A save that may be under way.

    Attributes:
        path: where the checkpoint will be.
        stall_s: seconds that `save` kept the loop waiting.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stall_s = 0.0
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        """Come back when it has ended, well or not."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Come back when the checkpoint is there.

        Raises:
            CheckpointError: it could not be written, here or on another rank; those before it are as they were.
        """
        self.join()
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def start(self, work: Callable[[], None]) -> None:
        """Do the work on a thread of its own."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._problem = error
                logging.getLogger("onefold").error("%s", error)  # it is raised later, perhaps much later

        self._thread = threading.Thread(target=run, name=f"onefold save {self.path.name}")
        self._thread.start()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What `save` was asked for, beside what to save."""

    keep_last: int | None
    asynchronous: bool
    progress: bool
    files: Files


def save(session: Session, target: Path, contents: Callable[[], Contents], wishes: Wishes) -> Saving:
    """Write what `contents` gives to `target`, now or beside the next steps; see `onefold.save`."""
    begun = time.perf_counter()
    agree = partial(together, session.comm, kind=CheckpointError, did="could not save")
    agree(partial(as_ours, session.wait_for_saves))
    session.runtime.settle()
    session.runtime.catch_up()
    found: Contents = agree(partial(as_ours, contents))
    merge_states(session, found.shared)
    group, saving = session.comm.side_group(), Saving(target)
    workplace: Workplace | None = agree(partial(as_ours, lambda: _workplace(session, target, wishes.files)))
    try:
        directory = Path(session.comm.exchange_objects(str(workplace.path) if workplace else None)[0])
        agree(lambda: _see(directory, session.comm.rank))
        entries = (
            agree(partial(as_ours, lambda: _copy(session, found.entries))) if wishes.asynchronous else found.entries
        )
    except BaseException:
        if workplace is not None:
            workplace.abandon()
        raise
    seal = partial(workplace.commit, wishes.keep_last) if workplace else _nothing

    def write() -> None:
        try:
            _write(session, directory, replace(found, entries=entries), seal, group, wishes)
        except BaseException as error:
            if workplace is not None:
                workplace.abandon()
            told = f"the checkpoint {target.name!r} was not written"
            raise failure(error, told, session.comm.rank) from error

    if wishes.asynchronous:
        saving.start(write)
        session.saves.append(saving.wait)
        if any(entry.is_still for entry in entries):
            session.readers.append(saving.join)
    else:
        write()
    saving.stall_s = time.perf_counter() - begun
    return saving


def _write(
    session: Session,
    directory: Path,
    contents: Contents,
    seal: Callable[[], None],
    group: Any,
    wishes: Wishes,
) -> None:
    rank = session.comm.rank
    with bar("saving", _nbytes(contents), wishes.progress and rank == 0) as advance, alone_is_fine():
        writer = _writer(directory, rank, contents, seal, wishes.files, advance)
        dcp_save({}, storage_writer=writer, planner=EntrySavePlanner(contents.entries), process_group=group)


def write_alone(target: Path, contents: Contents, title: str, wishes: Wishes) -> None:
    """Write to `target` what this process has all of, whatever other processes do.

    Raises:
        CheckpointError: it cannot be written, or what was to be written cannot be read; nothing is left of it.
    """
    workplace: Workplace = as_ours(lambda: _vacant(target, wishes.files))
    try:
        with bar(title, _nbytes(contents), wishes.progress) as advance, alone_is_fine():
            seal = partial(workplace.commit, wishes.keep_last)
            writer = _writer(workplace.path, 0, contents, seal, wishes.files, advance)
            dcp_save({}, storage_writer=writer, planner=EntrySavePlanner(contents.entries), no_dist=True)
    except BaseException as error:
        workplace.abandon()
        raise failure(error, f"the checkpoint {target.name!r} was not written", 0) from error


def _nbytes(contents: Contents) -> int:
    return sum(entry.nbytes for entry in contents.entries)


def _writer(
    directory: Path, rank: int, contents: Contents, seal: Callable[[], None], files: Files, progress: Progress
) -> Writer:
    return Writer(directory, rank, shared=contents.shared, own=contents.own, seal=seal, files=files, progress=progress)


def _nothing() -> None:
    """Only rank 0 seals a checkpoint."""


@contextmanager
def alone_is_fine() -> Iterator[None]:
    """torch.distributed.checkpoint warns one rank without a process group that it is alone, which is no surprise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is .*uninitialized", UserWarning)
        yield


def failure(error: BaseException, what: str, rank: int) -> BaseException:
    """What a rank should raise for what torch.distributed.checkpoint raised."""
    if isinstance(error, CheckpointException):
        stories = [f"rank {at}: {problem[0]}" for at, problem in sorted(error.failures.items())]
        return CheckpointError(f"{what} (this is rank {rank}). {'; '.join(stories)}")
    if isinstance(error, Exception) and not isinstance(error, OnefoldError):
        return CheckpointError(f"{what} (this is rank {rank}): {error}")
    return error


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
    return Workplace(target, files)


def _copy(session: Session, entries: Sequence[Entry]) -> list[Entry]:
    session.room = room_for(entries, session.device, session.room, len(session.cores))
    return copied(entries, session.device, session.room)


def _see(directory: Path, rank: int) -> None:
    if not directory.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see {directory}, which rank 0 made: save to a file system that all ranks share"
        )
