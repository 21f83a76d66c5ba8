"""Owns starting `onefold run` as a user does: a real process, real ranks, and a look at what is left of them."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from onefold.launch import teardown

SOURCE = Path(__file__).resolve().parents[2] / "src"
PATIENCE_S = 240.0
"""Nothing takes as long; a launcher that hangs has to fail its test, not stop the suite."""


@dataclass(slots=True)
class Launcher:
    """Starts `onefold run` in a folder. Processes it started, and theirs, carry a mark in their environment."""

    folder: Path
    mark: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def environment(self) -> dict[str, str]:
        return {**clean_environment(), "LAUNCH_TEST": self.mark, "HOME": str(self.folder)}

    def start(
        self,
        *words: object,
        inside: Callable[[list[str]], list[str]] = list,
        stdin: int = subprocess.DEVNULL,
        **environment: str,
    ) -> subprocess.Popen[str]:
        """Start `onefold WORDS`; `inside` turns the command into one that runs it somewhere else."""
        process = subprocess.Popen(
            inside([sys.executable, "-m", "onefold", *map(str, words)]),
            cwd=self.folder,
            env={**self.environment(), **environment},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Start, wait, and hand back code and output."""
        return finish(self.start("run", *words, **environment))

    def alive(self) -> list[psutil.Process]:
        """What lives of all that was started here, by whomever."""
        return [process for process in psutil.process_iter() if self._ours(process)]

    def _ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            return process.environ().get("LAUNCH_TEST") == self.mark and process.status() != psutil.STATUS_ZOMBIE
        return False

    def close(self) -> None:
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in self.started:
            process.communicate()


@contextlib.contextmanager
def launcher(folder: Path) -> Iterator[Launcher]:
    """A `Launcher` in `folder`; nothing that it started outlives it."""
    made = Launcher(folder, f"{os.getpid()}-{folder}")
    try:
        yield made
    finally:
        made.close()


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def clean_environment() -> dict[str, str]:
    """This process's environment without what a launcher or a scheduler may have put there."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "PYTHONPATH": str(SOURCE)}


def eventually(true: Callable[[], object]) -> None:
    """Wait until something is so; fails when it does not become so."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.02)


def again(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal, and once more: later than what would count as the same one."""
    process.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(teardown.AGAIN_S + 0.1)
    process.send_signal(number)
