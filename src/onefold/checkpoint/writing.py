"""Owns what `save` and `load` share of torch.distributed.checkpoint: one rank's part is written by it, and its errors
become ours. Importing it takes half a second, which an asynchronous save spends beside training."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from onefold.checkpoint.contents import Contents
from onefold.checkpoint.files import Files
from onefold.checkpoint.plans import EntrySavePlanner
from onefold.checkpoint.storage import Part, Progress, Writer
from onefold.errors import CheckpointError, OnefoldError


def write_part(directory: Path, rank: int, contents: Contents, files: Files, progress: Progress) -> Part:
    """Write one rank's part into the directory, and say what was written.

    Raises:
        CheckpointError: it cannot be written.
    """
    writer = Writer(directory, rank, contents.own, files, progress)
    try:
        with alone_is_fine():
            # Each rank for itself: were it to use torch's groups, destroy_process_group would end a save under way.
            dcp_save({}, storage_writer=writer, planner=EntrySavePlanner(contents.entries), no_dist=True)
    except CheckpointException as error:
        found = [told[0] for told in error.failures.values()]
        raise CheckpointError("; ".join(str(each) or repr(each) for each in found)) from error
    return writer.parts[0]


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
