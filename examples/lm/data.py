"""Owns the text: the running Python's own standard library, as bytes, split into training and held-out files.

Invariant: the global batch of a step is a pure function of (seed, step). A rank only cuts its slice out of it, so
neither the plan nor the number of ranks changes what the model is trained on.
"""

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
"""A token is a byte."""
FILE_END = 0
"""The token after each file; no source file contains it."""
HELD_OUT_EVERY = 10
"""Every tenth file is never trained on."""

_SKIPPED = {
    *("site-packages", "dist-packages", "__pycache__"),  # not the standard library
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"),  # not installed everywhere
    *("encodings", "pydoc_data"),  # tables and generated text
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Text as tokens: `train` and `held_out` are uint8 [num_tokens], files in sorted order."""

    train: Tensor
    held_out: Tensor
    num_files: int


def load(folder: Path | None = None) -> Corpus:
    """Read every .py file under `folder` (the standard library of this Python when None).

    Raises:
        FileNotFoundError: there are too few files to split, as when the library is a zip archive.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    # _sysconfigdata records the machine that Python was built on.
    paths = [path for path in paths if not _SKIPPED & set(path.parts) and not path.name.startswith("_sysconfigdata")]
    if len(paths) < 2 * HELD_OUT_EVERY:
        raise FileNotFoundError(f"{folder} holds {len(paths)} Python files; this example needs {2 * HELD_OUT_EVERY}")
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for index, path in enumerate(paths):
        held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        # Decoding makes line ends alike on every system and cuts bytes that are not text.
        text = (folder / path).read_text(encoding="utf-8", errors="replace")
        parts[held_out].append(encode(text) + bytes([FILE_END]))
    train, held = (torch.frombuffer(bytearray(b"".join(parts[key])), dtype=torch.uint8) for key in (False, True))
    return Corpus(train=train, held_out=held, num_files=len(paths))


def global_batch(tokens: Tensor, size: int, context: int, *key: object) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one global batch: int64 [size, context] each, targets one token ahead.

    `key` names the batch, such as ("train", seed, step): equal keys give equal batches, on every rank and machine.
    """
    # torch's CPU generator reads 32 bits of its seed, so the key is hashed down to them.
    seed = int.from_bytes(hashlib.blake2s(repr(key).encode(), digest_size=4).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(tokens.numel() - context, (size, 1), generator=generator)
    windows = tokens[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def rank_slice(batch: Tensor, rank: int, num_ranks: int) -> Tensor:
    """The equal part of a global batch [size, context] that `rank` trains on: [size / num_ranks, context]."""
    size = batch.shape[0] // num_ranks
    return batch[rank * size : (rank + 1) * size]


def encode(text: str) -> bytes:
    """Text as tokens: its UTF-8 bytes, each level of indentation a tab, so that a small context holds more lines."""
    return re.sub(r"^(?: {4})+", lambda found: "\t" * (len(found[0]) // 4), text, flags=re.MULTILINE).encode()


def decode(tokens: Tensor) -> str:
    """Tokens [num_tokens] as text, tabs as four spaces; bytes that are not text become U+FFFD."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace").replace("\t", "    ")
