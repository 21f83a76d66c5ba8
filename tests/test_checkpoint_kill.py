"""Promise: killed at any instant while it saves, a run finds its newest whole checkpoint again, equal to what was
saved, and nothing that was left half done stays for ever. One that is interrupted while it waits for a save loses
nothing of that."""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from checkpoint_faults import Late, SmallRun, after
from checks import equal
from onefold.checkpoint.storage import Reader

SEED = 20


def train_and_save(directory, told, asynchronous):
    """Goes on from the newest checkpoint and saves after every step, until it is killed.

    Writes the number of each step whose checkpoint is there into the pipe `told`, 4 bytes each.
    """
    run = SmallRun()
    if any(not path.name.startswith(".") for path in directory.iterdir()):
        run.load(directory / "latest")
    os.write(told, run.step.to_bytes(4))
    while True:
        run.train()
        name = "last" if run.step // 2 % 2 else f"step-{run.step}"  # every other one replaces one
        saving = run.save(directory / name, keep_last=3, asynchronous=asynchronous)
        if asynchronous:
            run.train()
            saving.wait()
            os.write(told, (run.step - 1).to_bytes(4))
        else:
            os.write(told, run.step.to_bytes(4))


def started(directory, asynchronous):
    """A process that goes on with the run in `directory`: its id, and the pipe it tells its steps through.

    Returns when it is about to train; the step that it goes on from is the first 4 bytes told, and they are read.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train_and_save(directory, writes, asynchronous)
        finally:
            os._exit(1)
    os.close(writes)
    return child, reads, os.read(reads, 4)


def kill(child, reads):
    """Kills the process; the last step that it had told, which is nothing if it told none since its start."""
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WTERMSIG(status) == signal.SIGKILL, f"it ended by itself: {status}"
    told = b""
    while more := os.read(reads, 4096):
        told = more[-4:]
    os.close(reads)
    return told


def killed_after(seconds, directory, asynchronous):
    """The last step that a process told before it was killed; it had so many seconds from its start of training on."""
    child, reads, first = started(directory, asynchronous)
    if first:
        time.sleep(seconds)
    return int.from_bytes(kill(child, reads) or first)


def seconds_of_a_turn(directory, asynchronous):
    """How long a fresh process takes from its start of training on until the first checkpoint of its own is there."""
    directory.mkdir()
    child, reads, _ = started(directory, asynchronous)
    begun = time.perf_counter()
    os.read(reads, 4)
    seconds = time.perf_counter() - begun
    kill(child, reads)
    return seconds


def kill_again_and_again(rank, num_ranks, directory, kills, asynchronous):
    # About half of the processes save a first step before they are killed, so the run goes on, and half are hit in it.
    span = 2 * seconds_of_a_turn(directory / "timed", asynchronous)
    draw, wrong, leftovers = random.Random(SEED), [], 0
    place = directory / "saves"
    place.mkdir()
    reference, other = SmallRun(), SmallRun(seed=5)
    states = {0: reference.state()}
    for number in range(kills):
        told = killed_after(draw.uniform(0, span), place, asynchronous)
        leftovers += any(path.name.startswith(".") for path in place.iterdir())
        if told == 0 and not any(path.name.startswith(("last", "step")) for path in place.iterdir()):
            continue
        found = other.load(place / "latest")
        while reference.step < found:
            reference.train()
            states[reference.step] = reference.state()
        if found < told:
            wrong.append(f"kill {number}: found step {found}, and {told} was there")
        if not equal(other.state(), states[found]):
            wrong.append(f"kill {number}: step {found} is not what was saved")
    other.save(place / "end")
    for path in place.iterdir():
        Reader(path).verify()
    return wrong, leftovers, other.step, sorted(path.name for path in place.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "beside"])
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_kills_while_saving_lose_nothing_and_leave_nothing(ranks, tmp_path, kills, asynchronous):
    print(f"seed {SEED}")
    results = ranks(1).run(kill_again_and_again, tmp_path, kills, asynchronous, timeout_s=300 + 10 * kills)
    wrong, leftovers, steps, hidden = results[0]
    assert not wrong, "\n".join(wrong)
    assert leftovers, "no kill hit a save: the promise was not tried"
    assert steps > 0
    assert not hidden


def interrupt_when_waiting(main, ready, taken):
    """Interrupts the thread `main` as soon as it waits for another one: again until that is taken, for a signal that
    comes just before the system holds a thread up wakes nobody."""
    ready.wait()
    is_waiting = False
    while not is_waiting:
        code = sys._current_frames()[main].f_code
        is_waiting = Path(code.co_filename).name == "threading.py" and "wait" in code.co_name
    while not taken.wait(0.02):
        signal.pthread_kill(main, signal.SIGINT)


def interrupt_once(number, frame):
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def interrupt(rank, num_ranks, directory, which):
    """Interrupts what waits for a save; returns whether that was taken for done then, and the checkpoint."""
    run, files, ready, taken = SmallRun("offload"), Late(), threading.Event(), threading.Event()
    run.train(2)
    saving = run.save(directory / "it", asynchronous=True, files=files)
    waits = {"wait": saving.wait, "step": run.train, "load": lambda: run.load(directory / "it")}
    interrupting = threading.Thread(target=interrupt_when_waiting, args=(threading.get_ident(), ready, taken))
    interrupting.start()
    before = signal.signal(signal.SIGINT, interrupt_once)
    try:
        ready.set()
        with pytest.raises(KeyboardInterrupt):
            waits[which]()
    finally:
        taken.set()
        interrupting.join()
        signal.signal(signal.SIGINT, before)
    was_done = saving.is_done
    files.gate.set()
    saving.wait()
    return was_done, run.load(directory / "it"), equal(run.state(), after(2, "offload"))


@pytest.mark.parametrize("which", ["wait", "step", "load"])
def test_a_save_outlives_the_interruption_of_who_waits_for_it(ranks, tmp_path, which):
    assert ranks(1).run(interrupt, tmp_path, which) == [(False, 2, True)]
