"""Owns `onefold report`: what this machine has, as text."""

import typer

from onefold.report import report


def command() -> None:
    """Versions, cards, links, which kernels are native, what is missing and how to get it; for bug reports."""
    typer.echo(report())
