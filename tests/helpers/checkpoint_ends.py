"""Owns ranks whose scripts end, in several ways, while a save is under way: a program of its own, so that interpreters
really end. One process imports everything, and forks two ranks for each way.

What each way came to goes to standard output as JSON: exit codes by rank, and what each rank's `wait` said.
"""

import json
import logging
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import torch.distributed as dist

from checkpoint_faults import SmallRun
from onefold.checkpoint.files import Files
from onefold.errors import CheckpointError


class Held(Files):
    """Writes only once the script has done something, which `until` comes back from."""

    def __init__(self, until):
        self._until = until

    def write(self, file, data, offset):
        self._until()
        return super().write(file, data, offset)


class Script:
    """How one rank's script ends: `until` is when files may be written, `end` what it does after its last save."""

    def __init__(self, rank, pipe):
        self.rank, self.pipe, self.done = rank, pipe, threading.Event()

    def until(self):
        threading.main_thread().join()

    def end(self, saving):
        """Without having waited."""


class Destroys(Script):
    def __init__(self, rank, pipe, which=(0, 1)):
        super().__init__(rank, pipe)
        self.which = which

    def until(self):
        self.done.wait()

    def end(self, saving):
        if self.rank in self.which:
            dist.destroy_process_group()
        self.done.set()


class Fails(Script):
    def end(self, saving):
        if self.rank == 1:
            raise ValueError("the script's own")


class Killed(Script):
    """One rank is killed while it writes, once the other is about to wait for the save."""

    def __init__(self, rank, pipe, which):
        super().__init__(rank, pipe)
        self.which = which

    def until(self):
        if self.rank == self.which:
            os.read(self.pipe[0], 1)
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, saving):
        if self.rank != self.which:
            os.write(self.pipe[1], b"!")
        try:
            saving.wait()
        except CheckpointError as error:
            sys.exit(str(error))


WAYS = {
    "ends": Script,
    "destroys its group": Destroys,
    "destroys its group on rank 0": partial(Destroys, which=(0,)),
    "destroys its group on rank 1": partial(Destroys, which=(1,)),
    "fails on rank 1": Fails,
    "is killed on rank 0": partial(Killed, which=0),
    "is killed on rank 1": partial(Killed, which=1),
}


def act(directory, script):
    """The life of a rank: a save that is there, and one under way as the script ends."""
    meeting = f"file://{directory / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=script.rank, world_size=2)
    run = SmallRun()
    run.train(2)
    run.save(directory / "saves" / "step-2")
    run.train(1)
    saving = run.save(directory / "saves" / "step-3", asynchronous=True, files=Held(script.until))
    script.end(saving)


def main(directory):
    SmallRun().save(directory / "first")  # imports what ranks need, once for all
    for way in WAYS:
        (directory / way).mkdir()
        children, pipe = [], os.pipe()
        for rank in range(2):
            children.append(os.fork())
            if not children[-1]:
                logging.disable()
                sys.stdout = sys.stderr = (directory / way / f"told-{rank}").open("w", encoding="utf-8")
                return act(directory / way, WAYS[way](rank, pipe))
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        (directory / way / "codes").write_text(json.dumps(codes), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
