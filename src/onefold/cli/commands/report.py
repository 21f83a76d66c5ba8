"""Owns `onefold report`: what this machine has, or what a DeepSpeed configuration becomes, as text."""

from pathlib import Path
from typing import Annotated

import typer

from onefold.cli.report import machine_report


def command(
    config: Annotated[
        Path | None, typer.Option(help="A DeepSpeed configuration: say what each of its keys becomes.")
    ] = None,
) -> None:
    """Versions, cards, links, which kernels are native, what is missing and how to get it; for bug reports.

    With --config, the exit code is 1 where the configuration cannot be used.
    """
    if config is None:
        typer.echo(machine_report())
        return
    from onefold.deepspeed.report import judged  # needs the extra "deepspeed"

    text, is_right = judged(config)
    typer.echo(text)
    if not is_right:
        raise typer.Exit(1)
