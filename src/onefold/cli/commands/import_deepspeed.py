"""Owns `onefold import-deepspeed`: a checkpoint of DeepSpeed's becomes one of Onefold's."""

from pathlib import Path
from typing import Annotated

import typer

from onefold.interop.imports import import_deepspeed


def command(
    directory: Annotated[Path, typer.Argument(help="What DeepSpeed's save_checkpoint was given.")],
    out: Annotated[Path, typer.Argument(help="The Onefold checkpoint to make.")],
    tag: Annotated[
        str | None, typer.Option(help="Which checkpoint; if not given, the one that `latest` names.")
    ] = None,
) -> None:
    """Turn a checkpoint that DeepSpeed wrote under ZeRO 1, 2 or 3 into one that `onefold.load` takes."""
    for what, why in import_deepspeed(directory, out, tag).items():
        typer.echo(f"left out: {what}: {why}", err=True)
