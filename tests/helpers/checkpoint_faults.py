"""Owns the faults that tests put into the files of a checkpoint, and a run small enough to save a hundred times."""

import errno
import os
import shutil
import threading
from pathlib import Path

import torch
from torch import nn

import onefold
from inside import insides
from onefold.checkpoint.files import Files
from onefold.memory.streams import HostLane
from plans import NAMED_PLANS


class Fault(Files):
    """The operating system, until call number `at` of one operation on a file whose name matches.

    Args:
        kind: what goes wrong: "short write", "short read", "enospc", "eio write", "eio sync", "eio read", "remove",
            "exchange" or "end exchange" (or rename); "rename" or "end" where names cannot be exchanged.
        name: a part of the names that it happens to.
        at: which of the calls it happens to, from 0 on, and all later ones.
    """

    def __init__(self, kind, name="", at=0):
        self.kind, self.name, self.left = kind, name, at

    def _strikes(self, kind, name):
        if self.kind != kind or self.name not in os.fspath(name):
            return False
        self.left -= 1
        return self.left < 0

    def write(self, file, data, offset):
        if self._strikes("short write", file.name):
            return super().write(file, data[: max(1, len(data) // 3)], offset)
        if self._strikes("enospc", file.name):
            super().write(file, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._strikes("eio write", file.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(file, data, offset)

    def sync(self, file):
        if self._strikes("eio sync", file.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(file)

    def read_into(self, file, data):
        if self._strikes("eio read", file.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_into(file, data[:1000] if self.kind == "short read" else data)

    def rename(self, source, target):
        if self._strikes("rename", target):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._strikes("end", target) or self._strikes("end exchange", target):
            os._exit(9)
        super().rename(source, target)

    def exchange(self, one, other):
        if self.kind in ("rename", "end"):
            return errno.EINVAL
        if self._strikes("end exchange", other):
            os._exit(9)
        return errno.EIO if self._strikes("exchange", other) else super().exchange(one, other)

    def remove_tree(self, path):
        if self._strikes("remove", path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().remove_tree(path)


class HeldLane(HostLane):
    """Copies that are made beside the loop start once `gate` is open; then they fail, if there is a `problem`."""

    def __init__(self, problem=None):
        self.gate, self._problem, self._home = threading.Event(), problem, threading.get_ident()

    def run(self, launch, **options):
        if threading.get_ident() != self._home:
            self.gate.wait()
            if self._problem is not None:
                raise self._problem
        return super().run(launch, **options)


def hold_copies(model, problem=None):
    """Let copies that saves of `model` make beside the loop wait; returns the lane with their gate."""
    lane = HeldLane(problem)
    insides(model).lanes.down = lane
    return lane


class Small(nn.Module):
    """A frozen weight, a buffer, and two units."""

    def __init__(self, width=6):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.still = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return self.second(torch.tanh(self.first(x)))


class SmallRun:
    """One rank's run; what it holds after a step depends on the step alone."""

    def __init__(self, plan="zero_3", width=6, seed=0):
        torch.manual_seed(seed)
        self.model = onefold.shard(Small(width), NAMED_PLANS[plan])
        self.optimizer = onefold.AdamW(self.model, lr=0.01)
        self.step = 0

    def train(self, steps=1):
        for _ in range(steps):
            data = torch.randn(4, 6, generator=torch.Generator().manual_seed(self.step))
            self.model(data).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def state(self):
        with onefold.gathered(self.model):
            found = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        return found | {"seen": self.model.seen.clone()}

    def save(self, path, **options):
        extra = {"step": self.step, "tensor": torch.arange(5.0) + self.step}
        return onefold.save(path, self.model, self.optimizer, extra=extra, **options)

    def load(self, path, **options):
        extra = onefold.load(path, self.model, self.optimizer, **options)
        assert torch.equal(extra["tensor"], torch.arange(5.0) + extra["step"])
        self.step = extra["step"]
        return self.step


def after(steps, plan="zero_3"):
    """The state after some steps: what a checkpoint of them has to give."""
    run = SmallRun(plan)
    run.train(steps)
    return run.state()


# --- what happens to files


def flip(place):
    def damage(data):
        at = int(place * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return damage


def instead(make):
    def replace_file(path):
        path.unlink()
        make(path)

    return replace_file


INSTEAD = {
    "missing": Path.unlink,
    "a directory": instead(Path.mkdir),
    "a pipe": instead(os.mkfifo),
    "a link to itself": instead(lambda path: path.symlink_to(path.name)),
}
WAYS = {
    **INSTEAD,
    "first bit": flip(0.0),
    "middle bit": flip(0.5),
    "last bit": flip(1.0),
    "truncated": lambda data: data[:-1],
    "emptied": lambda data: b"",
    "grown": lambda data: data + b"\0",
    "of the one before": "step-2",
}


def save_both(rank, num_ranks, directory):
    """Saves steps 2 and 3."""
    run = SmallRun()
    for step in (2, 3):
        run.train(step - run.step)
        torch.rand(1)
        run.save(directory / f"step-{step}")


def harm(directory, name, way):
    path = directory / "step-3" / name
    if way in INSTEAD:
        INSTEAD[way](path)
    elif way == "of the one before":
        shutil.copy(directory / "step-2" / name, path)
    else:
        path.write_bytes(WAYS[way](path.read_bytes()))


# --- files and waits that are held


class Gated(Files):
    """Writes only once `gate` is open. Puts down, in order, what is created and renamed."""

    def __init__(self, log):
        self.gate, self._log = threading.Event(), log

    def create(self, path):
        self._log.append(("create", path.name))
        return super().create(path)

    def write(self, file, data, offset):
        self.gate.wait()
        return super().write(file, data, offset)

    def rename(self, source, target):
        super().rename(source, target)
        self._log.append(("rename", target.name))


def opening(waits, *gates):
    """The same waits, each of which opens the gates first; whoever does not call them finds them closed."""

    def opened(wait):
        return lambda: ([gate.set() for gate in gates], wait())

    return [opened(wait) for wait in waits]


class Late(Files):
    """Begins to read what it writes only once `gate` is open."""

    def __init__(self):
        self.gate = threading.Event()

    def create(self, path):
        self.gate.wait()
        return super().create(path)
