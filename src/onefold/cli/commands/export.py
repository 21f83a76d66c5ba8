"""Owns `onefold export`: a checkpoint as files that Hugging Face loads."""

from pathlib import Path
from typing import Annotated

import typer

from onefold.interop.huggingface.export import export


def command(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or DIRECTORY/latest for the newest in a directory.")
    ],
    out: Annotated[Path, typer.Argument(help="The directory to write; one that is there is replaced at the end.")],
    dtype: Annotated[
        str | None, typer.Option(help="fp32 (exact), bf16 or fp16; what the model computed in, if left out.")
    ] = None,
    max_file_bytes: Annotated[int, typer.Option(help="Bytes of tensors in one file.")] = 5 * 10**9,
) -> None:
    """Write a checkpoint's weights as safetensors, which from_pretrained loads. One process, no GPU, little memory."""
    export(checkpoint, out, dtype=dtype, max_file_bytes=max_file_bytes)
    typer.echo(f"wrote {out}")
