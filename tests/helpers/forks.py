"""Owns runs of Python programs that do not import torch each by itself, which takes seconds: one process imports it,
and forks for every program, or for every rank of one. What a program prints, how it ends, and `__main__` are those of a
process of its own; ranks have the environment that torchrun gives.
"""

import atexit
import contextlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class Ran:
    """A program that has ended."""

    returncode: int
    stdout: str
    stderr: str


def launched(num_ranks: int) -> list[dict[str, str]]:
    """What torchrun puts into the environments of ranks."""
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_RUN_ID": "forks"}
    meeting = meeting_point()
    return [meeting | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def meeting_point() -> dict[str, str]:
    """Where ranks can meet, as variables of an environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


class Forks:
    """The process that forks, until `close`. It imports Onefold, and so torch, and `modules`."""

    def __init__(self, *modules: str) -> None:
        command = [sys.executable, __file__, "onefold", *modules]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self, program: Path | str, *words: object, cwd: Path | None = None, ranks: Sequence[dict[str, str]] = ({},)
    ) -> Ran:
        """Run a Python file, or a module by its name, with these arguments; once for each of `ranks`, which say what a
        rank has in its environment beside what is there."""
        request = {"program": str(program), "words": [str(word) for word in words], "cwd": str(cwd or Path.cwd())}
        self._process.stdin.write(json.dumps([list(ranks), request]) + "\n")
        self._process.stdin.flush()
        return Ran(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


def _fork(ranks: list[dict[str, str]], request: dict) -> dict:
    """The exit code is that of the first rank that failed; what ranks print is one text, as torchrun's is."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        children = [_start(environment, request, out, err) for environment in ranks]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        for file in (out, err):
            file.seek(0)
        return {"returncode": next(filter(None, codes), 0), "stdout": out.read(), "stderr": err.read()}


def _start(environment: dict[str, str], request: dict, out: IO[str], err: IO[str]) -> int:
    child = os.fork()
    if not child:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.environ.update(environment)
        os._exit(_run(**request))
    return child


def _run(program: str, words: list[str], cwd: str) -> int:
    """In the child: run it, and tell its exit code."""
    os.chdir(cwd)
    is_file = program.endswith(".py")
    sys.argv = [program, *words]
    sys.path.insert(0, os.path.dirname(program) if is_file else cwd)
    code = 0
    try:
        if is_file:
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # as an interpreter that ends: threads first, then what was registered
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    for name in sys.argv[1:]:
        import_module(name)
    for line in sys.stdin:
        print(json.dumps(_fork(*json.loads(line))), flush=True)
