"""Promise: an asynchronous save holds the moment it was asked for, whatever training does meanwhile; the next update
waits for copies, and for files only where state rests on the host; saves wait for one another, and so does the end of
the program."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import checkpoint_ends
import onefold
from checkpoint_faults import Fault, Gated, Late, Small, SmallRun, after, hold_copies, opening
from checks import equal
from inside import insides
from onefold.checkpoint.codec import unpacked
from onefold.checkpoint.files import Files
from onefold.checkpoint.manifest import OWN, SHARED
from onefold.errors import CheckpointError
from plans import NAMED_PLANS

FP16 = onefold.Precision(params="fp16", loss_scale=onefold.DynamicLossScale(initial=2.0**8, window=2))
BF16 = onefold.Precision(params="bf16")
WAYS = {
    "zero_0": ("zero_0", onefold.Precision(), {}),
    "zero_1 in bf16": ("zero_1", BF16, {}),
    "zero_2 in fp16": ("zero_2", FP16, {}),
    "zero_3": ("zero_3", onefold.Precision(), {}),
    "zero_3 in bf16": ("zero_3", BF16, {}),
    "zero_3 in fp16": ("zero_3", FP16, {}),
    "offload": ("offload", onefold.Precision(), {}),
    "offload in bf16": ("offload", BF16, {}),
    "offload, delayed, in fp16": ("offload", FP16, {"delayed": True, "delay_after": 1}),
    "offload_3 in fp16": ("offload_3", FP16, {}),
}
ON_HOST = {"offload", "offload_3"}


class Lively(Small):
    """Changes more in a forward than what it returns."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return super().forward(nn.functional.dropout(self.norm(x), 0.2))


class WayRun(SmallRun):
    def __init__(self, way, seed=0):
        plan, precision, options = WAYS[way]
        torch.manual_seed(seed)
        self.model = onefold.shard(Lively(), NAMED_PLANS[plan], precision=precision)
        self.optimizer = onefold.AdamW(self.model, lr=0.01, eps=1e-4, **options)
        self.step = 0

    def backward(self):
        self.model(torch.randn(4, 6)).float().square().mean().backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1


def write_whole(model):
    """What a script may do to weights that rest whole, at any time."""
    with torch.no_grad():
        model.first.weight.mul_(2)


def save_beside(rank, num_ranks, directory, way):
    """Saves the same moment at once and beside a step that goes on meanwhile; returns what was seen."""
    run, files, note = WayRun(way), Gated([]), torch.arange(3.0)
    is_on_host, is_whole = WAYS[way][0] in ON_HOST, not NAMED_PLANS[WAYS[way][0]].params.partitioned
    for _ in range(3):
        run.backward()
        run.update()
    lane, session = hold_copies(run.model), insides(run.model)
    for name, options in (("at once", {}), ("beside", {"asynchronous": True, "files": files})):
        saving = onefold.save(directory / name, run.model, run.optimizer, extra=note, **options)
    session.readers[:] = opening(session.readers, lane.gate, *[files.gate] * is_on_host)
    note.zero_()
    if is_whole:
        write_whole(run.model)
    run.backward()
    open_before = lane.gate.is_set() or files.gate.is_set()
    run.update()  # hangs if it waits without need
    open_after = lane.gate.is_set(), files.gate.is_set()
    if not is_on_host:
        run.backward()
        run.update()
    was_done = saving.is_done and not is_on_host
    lane.gate.set()
    files.gate.set()
    saving.wait()
    return open_before, open_after, was_done


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved_beside_training_is_the_moment_it_was_asked_for(ranks, tmp_path, way, num_ranks):
    for open_before, open_after, was_done in ranks(num_ranks).run(save_beside, tmp_path, way):
        assert not open_before, "the backward pass waited for the save"
        assert open_after == (True, WAYS[way][0] in ON_HOST)
        assert not was_done
    names = sorted(path.name for path in (tmp_path / "at once").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "beside").iterdir())
    for name in names:
        one, other = ((tmp_path / which / name).read_bytes() for which in ("at once", "beside"))
        if name == SHARED:
            one, other = (
                {key: value for key, value in unpacked(text).items() if not key.startswith("saved_")}
                for text in (one, other)
            )
        if name != "manifest.json":
            assert one == other, name


def save_twice(rank, num_ranks, directory):
    """A second save while the first one is being written."""
    run, log = SmallRun(), []
    run.train(2)
    first, second = Gated(log), Gated(log)
    second.gate.set()
    run.save(directory / "first", files=first, asynchronous=True)
    run.train()
    session = insides(run.model)
    session.saves[:] = opening(session.saves, first.gate)
    run.save(directory / "second", files=second, asynchronous=True).wait()
    other, found = SmallRun(seed=5), []
    for name in ("first", "second"):
        step = other.load(directory / name)
        found.append((step, equal(other.state(), after(step))))
    return log, found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_save_waits_for_the_one_before(ranks, tmp_path, num_ranks):
    for rank, (log, found) in enumerate(ranks(num_ranks).run(save_twice, tmp_path)):
        created = [name for what, name in log if what == "create"]
        assert created[: len(created) // 2] == created[len(created) // 2 :]  # two whole saves, one after the other
        if rank == 0:
            assert [name for what, name in log if what == "rename"] == ["first", "second"]
            assert log[len(log) // 2 - 1] == ("rename", "first")
        assert found == [(2, True), (3, True)]


def save_averages(rank, num_ranks, directory, plan):
    """Saves averages, and goes on; returns whether the averages are what was saved."""
    run, files, other = SmallRun(plan), Late(), SmallRun(seed=5)
    ema, lane = onefold.EMA(run.model, 0.5), hold_copies(run.model)
    run.train(2)
    ema.update()
    with ema.applied():
        want = run.state()
        saving = onefold.save(directory / "it", run.model, asynchronous=True, files=files)
        session = insides(run.model)
        session.readers[1:] = opening(session.readers[1:], lane.gate, files.gate)
    lane.gate.set()
    files.gate.set()
    saving.wait()
    onefold.load(directory / "it", other.model)
    return equal(other.state(), want) and not equal(run.state(), want)


@pytest.mark.parametrize("plan", ["zero_3", "offload"])
def test_averages_stay_in_place_until_they_are_saved(ranks, tmp_path, plan):
    assert ranks(1).run(save_averages, tmp_path, plan) == [True]


class After(Files):
    """Writes once another save has written on this rank."""

    def __init__(self, other=None):
        self.wrote, self._other = threading.Event(), other

    def write(self, file, data, offset):
        if self._other is not None:
            self._other.wrote.wait()
        return super().write(file, data, offset)

    def sync(self, file):
        super().sync(file)
        if file.name.endswith(OWN):
            self.wrote.set()


def save_two(rank, num_ranks, directory):
    """Two models are saved at once; one rank writes them in the other order."""
    runs = [SmallRun(), SmallRun("zero_1")]
    for number, run in enumerate(runs):
        run.train(2 + number)
    first = After()
    files = [first, After(first)] if rank == 0 else [After(first), first]
    savings = [run.save(directory / str(n), asynchronous=True, files=files[n]) for n, run in enumerate(runs)]
    for saving in savings:
        saving.wait()
    other = SmallRun(seed=5)
    return [other.load(directory / str(n)) and equal(other.state(), after(2 + n)) for n in range(2)]


def test_two_models_are_saved_at_once(ranks, tmp_path):
    assert ranks(2).run(save_two, tmp_path) == [[True, True]] * 2


def save_relative(rank, num_ranks, directory):
    """Saves by a relative path, below a link, and goes elsewhere before it is written."""
    run, files, before = SmallRun(), Late(), Path.cwd()
    (directory / "real").mkdir()
    (directory / "link").symlink_to("real")
    try:
        os.chdir(directory)
        saving = run.save("link/step", asynchronous=True, files=files)
        os.chdir("/")
        files.gate.set()
        saving.wait()
        os.chdir(directory / "real")
        return run.load("latest"), sorted(path.name for path in (directory / "real").iterdir())
    finally:
        os.chdir(before)


def test_a_relative_path_stands_for_where_it_was_meant(ranks, tmp_path):
    assert ranks(1).run(save_relative, tmp_path) == [(0, ["step"])]


def load_while_saving(rank, num_ranks, directory):
    run, files = SmallRun(), Gated([])
    run.train(2)
    run.save(directory / "step", files=files, asynchronous=True)
    run.train()
    session = insides(run.model)
    session.saves[:] = opening(session.saves, files.gate)
    return run.load(directory / "latest"), equal(run.state(), after(2))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_load_waits_for_the_save_before(ranks, tmp_path, num_ranks):
    assert ranks(num_ranks).run(load_while_saving, tmp_path) == [(2, True)] * num_ranks


def hear_of_failure(rank, num_ranks, directory, failing):
    """What the next save, `wait` after it, and the save after that say of one that failed."""
    run = SmallRun()
    run.train()
    files = Fault("enospc", ".data") if rank == failing else Files()
    saving = run.save(directory / "bad", files=files, asynchronous=True)
    with pytest.raises(CheckpointError) as next_save:
        run.save(directory / "next", asynchronous=True)
    saving.wait()  # it has been told
    run.save(directory / "good", asynchronous=True).wait()
    again = run.save(directory / "bad", files=files, asynchronous=True)
    with pytest.raises(CheckpointError) as waiting:
        again.wait()
    run.save(directory / "good").wait()
    return str(next_save.value), str(waiting.value)


@pytest.mark.parametrize(("failing", "num_ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_failure_is_told_once_by_wait_or_by_the_next_save(ranks, tmp_path, failing, num_ranks):
    for messages in ranks(num_ranks).run(hear_of_failure, tmp_path, failing):
        for message in messages:
            assert "the checkpoint 'bad' was not written" in message
            assert f"rank-{failing:05d}.data" in message
            assert "No space left on device" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good"]


PROGRAM = """
import sys, threading
sys.path[:0] = {path!r}
from checkpoint_faults import Gated, Late, opening, SmallRun, hold_copies
from onefold.checkpoint.codec import unpacked
from onefold.checkpoint.files import Files
from onefold.checkpoint.manifest import OWN, SHARED

class AfterTheEnd(Files):
    def write(self, file, data, offset):
        threading.main_thread().join()
        return super().write(file, data, offset)

run = SmallRun({plan!r})
run.train(2)
lane = hold_copies(run.model)
run.save({target!r}, asynchronous=True, files=AfterTheEnd())
threading.Thread(target=lambda: (threading.main_thread().join(), lane.gate.set())).start()
print("the end")
"""


def load_it(rank, num_ranks, directory, plan):
    run = SmallRun(plan, seed=5)
    step = run.load(directory / "latest")
    return step, equal(run.state(), after(step, plan))


@pytest.mark.parametrize("plan", ["zero_3", "offload"])
def test_the_end_of_the_program_waits_for_a_save(ranks, tmp_path, plan):
    path = [str(Path(checkpoint_ends.__file__).parent), str(Path(onefold.__file__).parent.parent)]
    program = PROGRAM.format(path=path, plan=plan, target=str(tmp_path / "step-2"))
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "the end\n"), ended.stderr
    assert ranks(1).run(load_it, tmp_path, plan) == [(2, True)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ends")
    path = os.pathsep.join([str(Path(onefold.__file__).parent.parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, checkpoint_ends.__file__, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.parametrize("way", checkpoint_ends.WAYS)
def test_however_a_script_ends_a_save_under_way_is_finished_or_told_to_have_failed(ranks, ended, way):
    codes = json.loads((ended / way / "codes").read_text())
    told = [(ended / way / f"told-{rank}").read_text() for rank in range(2)]
    ((step, is_right),) = ranks(1).run(load_it, ended / way / "saves", "zero_3")
    assert is_right
    if "killed" in way:
        gone = int(way[-1])
        assert step == 2  # the one before
        assert (codes[gone], codes[1 - gone]) == (-signal.SIGKILL, 1)
        assert "'step-3' was not written" in told[1 - gone]
        assert ("rank 0 is gone" in told[1]) == (gone == 0)
    else:
        assert step == 3
        assert codes == [0, int("fails" in way)]
        assert ["the script's own" in each for each in told] == [False, "fails" in way]
    names = sorted(path.name for path in (ended / way / "saves").iterdir() if not path.name.startswith("."))
    assert names == ["step-2", "step-3"][: step - 1]
