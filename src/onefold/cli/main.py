"""Owns the command line: `onefold COMMAND ...`, also as `python -m onefold`.

A command is a file in `commands/` with a function `command`; the file's name is the command's, the function's docstring
its help, and a dict `SETTINGS`, if there is one, click's settings for it. Nothing else names it: a new command is a new
file.
"""

import importlib
import pkgutil
import sys

import typer

from onefold.cli import commands
from onefold.errors import OnefoldError


def app() -> typer.Typer:
    """The command line with every command in `commands/`."""
    made = typer.Typer(
        name="onefold",
        help="Train PyTorch models that do not fit: every byte of training state is held once.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,  # a traceback is Python's own, to be pasted into a bug report
        rich_markup_mode=None,
    )
    made.callback()(lambda: None)  # with one command only, its name has to be given as well
    for name in sorted(module.name for module in pkgutil.iter_modules(commands.__path__)):
        module = importlib.import_module(f"{commands.__name__}.{name}")
        made.command(name.replace("_", "-"), context_settings=getattr(module, "SETTINGS", {}))(module.command)
    return made


def main() -> None:
    """Run the command line of this process. What is wrong with a command is one line on stderr, and exit code 2."""
    try:
        app()()
    except OnefoldError as error:
        print(f"onefold: error: {error}", file=sys.stderr)
        sys.exit(2)
