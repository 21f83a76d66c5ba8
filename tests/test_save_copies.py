"""Promise: while a save copies beside training, whatever would change what it copies waits for that, and nothing else
does; a copy that fails is told where the save is waited for; what was copied is let go.
"""

import gc
import mmap
import os
import re
import threading
import warnings
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch
from weakref import ref

import pytest
import torch

import onefold
from checkpoint_faults import Gated, SmallRun, after, hold_copies, opening
from checks import equal
from inside import insides
from onefold.checkpoint.copies import Copies
from onefold.checkpoint.entries import Reading, whole_entry
from onefold.checkpoint.files import Files
from onefold.errors import CheckpointError, HostMemoryError
from onefold.memory.pinned import PIECE_BYTES, LockedRoom, Pages, PlainRoom
from onefold.memory.streams import HostLanes, Ticket


def looked_at(run, ema):
    """Uses the model in all ways that change nothing of it."""
    run.model(torch.ones(2, 6)).sum().backward()
    run.state()
    run.optimizer.state_dict()
    run.optimizer.zero_grad()
    run.model.eval()
    with torch.no_grad():
        run.model(torch.ones(2, 6))
    run.model.train()


def load_whole(run, ema, directory):
    with onefold.gathered(run.model):
        states = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.load_state_dict({name: tensor + 1 for name, tensor in states.items()})


def write_gathered(run, ema, directory):
    with onefold.gathered(run.model, write=True), torch.no_grad():
        run.model.first.weight.zero_()


def show_averages(run, ema, directory):
    with ema.applied():
        run.model(torch.ones(2, 6))


CHANGES = {
    "step": lambda run, ema, directory: run.train(),
    "gathered": write_gathered,
    "load_state_dict": load_whole,
    "load": lambda run, ema, directory: run.load(directory / "before"),
    "load_pretrained": lambda run, ema, directory: onefold.load_pretrained(run.model, directory / "weights"),
    "the optimizer's load_state_dict": lambda run, ema, directory: run.optimizer.load_state_dict(
        run.optimizer.state_dict()
    ),
    "applied": show_averages,
    "update of averages": lambda run, ema, directory: ema.update(),
}


def change_beside(rank, num_ranks, directory, change):
    """Changes the model while a save of it copies; returns whether the copies were waited for, by what changes nothing
    and by the change, whether the stall was counted, and whether the moment of the save is what was saved."""
    run = SmallRun()
    ema = onefold.EMA(run.model, 0.5)
    run.train(1)
    run.save(directory / "before")
    onefold.export(run.model, directory / "weights")
    run.train(1)
    ema.update()
    want = run.state()
    lane, session = hold_copies(run.model), insides(run.model)
    saving = run.save(directory / "it", asynchronous=True, ema=ema)
    session.readers[:] = opening(session.readers, lane.gate)
    looked_at(run, ema)
    open_before, stalled = lane.gate.is_set(), saving.stall_s
    CHANGES[change](run, ema, directory)
    open_after, stalled = lane.gate.is_set(), saving.stall_s > stalled
    lane.gate.set()
    saving.wait()
    other = SmallRun(seed=5)
    average = onefold.EMA(other.model, 0.5)
    other.load(directory / "it", ema=average)
    found = other.state()
    same_averages = all(
        torch.equal(mine, theirs)
        for (_, mine), (_, theirs) in zip(average.averages, averages_after(2).averages, strict=True)
    )
    return open_before, open_after, stalled, equal(found, want | {"seen": found["seen"]}) and same_averages


def averages_after(steps):
    run = SmallRun()
    ema = onefold.EMA(run.model, 0.5)
    run.train(steps)
    ema.update()
    return ema


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_change_the_state_waits_until_it_is_copied(ranks, tmp_path, change):
    assert ranks(1).run(change_beside, tmp_path, change) == [(False, True, True, True)]


def fail_to_copy(rank, num_ranks, directory, failing, plan):
    """What `wait`, or else the next save, says of a copy that failed on one rank; training goes on meanwhile."""
    run, said = SmallRun(plan), []
    run.train()
    home = insides(run.model).lanes.down
    for told in ("wait", "save"):
        lane = hold_copies(run.model, OSError("the link broke") if rank == failing else None)
        saving = run.save(directory / "bad", asynchronous=True)
        session = insides(run.model)
        session.readers[:] = opening(session.readers, lane.gate)
        run.train()
        session.lanes.down = home
        with pytest.raises(CheckpointError) as caught:
            saving.wait() if told == "wait" else run.save(directory / "next")
        said.append(str(caught.value))
        run.train()
    run.save(directory / "good", asynchronous=True).wait()
    return said, equal(run.state(), after(5, plan))


@pytest.mark.parametrize("plan", ["zero_1", "zero_3"])
@pytest.mark.parametrize(("failing", "num_ranks"), [(0, 1), (1, 2)])
def test_a_copy_that_fails_is_told_on_every_rank_and_training_goes_on(ranks, tmp_path, plan, failing, num_ranks):
    for said, is_right in ranks(num_ranks).run(fail_to_copy, tmp_path, failing, plan):
        assert is_right
        for message in said:
            assert "the checkpoint 'bad' was not written" in message
            assert f"rank {failing}: the link broke" in message
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def interrupt_a_wait(rank, num_ranks, directory):
    """Ctrl-C comes while a step waits for copies; returns whether the next step, and the next save, wait again."""
    run, files = SmallRun(), Gated([])
    run.train(2)
    lane, session = hold_copies(run.model), insides(run.model)
    saving = run.save(directory / "it", asynchronous=True, files=files)
    seen = []
    for waits, gate, go_on in (
        (session.readers, lane.gate, run.train),
        (session.saves, files.gate, partial(run.save, directory / "next")),
    ):
        before = list(waits)
        waits[:] = [interrupt]
        with pytest.raises(KeyboardInterrupt):
            go_on()
        seen.append((waits == [interrupt], gate.is_set()))
        waits[:] = opening(before, gate)
        go_on()
        seen.append(gate.is_set())
    saving.wait()
    other = SmallRun(seed=5)
    other.load(directory / "it")
    want = after(2)
    return seen, equal({**other.state(), "seen": want["seen"]}, want)


def interrupt():
    raise KeyboardInterrupt


def test_a_wait_that_was_interrupted_is_still_to_be_waited_for(ranks, tmp_path):
    assert ranks(1).run(interrupt_a_wait, tmp_path) == [([(True, False), True] * 2, True)]


def save_too_much(rank, num_ranks, directory):
    """Saves what no machine has memory to copy, then less."""
    run, other = SmallRun(), SmallRun(seed=5)
    with pytest.raises(CheckpointError) as caught:
        onefold.save(directory / "it", run.model, extra=torch.zeros(1).expand(2**50), asynchronous=True)
    run.save(directory / "it", asynchronous=True).wait()
    return str(caught.value), other.load(directory / "it"), list(map(str, directory.iterdir()))


def test_copies_for_which_there_is_no_memory_are_refused_before_they_are_made(ranks, tmp_path):
    for said, step, names in ranks(2).run(save_too_much, tmp_path):
        assert re.search(r"take [\d,]{20,} more bytes .* asynchronous=False", said)
        assert (step, names) == (0, [str(tmp_path / "it")])


class SlowDisk(Files):
    """Takes what is written at once, and brings it to the disk only once `gate` is open."""

    def __init__(self):
        self.gate = threading.Event()

    def sync(self, file):
        self.gate.wait()
        super().sync(file)


def train_before_the_disk(rank, num_ranks, directory, plan):
    """Trains while nothing is on the disk yet; hangs if a step waits for that."""
    run, files, other = SmallRun(plan), SlowDisk(), SmallRun(seed=5)
    run.train(2)
    saving = run.save(directory / "it", asynchronous=True, files=files)
    run.train(2)
    was_done = saving.is_done
    files.gate.set()
    saving.wait()
    return was_done, other.load(directory / "it"), equal(other.state(), after(2, plan))


@pytest.mark.parametrize("plan", ["zero_1", "offload", "offload_3"])
def test_training_does_not_wait_for_the_disk(ranks, tmp_path, plan):
    assert ranks(2).run(train_before_the_disk, tmp_path, plan) == [(False, 2, True)] * 2


def save_without_a_thread(rank, num_ranks, directory, which):
    run, start = SmallRun(), threading.Thread.start

    def refuse(thread):
        if rank == which and thread.name.startswith("onefold save"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with patch.object(threading.Thread, "start", refuse):
        saving = run.save(directory / "it", asynchronous=True)
    run.train()
    saving.wait()
    other = SmallRun(seed=5)
    return other.load(directory / "it"), equal(other.state(), after(0))


@pytest.mark.parametrize(("which", "num_ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_rank_that_gets_no_thread_saves_before_it_goes_on(ranks, tmp_path, which, num_ranks):
    assert ranks(num_ranks).run(save_without_a_thread, tmp_path, which) == [(0, True)] * num_ranks


def drop_while_writing(rank, num_ranks, directory):
    """Whether shards are there once they are copied, with nobody but a save under way to hold them."""
    run, files = SmallRun(), Gated([])
    lane, session = hold_copies(run.model), insides(run.model)
    shards = [ref(flat.weight) for unit in session.runtime.units for flat in unit.flats]
    saving = run.save(directory / "it", asynchronous=True, files=files)
    del run, session
    gc.collect()
    before = [shard() is not None for shard in shards]
    lane.gate.set()
    saving.wait_until_free()
    after_all = [shard() is not None for shard in shards]
    files.gate.set()
    saving.wait()
    return before, after_all


def test_what_was_copied_is_let_go_while_it_is_written(ranks, tmp_path):
    ((before, after_all),) = ranks(1).run(drop_while_writing, tmp_path)
    assert all(before)
    assert not any(after_all)


def test_a_strided_tensor_is_read_in_parts_without_being_copied_as_a_whole():
    row = torch.arange(2.0**20)
    entry = whole_entry("it", row.expand(2**20, 2**20))  # no memory holds a copy of it
    start = 5 * 2**20 - 3
    assert torch.equal(entry.read(start, start + 2**20 + 6), torch.cat([row[-3:], row, row[:3]]))


class Noted(PlainRoom):
    """Puts down how far it is reached."""

    def __init__(self, nbytes):
        super().__init__(nbytes)
        self.reached = []

    def reach(self, stop):
        self.reached.append(stop)


def test_large_tensors_are_copied_in_pieces_of_which_none_goes_across_the_room_s():
    tensors = [torch.arange(3, dtype=torch.int8), torch.arange(PIECE_BYTES // 2, dtype=torch.int64)]
    entries = [whole_entry(str(number), tensor) for number, tensor in enumerate(tensors)]
    room = Noted(64 + tensors[1].nbytes)
    copies = Copies(entries, torch.device("cpu"), HostLanes(), room)
    copies.make_at_once()
    assert copies.are_all
    assert room.reached == [3, *(PIECE_BYTES * number for number in range(1, 5)), len(room.whole)]
    for entry, tensor in zip(copies.entries, tensors, strict=True):
        assert entry.reading == Reading.IN_PLACE
        assert torch.equal(entry.read(0, tensor.numel()), tensor)


class LateLane:
    """Copies only when somebody waits for it on the host, as a busy stream may."""

    def run(self, launch, *, after=(), keep=()):
        return Ticket(lambda: None, keep, finish_on_host=launch)


class Refusing(PlainRoom):
    """Has too little memory in the end."""

    def reach(self, stop):
        if stop == len(self.whole):
            raise HostMemoryError("there is no more")


def test_copies_are_made_only_when_they_are_there_and_one_that_fails_leaves_none_under_way():
    tensors, lanes = [torch.full((16,), float(number)) for number in range(20)], HostLanes()
    lanes.down = LateLane()
    entries = [whole_entry(str(number), tensor) for number, tensor in enumerate(tensors)]
    for kind in (PlainRoom, Refusing):
        room = kind(64 * len(tensors))
        room.whole.fill_(255)
        copies = Copies(entries, torch.device("cpu"), lanes, room)
        with pytest.raises(HostMemoryError, match="there is no more") if kind is Refusing else nullcontext():
            copies.make_at_once()
        made = room.whole.view(torch.float32).view(len(tensors), 16)
        assert torch.equal(made[:-1], torch.stack(tensors[:-1]))
        assert torch.equal(made[-1], tensors[-1]) == (kind is PlainRoom)


def test_room_is_locked_once_in_whole_pieces_as_far_as_it_is_reached():
    locked, nbytes = [], 5 * PIECE_BYTES + 100
    with patch.object(Pages, "lock", lambda self, start, stop: locked.append((start, stop))):  # there is no driver here
        room = LockedRoom(nbytes, num_threads=2)
        room.reach(1)
        assert locked == [(0, 4 * PIECE_BYTES)]
        for _ in range(2):
            room.reach(nbytes)
    assert locked == [(0, 4 * PIECE_BYTES), (4 * PIECE_BYTES, nbytes)]
    assert not room.whole.any()


def test_what_is_forked_has_nothing_of_the_room_and_loses_nothing_with_it():
    nbytes = 2**30  # of which little is used: there are few gaps between addresses that are so large
    pages = Pages(nbytes)
    place = pages.whole[:1].fill_(1).data_ptr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where there are threads: it needs none
        forked = os.fork()
    if not forked:
        code = 1
        try:
            mine = [mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(8)]
            if any(torch.frombuffer(each, dtype=torch.uint8).data_ptr() == place for each in mine):  # it was free
                del pages
                for each in mine:
                    each.write(b"x")  # none of them has gone with it
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert pages.whole[0] == 1
