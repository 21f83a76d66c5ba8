"""Promise: gathers and reductions by copies give the values of a collective, bit for bit, whoever is late; and gathers
send nothing."""

import gc
import time
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from checks import same, weights
from inside import insides, units_of
from models import Stack, build
from onefold.comm.copies import copy_collectives, staging
from onefold.comm.copies.copy_collectives import PeerComm, place_of
from onefold.comm.copies.shared_memory import MappedPool
from onefold.comm.mesh import connect
from onefold.comm.reductions import mean_of_rows
from onefold.comm.wrappers import CountingComm
from onefold.engine import grad_accumulator
from onefold.errors import OrderMismatchError
from ranks import Turn

PLANS = {
    "zero_3": (onefold.ZERO_3, {}),
    "kept": (onefold.ZERO_3, {"keep_bytes": 10**6}),
    "not ahead": (onefold.ZERO_3, {"prefetch_bytes": 0}),
    "half on the host": (onefold.OFFLOAD_3.keeping(0.5), {}),
    "replicas": (onefold.ZERO_3, {"mesh": (2, 2)}),
    "zero_1": (onefold.ZERO_1, {}),
    "zero_2": (onefold.ZERO_2, {}),
    "zero_2, half on the host": (onefold.OFFLOAD.keeping(0.5), {}),
    "zero_2, replicas": (onefold.ZERO_2, {"mesh": (2, 2)}),
}
cases = pytest.mark.parametrize(
    ("plan", "num_ranks", "params"),
    [
        ("zero_3", 2, "bf16"),
        ("zero_3", 3, "fp32"),
        ("kept", 2, "bf16"),
        ("not ahead", 3, "fp32"),
        ("half on the host", 2, "bf16"),
        ("replicas", 4, "fp32"),
        ("zero_1", 3, "fp32"),
        ("zero_2", 2, "bf16"),
        ("zero_2, half on the host", 2, "bf16"),
        ("zero_2, replicas", 4, "fp32"),
    ],
)


class Witness:
    """Sees every change of this rank's exposed shards that rest by themselves, and whether it was made when nobody
    could be reading.

    It listens to a `PeerComm`, and notices a change at the next call. `wrong` tells what was not allowed.
    """

    def __init__(self, comm):
        self.wrong = []
        self.num_changes = 0
        self._shards = {own: everyone[comm.shard] for own, everyone in comm._shards.items() if own not in comm._parts}
        self._before = {own: shard.clone() for own, shard in self._shards.items()}
        self._read = set(self._shards)  # since the ranks met
        self._untold = set()
        self._listen(comm, "before_change", self._meets)
        self._listen(comm, "changed", self._told)
        self._listen(comm, "all_gather", self._reads)

    def _listen(self, comm, name, hear):
        call = getattr(comm, name)

        def wrapped(*arguments):
            self._look()
            hear(*arguments)
            return call(*arguments)

        setattr(comm, name, wrapped)

    def _look(self):
        for own, shard in self._shards.items():
            if not torch.equal(shard, self._before[own]):
                self.num_changes += 1
                self._untold.add(own)
                if own in self._read:
                    self.wrong.append("a shard changed before the ranks met, though some may still be reading it")
                self._before[own] = shard.clone()

    def _meets(self):
        self._read.clear()

    def _told(self, shard):
        self._untold.discard(place_of(shard))

    def _reads(self, whole, shard):
        self._read.add(place_of(shard))
        if place_of(shard) in self._untold:
            self.wrong.append("a shard changed, and nobody was told before it was read")


@contextmanager
def late_copies(generator):
    """Copies that are now and then long after the ranks met."""
    with ExitStack() as stack:
        for module in (copy_collectives, staging):
            late = partial(copy_late, generator, module._copy)
            stack.enter_context(patch.object(module, "_copy", late))
        yield


def copy_late(generator, copy, *given):
    dawdle(generator)
    copy(*given)


@contextmanager
def small_chunks():
    """As if buffers were large: gradients are reduced where they are, in several chunks."""
    with (
        patch.object(grad_accumulator, "_LOOSE_BYTES", 0),
        patch.multiple(staging, _BYTES=0, _ALIGNMENT=64),
    ):
        yield


def trained(rank, num_ranks, plan, gather, precision, steps, tmp_path, chunks=nullcontext):
    with late_copies(torch.Generator().manual_seed(rank + 100)), chunks():
        return trained_late(rank, PLANS[plan], gather, precision, steps, tmp_path)


def trained_late(rank, plan, gather, precision, steps, tmp_path):
    """The weights after every way in which shards are changed and read, several times over."""
    plan, options = plan
    if "mesh" in options:
        options = {"mesh": init_device_mesh("cpu", options["mesh"])}
    model = build(Stack)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    model = onefold.shard(model, plan, precision=precision, gather=gather, **options)
    optimizer = onefold.AdamW(model, lr=0.05, max_grad_norm=0.5)
    average = onefold.EMA(model, decay=0.5)
    comm = insides(model).comm
    witness = Witness(comm) if isinstance(comm, PeerComm) else None
    seen, generator = [], torch.Generator().manual_seed(rank)
    for step in range(steps):
        turn = Turn(rank, step, sharded=True)
        model(turn.randn(3, 4)).square().mean().backward()
        if step % 2:
            with torch.no_grad():  # gathers that no reduction follows
                seen.append(model(turn.randn(3, 4)).clone())
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        if not plan.params.partitioned:  # whole weights are the user's to write: by the time others may have read none
            dawdle(generator)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.99)
        if step % 3 == 2:
            with onefold.gathered(model, write=True), torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)
        if step % 4 == 3:
            with torch.no_grad():
                seen.append(model(turn.randn(3, 4)).clone())
            with average.applied(), torch.no_grad():
                seen.append(model(turn.randn(3, 4)).clone())
        if step % 5 == 4:
            model.load_state_dict({name: value * 0.9 for name, value in weights(model).items()})
            seen.append(model(turn.randn(3, 4)).detach().clone())
    onefold.save(tmp_path / gather, model, optimizer)
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    onefold.load(tmp_path / gather, model, optimizer)
    after = weights(model)
    if witness is not None:
        assert not witness.wrong, witness.wrong
        assert witness.num_changes > steps or not plan.params.partitioned, "the witness sees changes"
    return after, seen


def is_same(got, want):
    for (after, seen), (wanted, wanted_seen) in zip(got, want, strict=True):
        same(after, wanted, 0)
        assert all(torch.equal(a, b) for a, b in zip(seen, wanted_seen, strict=True))


@cases
def test_copies_give_what_collectives_give(ranks, tmp_path, plan, num_ranks, params):
    precision = onefold.Precision(params=params)
    want = ranks(num_ranks).run(trained, plan, "collective", precision, 10, tmp_path)
    for chunks in (nullcontext, small_chunks):
        is_same(ranks(num_ranks).run(trained, plan, "copy", precision, 10, tmp_path, chunks), want)


def dawdle(generator):
    """Now and then, long enough for the others to get ahead."""
    if float(torch.rand((), generator=generator)) < 0.2:
        time.sleep(0.01)


def changed_and_read(rank, num_ranks):
    """What this rank reads of all ranks, 100 times; ranks are late at random, and nothing but the copies joins them."""
    comm = PeerComm(connect(torch.device("cpu")), MappedPool(connect(torch.device("cpu"))), mean_of_rows)
    shards = [comm.expose(torch.zeros(16, dtype=torch.int64)) for _ in range(3)]
    whole = torch.empty(16 * num_ranks, dtype=torch.int64)
    generator = torch.Generator().manual_seed(rank)
    wrong = []
    for turn in range(100):
        comm.before_change()
        for shard in shards:
            dawdle(generator)
            shard.fill_(turn * num_ranks + rank)
        for shard in shards:
            comm.changed(shard)
        for number in range(len(shards)):
            finish = comm.all_gather(whole, shards[number])
            dawdle(generator)
            if finish is not None:
                finish()
            if whole.view(num_ranks, 16).T.tolist() != [[turn * num_ranks + each for each in range(num_ranks)]] * 16:
                wrong.append((turn, number, whole.tolist()))
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_late_ranks_are_waited_for(ranks, num_ranks):
    assert ranks(num_ranks).run(changed_and_read) == [[]] * num_ranks


def sent(rank, num_ranks, plan, gather):
    model = onefold.shard(build(Stack), PLANS[plan][0], gather=gather)
    session = insides(model)
    comm = session.comm
    counting = CountingComm(comm.inner if isinstance(comm, PeerComm) else comm)
    if isinstance(comm, PeerComm):
        comm.inner = counting
    else:
        for unit in session.runtime.units:
            unit._comm = counting
    optimizer = onefold.SGD(model, lr=0.1)
    for _ in range(3):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(3, 4))
    return counting.gather_numel


@pytest.mark.parametrize("plan", ["zero_2", "zero_3"])
def test_copies_send_nothing(ranks, plan):
    assert ranks(2).run(sent, plan, "copy") == [0, 0]
    assert min(ranks(2).run(sent, plan, "collective")) > 0, "the measure sees what collectives send"


def kept_waiting(rank, num_ranks, holds):
    """Units that a step waited for."""
    model = onefold.shard(build(Stack), onefold.ZERO_2, gather="copy", units=["blocks.*"])
    optimizer = onefold.SGD(model, lr=0.1)
    model(torch.ones(3, 4)).square().mean().backward()
    held = [param.data for param in model.blocks[1].parameters()] if holds else []
    optimizer.step()
    del held
    return [unit.name for unit in units_of(model) if unit.is_readable]


def test_a_step_waits_only_for_units_of_which_somebody_holds_a_view(ranks):
    assert ranks(2).run(kept_waiting, False) == [[]] * 2
    for names in ranks(2).run(kept_waiting, True):
        assert names
        assert all(name.startswith("blocks.1.") for name in names)


class Partly(nn.Module):
    """Parameters of which none is trained, or only empty ones."""

    def __init__(self, has_empty):
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 4), requires_grad=has_empty)

    def forward(self, x):
        return self.frozen(x).sum() + self.empty.sum()


def without_gradients(rank, num_ranks, has_empty):
    model = onefold.shard(Partly(has_empty), onefold.ZERO_3, gather="copy", units=["frozen"])
    loss = model(torch.ones(3, 4))
    if has_empty:
        optimizer = onefold.SGD(model, lr=0.1)
        loss.backward()
        optimizer.step()
    return model(torch.ones(3, 4)).item() == loss.item()


@pytest.mark.parametrize("has_empty", [False, True])
def test_models_without_gradients_need_no_inbox(ranks, has_empty):
    assert ranks(2).run(without_gradients, has_empty) == [True] * 2


def mapped(rank, num_ranks):
    model = onefold.shard(build(Stack), onefold.ZERO_3, gather="copy")
    model(torch.ones(3, 4)).square().mean().backward()
    during = Path("/proc/self/maps").read_text().count("onefold shard")
    open_files = sum(
        "onefold shard" in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
    )
    del model
    gc.collect()
    return during, open_files, Path("/proc/self/maps").read_text().count("onefold shard")


def test_shared_memory_goes_with_the_model(ranks):
    for during, open_files, after in ranks(2).run(mapped):
        assert during > 0
        assert open_files == 0
        assert after == 0


def stepping_alone(rank, num_ranks, plan):
    """What is raised where one rank steps and the other one begins another step."""
    model = onefold.shard(build(Stack), plan, gather="copy")
    optimizer = onefold.SGD(model, lr=0.1)
    model(torch.ones(3, 4)).square().mean().backward()
    try:
        if rank == 0:
            optimizer.step()
        else:
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
    except OrderMismatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize("plan", [onefold.ZERO_2, onefold.ZERO_3])
def test_a_step_of_one_rank_alone_is_told(ranks, plan):
    for told in ranks(2).run(stepping_alone, plan, timeout_s=60):
        assert "rank 0 came to the optimizer step" in told
