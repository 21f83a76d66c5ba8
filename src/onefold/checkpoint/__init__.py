"""Owns `save` and `load`: what a run needs to go on, in a directory that fits any number of ranks and any plan.

[Note: Saving beside training]
Most of what is saved changes only where `Session.finish_readers` is called first: in the next `optimizer.step`, and
in whatever else writes shards, exact weights or optimizer state. So an asynchronous save returns once it knows what to
save. A thread of its own copies what rests on the device to the host, beside the next forward and backward, and writes
the files after that. Who calls `finish_readers` meanwhile waits for the copies, and not for the files. What rests on
the host is not copied: files are written from it, and he waits until it is read. What others may change at any time is
copied before `save` returns: buffers (a forward changes those of a BatchNorm), what the caller gave, and weights that
rest whole, which a forward or the script can write. Random states and all else that is no large tensor is text by then.

What is copied is let go at once, should its model be gone. Host memory for the copies is kept for the next save. The
first one finds and locks it piece by piece, and copies into each piece as it is locked, so that neither the driver nor
the copies wait for all of it. Ranks tell each other how it went over connections of their own: a script may end, fail,
or call `destroy_process_group` meanwhile, and the save is finished all the same. A save waits for the one before it.
"""

from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.checkpoint import contents, loading, saving
from onefold.checkpoint.files import Files
from onefold.engine.session import session_met
from onefold.optim.ema import EMA
from onefold.optim.optimizer import Optimizer

__all__ = ["load", "save"]

Where = str | PathLike[str]


def save(
    path: Where,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    ema: EMA | None = None,
    extra: Any = None,
    frozen: bool = True,
    keep_last: int | None = None,
    asynchronous: bool = False,
    progress: bool = True,
    files: Files | None = None,
) -> saving.Saving:
    """Write a checkpoint of a sharded model; every rank calls it, between steps.

    It holds what a run needs to go on, by the user's names and in the user's shapes, for any number of ranks and any
    plan. It appears under `path` at once, when all of it is on the disk, and replaces one that stood there.

    Args:
        path: a directory that is to be the checkpoint, on a file system that all ranks share.
        model: what `onefold.shard` returned.
        optimizer: its optimizer; None saves the weights alone.
        scheduler: a learning-rate scheduler, or several in a list: objects with `state_dict`.
        loader: this rank's data loader (torchdata's StatefulDataLoader, say); of use at the same number of ranks.
        ema: the average of the weights, to be saved with them.
        extra: what `load` shall return: numbers, strings, tensors and containers of them; rank 0's counts.
        frozen: whether weights that are not trained are saved too; without them, load with `strict=False`.
        keep_last: how many checkpoints to keep beside and including this one; older ones are removed afterwards.
        asynchronous: return at once, copy and write beside the next steps. See [Note: Saving beside training].
        progress: show a bar on a terminal (rank 0, with `rich` installed).
        files: the file operations to use.

    Returns:
        The save: `wait()` for it if it is asynchronous. The next save and the end of the program do.

    Raises:
        CheckpointError: on every rank, if any rank cannot save or write something. Older checkpoints stay as they were.
    """
    session = session_met(model, "onefold.save")
    wishes = saving.Wishes(keep_last, asynchronous, progress, Files() if files is None else files)
    rest = {"scheduler": scheduler, "loader": loader, "ema": ema, "extra": extra, "frozen": frozen}
    collect = partial(contents.collect, session, model, optimizer, **rest)
    given = contents.kinds_given(optimizer, ema, frozen=frozen)
    with torch.inference_mode(False), torch.no_grad():  # what is kept for the next save is used outside, too
        return saving.save(session, Path(path).absolute(), given, collect, wishes)


def load(
    path: Where,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    ema: EMA | None = None,
    random_states: bool = True,
    strict: bool = True,
    progress: bool = True,
    files: Files | None = None,
) -> Any:
    """Take back what `save` wrote, into a model that may be sharded over other ranks by another plan.

    Every rank calls it. Each reads what it updates, at most one parameter at a time beside it, and checks every byte.
    `DIRECTORY/latest` means the newest whole checkpoint in a directory; one that turns out to be damaged is passed
    over, with a warning in the log. One that another run replaces meanwhile gives way to its successor.

    Args:
        path: a checkpoint, or `DIRECTORY/latest`.
        model: what `onefold.shard` returned, with the parameters of the model that was saved.
        optimizer: its optimizer; None loads weights and buffers alone.
        scheduler: a learning-rate scheduler, or as many in a list as were saved.
        loader: this rank's data loader; the number of ranks has to be that of the save.
        ema: the average of the weights, to be loaded with them.
        strict: whether checkpoint and model must have the same weights, buffers and states of modules. If not, those
            that both have are loaded, others stay as they are. An optimizer has to fit all the same.
        random_states: whether random generators go on where they were. A rank that had no counterpart keeps its own.
        progress: show a bar on a terminal (rank 0, with `rich` installed).
        files: the file operations to use.

    Returns:
        The `extra` that `save` was given; tensors in it are on the host.

    Raises:
        CheckpointError: on every rank; there is no such checkpoint, it is damaged, or it does not fit. If the error
            came while tensors were read (it says so), the model holds some of its values.
    """
    session = session_met(model, "onefold.load")
    given: dict[str, Any] = {"optimizer": optimizer, "ema": ema, "scheduler": scheduler, "loader": loader}
    wishes = loading.LoadWishes(random_states, strict, progress, Files() if files is None else files)
    job = loading.Job(session=session, model=model, wishes=wishes, **given)
    with torch.inference_mode(False), torch.no_grad():
        return loading.load(Path(path).absolute(), job)
