"""Promise: under every plan, ranks exchange three messages for a save, two of them in the loop where it goes on beside
training, and three for a load; and with so few, what goes wrong on one rank is raised on all."""

import threading
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import pytest

import onefold
from checkpoint_faults import Fault, SmallRun, after
from checks import equal
from onefold.checkpoint import directory as places
from onefold.checkpoint.files import Files
from onefold.comm.comm import GlooComm
from onefold.comm.side_channel import Conversation, Line
from onefold.errors import CheckpointError
from onefold.plan.table import NAMED_PLANS, Tier

MET, TOLD, ENDED = "begin_exchange", "exchange_objects", ["gather", "broadcast"]
every_plan = pytest.mark.parametrize(
    "plan", [name for name, plan in NAMED_PLANS.items() if Tier.DISK not in plan.tiers]
)


class Messages(ExitStack):
    """Inside, puts down the messages of this thread, in order: everything but a model's own tensors."""

    def __init__(self):
        super().__init__()
        self.sent, self._thread = [], threading.get_ident()

    def __enter__(self):
        super().__enter__()
        for owner, names in ((GlooComm, (MET, TOLD)), (Conversation, ENDED), (Line, ["__init__"])):
            for name in names:
                self.enter_context(patch.object(owner, name, self._noting(name, getattr(owner, name))))
        return self

    def _noting(self, name, method):
        def noted(*args, **options):
            if threading.get_ident() == self._thread:
                self.sent.append(name)
            return method(*args, **options)

        return noted


def messages(rank, num_ranks, plan, directory):
    """Those of the first save, of a later one, of one beside training, and of a load."""
    run, found = SmallRun(plan), []
    run.train()
    for attempt in (
        partial(run.save, directory / "first"),
        partial(run.save, directory / "now"),
        partial(run.save, directory / "beside", asynchronous=True),
        partial(run.load, directory / "now"),
    ):
        with Messages() as noted:
            saving = attempt()
        found.append(noted.sent)
        if len(found) == 3:
            saving.wait()
    return found


@every_plan
def test_saves_and_loads_take_three_messages(ranks, tmp_path, plan):
    for first, now, beside, loading in ranks(2).run(messages, plan, tmp_path):
        assert first == [MET, TOLD, "__init__", *ENDED]
        assert now == [MET, TOLD, *ENDED]
        assert beside == [MET, TOLD]
        assert loading == [MET, TOLD, TOLD]


class Place:
    """A data loader, as far as a checkpoint cares, which fails when it is asked."""

    def __init__(self, fails_to=""):
        self._fails_to = fails_to

    def state_dict(self):
        return {"place": object() if self._fails_to == "save" else 7}

    def load_state_dict(self, state):
        if self._fails_to == "load":
            raise ValueError("not with me")


def fail_on_one(rank, num_ranks, plan, directory):
    """What every rank hears of what fails on rank 1 alone, and whether all goes on as if nothing had been."""
    run, other, said = SmallRun(plan), SmallRun(plan, seed=5), []
    run.train(2)
    run.save(directory / "it", loader=Place())
    mine = rank == 1
    for attempt in (
        lambda: run.save(directory / "new", loader=Place("save" if mine else "")),
        lambda: other.load(directory / "it", loader=Place("load" if mine else "")),
        lambda: other.load(directory / "it", files=Fault("eio read", "rank-00001.sums") if mine else Files()),
        lambda: other.load(directory / "it", files=Fault("eio read", "rank-00001.data") if mine else Files()),
        lambda: other.load(directory / "it", files=Fault("eio read", "rank-00001.json") if mine else Files()),
    ):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        said.append(str(caught.value))
    run.save(directory / "it", loader=Place())
    return said, other.load(directory / "latest"), equal(other.state(), after(2, plan))


@every_plan
def test_what_fails_on_one_rank_is_raised_on_all(ranks, tmp_path, plan):
    reasons = [
        "the state of loader['place'] is a builtins.object",
        f"the loader does not take the state in {tmp_path / 'it'}: ValueError('not with me')",
        "rank-00001.sums cannot be read: Input/output error",
        "rank-00001.data cannot be read: Input/output error",
        "rank-00001.json.gz cannot be read: Input/output error",
    ]
    for said, step, is_right in ranks(2).run(fail_on_one, plan, tmp_path):
        assert [reason for reason, told in zip(reasons, said, strict=True) if reason not in told] == []
        assert ["the model holds part of it" in told for told in said] == [False, False, True, True, False]
        assert (step, is_right) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def load_what_another_sees(rank, num_ranks, directory, late):
    """Loads the latest, of which one rank hears only once it has looked before."""
    run, looks, candidates = SmallRun(), [], places.candidates
    for step in (1, 2):
        run.train()
        run.save(directory / f"step-{step}")

    def look(path):
        looks.append(path)
        found, passed = candidates(path)
        return (found[1:] if rank == late and len(looks) == 1 else found), passed

    other = SmallRun(seed=5)
    with patch.object(places, "candidates", look), Messages() as noted:
        step = other.load(directory / "latest")
    return step, equal(other.state(), after(step)), noted.sent


@pytest.mark.parametrize(("late", "step"), [(0, 1), (1, 2)])
def test_where_ranks_see_different_checkpoints_rank_0s_counts(ranks, tmp_path, late, step):
    for found in ranks(2).run(load_what_another_sees, tmp_path, late):
        assert found == (step, True, [MET, TOLD, TOLD, TOLD])


def load_past_damage(rank, num_ranks, directory, name):
    run = SmallRun()
    for step in (1, 2):
        run.train()
        run.save(directory / f"step-{step}")
    if rank == 0:
        data = bytearray((directory / "step-2" / name).read_bytes())
        data[len(data) // 2] ^= 1
        (directory / "step-2" / name).write_bytes(data)
    onefold.save(directory.parent / "met", run.model)  # the ranks meet: rank 1 has not loaded before
    other = SmallRun(seed=5)
    with Messages() as noted:
        step = other.load(directory / "latest")
    return step, equal(other.state(), after(step)), noted.sent


@pytest.mark.parametrize(("name", "more"), [("rank-00001.json.gz", [TOLD]), ("rank-00001.data", [TOLD, TOLD])])
def test_a_damaged_checkpoint_costs_the_messages_that_tell_it(ranks, tmp_path, name, more):
    for found in ranks(2).run(load_past_damage, tmp_path / "saves", name):
        assert found == (1, True, [MET, TOLD, *more, TOLD])
