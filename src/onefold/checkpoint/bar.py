"""Owns the progress bar of saves and loads."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

Progress = Callable[[int], None]
"""Told how many more bytes are done."""


@contextmanager
def bar(title: str, total_bytes: int, is_wanted: bool) -> Iterator[Progress]:
    """A bar on the terminal while inside; gives what is to be told how many more bytes are done."""
    if not is_wanted or not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total_bytes)
        yield lambda nbytes: shown.advance(task, nbytes)
