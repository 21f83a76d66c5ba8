"""Owns `onefold run` as a command: its signature, made from `Options`, and its exit code."""

import inspect
from dataclasses import MISSING, Field, fields
from typing import Annotated

import typer

from onefold.launch.cluster.options import Options
from onefold.launch.cluster.request import start_run

SETTINGS = {"allow_interspersed_args": False}
"""What follows the script is the script's, its options too."""


def command(**values: object) -> None:
    """Start SCRIPT on all GPUs of this machine, or on the machines of a hostfile, with torchrun.

    Everything after SCRIPT goes to it unchanged. A command line of DeepSpeed's launcher works as it is, with
    `onefold run` for `deepspeed`.
    """
    script, args = str(values.pop("script")), values.pop("args")
    words = tuple(map(str, args)) if isinstance(args, list) else ()
    raise typer.Exit(start_run(Options(**values), script, words))  # type: ignore[arg-type]  # made from its own fields


def _default(option: Field[object]) -> object:
    return option.default if option.default_factory is MISSING else option.default_factory()


def _signature() -> inspect.Signature:
    keyword = inspect.Parameter.KEYWORD_ONLY
    script = inspect.Parameter("script", keyword, annotation=Annotated[str, typer.Argument(metavar="SCRIPT")])
    words = Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...")]
    args = inspect.Parameter("args", keyword, annotation=words, default=None)
    options = [
        inspect.Parameter(option.name, keyword, annotation=option.type, default=_default(option))
        for option in fields(Options)
    ]
    return inspect.Signature([script, *options, args])


command.__signature__ = _signature()  # type: ignore[attr-defined]  # typer reads it
command.__annotations__ = {name: each.annotation for name, each in inspect.signature(command).parameters.items()}
