"""Owns runs of Python programs that do not import torch each by itself, which takes seconds: one process imports it,
and forks for every program. What a program prints, how it ends, and `__main__` are those of a process of its own.
"""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ran:
    """A program that has ended."""

    returncode: int
    stdout: str
    stderr: str


class Forks:
    """The process that forks, until `close`."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, program: Path | str, *words: object, cwd: Path | None = None) -> Ran:
        """Run a Python file, or a module by its name, with these arguments."""
        request = {"program": str(program), "words": [str(word) for word in words], "cwd": str(cwd or Path.cwd())}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ran(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


def _fork(request: dict) -> dict:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(_run(**request))
        _, status = os.waitpid(child, 0)
        for file in (out, err):
            file.seek(0)
        return {"returncode": os.waitstatus_to_exitcode(status), "stdout": out.read(), "stderr": err.read()}


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
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_fork(json.loads(line))), flush=True)
