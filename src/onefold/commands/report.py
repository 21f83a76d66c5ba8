"""Owns `onefold report`: what this machine has, or what a DeepSpeed configuration becomes, as text."""

from pathlib import Path
from typing import Annotated

import typer

from onefold.errors import ConfigError
from onefold.report import report


def command(
    config: Annotated[
        Path | None, typer.Option(help="A DeepSpeed configuration: say what each of its keys becomes.")
    ] = None,
) -> None:
    """Versions, cards, links, which kernels are native, what is missing and how to get it; for bug reports.

    With --config, the exit code is 1 where the configuration cannot be used.
    """
    if config is None:
        typer.echo(report())
        return
    from onefold import deepspeed  # needs the extra "deepspeed"

    typer.echo(deepspeed.report(config))
    try:
        refused = bool(deepspeed.examine(config).problems)
    except ConfigError:  # no such file, or no JSON; the report says so
        refused = True
    if refused:
        raise typer.Exit(1)
