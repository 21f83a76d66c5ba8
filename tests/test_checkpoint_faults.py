"""Promise: whatever the file system does while a checkpoint is written or read, every rank gets an error that names
file and reason, and the checkpoint before it is still there and whole."""

import os
from datetime import timedelta

import pytest

from checkpoint_faults import Fault, SmallRun, after
from checks import equal
from onefold.checkpoint.files import Files
from onefold.comm.side_channel import Line
from onefold.errors import CheckpointError
from onefold.testing import RankError, RankPool

# What goes wrong, where, on which of how many ranks, and what the message has to tell beside the file.
SAVES = [
    ("enospc", "rank-00000.data", 0, 1, "No space left on device"),
    ("enospc", "rank-00001.data", 1, 2, "No space left on device"),
    ("enospc", "rank-00000.data", 0, 2, "No space left on device"),
    ("enospc", "rank-00001.sums", 1, 2, "No space left on device"),
    ("enospc", "rank-00001.json", 1, 2, "No space left on device"),
    ("enospc", "checkpoint.json", 0, 2, "No space left on device"),
    ("enospc", "manifest.json", 0, 1, "No space left on device"),
    ("enospc", "manifest.json", 0, 2, "No space left on device"),
    ("eio write", "rank-00001.data", 1, 2, "Input/output error"),
    ("eio sync", "rank-00000.data", 0, 1, "Input/output error"),
    ("eio sync", "rank-00001.data", 1, 2, "Input/output error"),
    ("eio sync", "manifest.json", 0, 2, "Input/output error"),
    ("rename", "step-3", 0, 1, "Input/output error"),
    ("rename", "step-3", 0, 2, "Input/output error"),
]


def hidden(directory):
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def told(attempt):
    """The message of the CheckpointError that it raises, or what else came of it."""
    try:
        return attempt()
    except CheckpointError as error:
        return str(error)


def save_with(rank, num_ranks, directory, kind, name, failing, asynchronous):
    """Saves step 2, then step 3 with a fault on one rank, then loads the latest, then saves step 3 in peace."""
    run = SmallRun()
    run.train(2)
    run.save(directory / "step-2")
    run.train()
    files = Fault(kind, name) if rank == failing else Files()
    message = told(lambda: run.save(directory / "step-3", files=files, asynchronous=asynchronous).wait())
    left = hidden(directory) if rank == 0 else []  # rank 0 cleans up, perhaps a moment after the others know
    other = SmallRun(seed=5)
    found = other.load(directory / "latest")
    is_right = equal(other.state(), after(found))
    run.save(directory / "step-3")
    return message, left, found, is_right, hidden(directory), other.load(directory / "latest")


@pytest.mark.parametrize(
    ("kind", "name", "failing", "num_ranks", "reason", "asynchronous"),
    [*((*case, False) for case in SAVES), *((*case, True) for case in SAVES[1::4])],
)
def test_a_save_that_fails_on_one_rank_is_told_on_all(
    ranks, tmp_path, kind, name, failing, num_ranks, reason, asynchronous
):
    for result in ranks(num_ranks).run(save_with, tmp_path, kind, name, failing, asynchronous):
        message, left, found, is_right, left_then, found_then = result
        assert name in message
        assert reason in message
        assert "was not written" in message
        assert not left
        assert found == 2
        assert is_right
        assert not left_then
        assert found_then == 3


def save_in_bits(rank, num_ranks, directory):
    run = SmallRun()
    run.train(2)
    run.save(directory / "step-2", files=Fault("short write"))
    other = SmallRun(seed=5)
    other.load(directory / "step-2", files=Fault("short read"))
    return equal(other.state(), run.state())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_system_that_takes_and_gives_less_than_asked_for_loses_nothing(ranks, tmp_path, num_ranks):
    assert all(ranks(num_ranks).run(save_in_bits, tmp_path))


REPLACEMENTS = [("rename", 0, 2), ("rename", 1, 2), ("rename", 2, 3), ("exchange", 0, 2), ("remove", 0, 3)]


def replace_with(rank, num_ranks, directory, kind, at):
    """Saves step 2 and over it step 3, with a fault at one of the two renames or beyond."""
    run = SmallRun()
    run.train(2)
    run.save(directory / "last")
    run.train()
    files = Fault(kind, "last", at) if rank == 0 else Files()
    message = told(lambda: run.save(directory / "last", files=files) and "saved")
    other = SmallRun(seed=5)
    found = [other.load(directory / "last"), other.load(directory / "latest")]
    is_right = equal(other.state(), after(found[0]))
    run.save(directory / "other")
    return message, found, is_right, hidden(directory)


# Either of the two renames, the exchange of names, and removing the old one when the new one is there.
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("kind", "at", "step"), REPLACEMENTS)
def test_replacing_a_checkpoint_never_leaves_none(ranks, tmp_path, kind, at, step, num_ranks):
    for message, found, is_right, left in ranks(num_ranks).run(replace_with, tmp_path, kind, at):
        assert message == "saved" if step == 3 else "last cannot be put in its place" in message
        assert found == [step, step]
        assert is_right
        assert not left


class Meanwhile(Files):
    """Another run saves to the same name as soon as this one's checkpoint stands there."""

    def __init__(self, save):
        self._save = save

    def rename(self, source, target):
        super().rename(source, target)
        self._save()

    def exchange(self, one, other):
        failed = super().exchange(one, other)
        self._save()
        return failed


def save_over_each_other(rank, num_ranks, directory, is_new):
    runs = [SmallRun(), SmallRun(seed=5)]
    if not is_new:
        runs[0].save(directory / "last")
    runs[0].train(2)
    runs[1].train(3)
    runs[0].save(directory / "last", files=Meanwhile(lambda: runs[1].save(directory / "last")))
    other = SmallRun(seed=7)
    return other.load(directory / "last"), equal(other.state(), runs[1].state()), sorted(os.listdir(directory))


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "replaced"])
def test_of_two_runs_that_save_to_one_name_at_once_the_later_one_stays(ranks, tmp_path, is_new):
    assert ranks(1).run(save_over_each_other, tmp_path, is_new) == [(3, True, ["last"])]


ENDS = [("end", 0, 2), ("end", 1, 2), ("end", 2, 3), ("end", 3, 3), ("end exchange", 0, 2), ("end exchange", 1, 3)]


def end_between(rank, num_ranks, directory, kind, at, next_name):
    """Saves step 1 elsewhere, step 2, and over it step 3 in a process that ends at one of the changes of names."""
    run = SmallRun()
    run.train()
    run.save(directory / "old")
    run.train()
    run.save(directory / "last")
    run.train()
    child = os.fork()
    if child == 0:
        run.save(directory / "last", files=Fault(kind, "last", at))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    other = SmallRun(seed=5)
    found = [other.load(directory / "last"), other.load(directory / "latest")]
    is_right = equal(other.state(), after(found[0]))
    run.save(directory / next_name)
    return code, found, is_right, hidden(directory), sorted(os.listdir(directory))


@pytest.mark.parametrize("next_name", ["last", "next"])
@pytest.mark.parametrize(("kind", "at", "step"), ENDS)
def test_a_process_that_ends_at_a_rename_loses_nothing(ranks, tmp_path, kind, at, step, next_name):
    code, found, is_right, left, names = ranks(1).run(end_between, tmp_path, kind, at, next_name)[0]
    assert code == 9
    assert found == [step, step]
    assert is_right
    assert not left
    assert names == sorted({"old", "last", next_name})


def end_in_a_write(rank, num_ranks, directory):
    class Ends(Files):
        def write(self, file, data, offset):
            os._exit(9)

    run = SmallRun()
    run.train(2)
    run.save(directory / "step-2")
    run.train()
    run.save(directory / "step-3", files=Ends() if rank == 1 else Files())


def load_latest(rank, num_ranks, directory):
    run = SmallRun(seed=5)
    run.load(directory / "latest")
    same_state = equal(run.state(), after(run.step))
    run.train()
    run.save(directory / "step-3")
    return run.step, same_state, hidden(directory)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_is_lost_is_an_error_on_the_others(ranks, tmp_path, num_ranks):
    with RankPool(num_ranks, grace_s=240) as pool, pytest.raises((RankError, CheckpointError)) as caught:
        pool.run(end_in_a_write, tmp_path)
    notes = "\n".join(caught.value.__notes__)
    assert "still running" not in notes
    assert {f"--- rank {rank} of {num_ranks}" for rank in range(num_ranks)} <= set(notes.splitlines())
    assert notes.count("the checkpoint 'step-3' was not written") >= num_ranks - 1
    assert "rank 1 is gone" in notes
    for step, is_right, left in ranks(2).run(load_latest, tmp_path):
        assert step == 3
        assert is_right
        assert not left


def wait_in_vain(rank, num_ranks):
    """What a rank says that is to be connected with others, one of which is gone."""
    if rank == 1:
        return ""
    with pytest.raises(CheckpointError) as caught:
        Line(rank, num_ranks, "a test", timedelta(seconds=1))
    return str(caught.value)


def test_a_rank_that_is_lost_before_the_first_save_is_an_error_on_the_others(ranks):
    told, _ = ranks(2).run(wait_in_vain)
    assert "rank 0 could not be connected with all 2 ranks within 0:00:01, to save" in told


def read_with(rank, num_ranks, directory, failing, name):
    run = SmallRun()
    run.train(2)
    run.save(directory / "step-2")
    run.train()
    run.save(directory / "step-3")
    files = Fault("eio read", os.path.join(*name)) if rank == failing else Files()
    other = SmallRun(seed=5)
    message = told(lambda: other.load(directory / "step-3", files=files))
    found = other.load(directory / "latest", files=files)
    return message, found, equal(other.state(), after(found))


@pytest.mark.parametrize(("failing", "num_ranks"), [(0, 1), (1, 2)])
def test_a_disk_that_cannot_read_is_told_on_all_ranks(ranks, tmp_path, failing, num_ranks):
    name = ("step-3", f"rank-{failing:05d}.data")
    for message, found, is_right in ranks(num_ranks).run(read_with, tmp_path, failing, name):
        assert os.path.join(*name) in message
        assert "cannot be read: Input/output error" in message
        assert found == 2
        assert is_right
