"""Owns how a file that torch.save made is read without trusting it.

Invariant: nothing is ever built but what torch's own restricted unpickler knows (tensors, dtypes, plain containers),
and inert stand-ins for the few classes in `HARMLESS`. No module is imported and no code runs on the word of a file.
"""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.files import named, opened
from onefold.errors import CheckpointError


class Inert:
    """Stands in for an object: has its attributes, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        """What the real class would do with `arguments` is not done."""


HARMLESS: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "argparse.Namespace": Inert,
}
"""What DeepSpeed's files hold besides, and what the reader makes of it."""
_UNREADABLE = "{} cannot be read: {!r}. It has to be whole, and written by torch.save in its zip format"


def load_mapped(path: Path) -> dict[str, Any]:
    """The dict in a file. Tensors are mapped: their bytes are read when they are used.

    Raises:
        CheckpointError: it cannot be read, is damaged or in a form that cannot be mapped, or names a class that is not
            harmless.
    """
    _check_bytes(path)
    try:
        with torch.serialization.safe_globals([(stand_in, name) for name, stand_in in HARMLESS.items()]):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(path, error)) from error
    except Exception as error:  # a file that was made to do harm may fail anywhere
        raise CheckpointError(_UNREADABLE.format(path, error)) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__} where DeepSpeed's files hold a dict")
    return found


def _check_bytes(path: Path) -> None:
    """Compare all bytes with the checksums that torch.save wrote beside them, which torch.load does not look at.

    Raises:
        CheckpointError: a byte is not what was written.
    """
    try:
        with named(path, "read"), opened(path) as file, zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except CheckpointError:
        raise
    except Exception as error:  # a file that was made to do harm may fail anywhere
        raise CheckpointError(_UNREADABLE.format(path, error)) from error
    if damaged is not None:
        raise CheckpointError(
            f"{path} is damaged: {damaged} in it is not what was written (or was written without checksums: see "
            "torch.serialization.set_crc32_options)"
        )


def _refusal(path: Path, error: pickle.UnpicklingError) -> str:
    try:
        names = [name for name in torch.serialization.get_unsafe_globals_in_checkpoint(path) if name not in HARMLESS]
    except Exception:  # the first error is the one to tell
        names = []
    if not names:
        return f"{path} is refused: {str(error).splitlines()[0]}"
    return (
        f"{path} is refused: it holds {', '.join(names)}, and reading that would run code. Only tensors and plain "
        "values are taken; where such an object came in through client_state, save once more without it"
    )
