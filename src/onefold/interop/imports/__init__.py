"""The room of imports: the ways from other libraries' checkpoints to Onefold's.

Owns what other libraries' files mean. A library has a file here that reads them, and a command in `cli.commands`.
Imports `checkpoint` and `files`.
Words: a *row* is parameters that share a partition; an *extent* is the part of a parameter in one rank's partition.
"""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onefold.checkpoint.files import Files

__all__ = ["import_deepspeed"]


def import_deepspeed(
    directory: str | PathLike[str],
    out: str | PathLike[str],
    tag: str | None = None,
    *,
    progress: bool = True,
    files: "Files | None" = None,
) -> dict[str, str]:
    """Turn a checkpoint that DeepSpeed wrote under ZeRO 1, 2 or 3, at any number of ranks, into one for `onefold.load`.

    It holds the exact master weights, optimizer state, steps, hyper-parameters of each group, loss scale, frozen
    weights, buffers, and the scheduler. The `extra` that `load` returns is {"client_state": ..., "deepspeed": numbers
    of steps, the configuration, ...}. One process does it, without DeepSpeed: it maps the files and reads one parameter
    at a time. No code of the checkpoint runs.

    Args:
        directory: what `save_checkpoint` was given, or the directory of one tag within.
        out: the directory that is to be the Onefold checkpoint; an Onefold checkpoint that is there is replaced.
        tag: which of the checkpoints in `directory`; None means the one that its file `latest` names.
        progress: show a bar on a terminal (with `rich` installed).
        files: the file operations to use.

    Returns:
        What was left out, by name, with the reason.

    Raises:
        CheckpointError: there is no such checkpoint, it is not whole, it holds objects that are not data, or it was
            written under model parallelism. `out` is as it was.
    """
    from onefold.checkpoint.files import Files
    from onefold.checkpoint.saving import Wishes, write_alone
    from onefold.interop.imports.deepspeed import find_checkpoint, importing, read_checkpoint
    from onefold.interop.imports.to_contents import to_contents

    where = find_checkpoint(Path(directory).absolute(), tag)
    with importing(where):
        contents, left_out = to_contents(read_checkpoint(where), where.name)
    wishes = Wishes(keep_last=None, asynchronous=False, progress=progress, files=Files() if files is None else files)
    write_alone(Path(out).absolute(), contents, f"importing {where.name}", wishes)
    return left_out
