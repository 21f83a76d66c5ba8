"""Promise: on a mesh of two axes a model is read, written, saved, loaded and counted as on any other ranks, and a mesh
that means nothing is refused.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import onefold
from checkpoint_models import Run, same_state
from checks import equal, weights
from inside import insides, units_of
from mesh_models import CPU, PATIENCE_S, PLANS, grid, sharded
from models import Stack, build
from onefold import Precision
from onefold.comm import mesh
from onefold.comm.wrappers import CountingComm
from ranks import Turn

BF16 = Precision(params="bf16")
every_plan = pytest.mark.parametrize("plan", list(PLANS))


# --- reading and writing


def started(rank, num_ranks):
    """By plan: weights and statistics of a model that was built otherwise on every rank, on a device or on meta."""

    def make():
        return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(3)))

    found = {}
    for plan in PLANS:
        model = build(make, seed=rank)
        for buffer in model.buffers():
            buffer.fill_(rank + 1)
        with torch.device("meta"):
            unborn = make()
        torch.manual_seed(rank)
        found[plan] = weights(sharded(model, plan, (2, 2))), weights(sharded(unborn, plan, (2, 2)))
    return found


def test_all_replicas_start_from_rank_0(ranks):
    outcomes = ranks(4).run(started, timeout_s=PATIENCE_S)
    want, born = outcomes[0]["zero_0"]
    assert all(bool((value == 1).all()) for name, value in want.items() if "running" in name)
    for found in outcomes:
        for plan, (got, got_born) in found.items():
            assert (plan, equal(got, want), equal(got_born, born)) == (plan, True, True)


def looked_at(rank, num_ranks, plan, directory):
    """Everything that reads or writes a model whole, in turn; what is wrong."""
    torch.manual_seed(0)
    model = sharded(build(Stack), plan, (2, 2), precision=BF16)
    optimizer, ema, wrong = onefold.AdamW(model, lr=1e-2), onefold.EMA(model, 0.5), []

    def expect(is_right, what):
        wrong.extend([] if is_right else [what])

    model(Turn(rank, 0, sharded=True).randn(3, 4)).float().pow(2).mean().backward()
    held, foreseen = onefold.measured(model, optimizer), onefold.predicted(model, optimizer)
    for kind in ("params_bytes", "grads_bytes", "optim_bytes"):
        expect(getattr(held, kind) == getattr(foreseen, kind), kind)
    before = onefold.full_state_dict(model, dtype="fp32")
    optimizer.step()
    optimizer.zero_grad()
    ema.update()
    after = onefold.full_state_dict(model, dtype="fp32")
    with ema.applied():
        averaged = onefold.full_state_dict(model, dtype="fp32")
    for name, value in averaged.items():
        expect(torch.equal(value, (before[name] * 0.5).add(after[name], alpha=0.5)), f"the average of {name}")
    onefold.export(model, directory / plan)
    fresh = sharded(build(Stack, seed=9), plan, (2, 2), precision=BF16)
    onefold.load_pretrained(fresh, directory / plan)
    expect(equal(weights(fresh), weights(model)), "what was exported and loaded")
    with onefold.gathered(model, write=True), torch.no_grad():
        model.head.weight.fill_(rank + 1)
    expect(bool((weights(model)["head.weight"] == 1).all()), "what rank 0 wrote")
    mine = insides(model)
    told = mine.comm.exchange_objects((mine.fingerprint, [t.clone() for t in optimizer.held()]))
    for theirs, state in told:
        is_same = all(torch.equal(one, other) for one, other in zip(optimizer.held(), state, strict=True))
        expect(theirs != mine.fingerprint or is_same, "the state of replicas")
    expect([each for each, _ in told].count(mine.fingerprint) == 2, "how many hold the same shard")
    return wrong


@every_plan
def test_a_model_is_read_and_written_whole(ranks, plan, tmp_path):
    assert ranks(4).run(looked_at, plan, tmp_path, timeout_s=PATIENCE_S) == [[]] * 4


# --- checkpoints


def saved(rank, num_ranks, shape, plan, directory, is_beside):
    name, more = PLANS[plan]
    run = Run(rank, num_ranks, name, "bf16", mesh=grid(shape), **more)
    run.train(2)
    saving = run.save(directory, asynchronous=is_beside)
    state = run.state()
    run.train(1)
    saving.wait()
    return state


def loaded(rank, num_ranks, shape, plan, directory):
    run = Run(rank, num_ranks, PLANS[plan][0], "bf16", seed=7, mesh=grid(shape))
    run.load(directory)
    return run.state()


def data_bytes(directory):
    return [path.stat().st_size for path in sorted(directory.glob("rank-*.data"))]


WAYS = [
    # saved on a mesh under a plan, now or beside the next step; loaded on another mesh, or on ranks without one
    ((2, 2), "zero_3", "now", (1, 2), "zero_1"),
    ((2, 2), "offload", "beside", (4, 1), "zero_3"),
    ((2, 2), "zero_0", "beside", None, "zero_2"),
    ((4, 1), "mix", "now", (2, 1), "offload_3"),
    ((1, 2), "zero_2", "now", (2, 2), "zero_3"),
    ((3, 1), "zero_2", "now", (1, 2), "zero_3"),
    (None, "zero_3", "now", (2, 2), "offload"),
]


@pytest.mark.parametrize(("shape", "plan", "when", "other", "plan_there"), WAYS, ids=str)
def test_a_checkpoint_is_written_once_and_loads_on_any_mesh(ranks, tmp_path, shape, plan, when, other, plan_there):
    path, alone = tmp_path / "saved", tmp_path / "alone"
    num_here, num_there = (2 if each is None else each[0] * each[1] for each in (shape, other))
    states = ranks(num_here).run(saved, shape, plan, path, when == "beside", timeout_s=PATIENCE_S)
    for state in ranks(num_there).run(loaded, other, plan_there, path, timeout_s=PATIENCE_S):
        assert same_state(state, states[0])
    saved(0, 1, None, "zero_0", alone, False)
    parts = data_bytes(path)
    assert sum(parts) == sum(data_bytes(alone))
    assert max(parts) < 1.4 * sum(parts) / num_here  # replicas share the work


def resumed(rank, num_ranks, directory):
    """Whether a run that was saved and loaded in between ends as one that was not."""
    first = Run(rank, num_ranks, "zero_3", "bf16", mesh=grid((2, 2)))
    first.train(1)
    first.save(directory)
    second = Run(rank, num_ranks, "zero_3", "bf16", seed=7, mesh=grid((2, 2)))
    second.load(directory)
    return first.train(2) == second.train(2) and same_state(first.state(), second.state())


def test_training_goes_on_bit_for_bit_on_the_same_mesh(ranks, tmp_path):
    assert ranks(4).run(resumed, tmp_path / "saved", timeout_s=PATIENCE_S) == [True] * 4


# --- the wire


def counts(shards, replicas):
    return shards.gather_numel, shards.reduce_numel, replicas.gather_numel + replicas.reduce_numel


def sent(rank, num_ranks, shape):
    return {plan: sent_under(rank, shape, plan) for plan in ("zero_0", "zero_1", "zero_2", "zero_3")}


def sent_under(rank, shape, plan):
    """Elements that a step sends over each axis, those predicted, and the model's own."""
    counted, made = [], mesh.GridComm

    def connect_counted(everyone, shards, replicas):
        counted[:] = CountingComm(shards), CountingComm(replicas)
        return made(everyone, *counted)

    mesh.GridComm = connect_counted
    try:
        model = sharded(build(Stack), plan, shape)
    finally:
        mesh.GridComm = made
    optimizer = onefold.AdamW(model)
    shards, replicas = counted
    for step in range(4):
        before = counts(shards, replicas)
        model(Turn(rank, step, sharded=True).randn(3, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = counts(shards, replicas)
    budget = onefold.predicted(model, optimizer)
    psi = sum(flat.layout.numel for unit in units_of(model) for flat in unit.flats)
    return [new - old for new, old in zip(after, before, strict=True)], budget, psi


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
def test_each_axis_sends_what_was_predicted(ranks, shape):
    """As the paper counts: inside of a replica as on one axis, and an all-reduce of each shard between them."""
    for outcome in ranks(4).run(sent, shape, timeout_s=PATIENCE_S):
        for plan, ((gathered, reduced, across), budget, psi) in outcome.items():
            assert across == budget.replica_numel == 2 * psi // shape[1]
            assert reduced == psi
            assert budget.wire_numel == (3 if plan == "zero_3" else 2) * psi + across
            assert f"{across:,}" in str(budget)
            # Where nothing is split an all-reduce is a scatter and a gather. The norm travels in the step's message.
            if shape == (2, 2):  # one rank that has all of a unit has no updated part to gather
                assert gathered + reduced == budget.gather_numel + budget.reduce_numel


def foreseen(rank, num_ranks, shape):
    models = {plan: sharded(build(Stack), plan, shape) for plan in PLANS}
    return {plan: onefold.predicted(model, onefold.AdamW(model)) for plan, model in models.items()}


def test_without_replicas_the_budget_is_that_of_one_axis(ranks):
    assert ranks(2).run(foreseen, (1, 2)) == ranks(2).run(foreseen, None)


@pytest.mark.parametrize("num_replicas", [1, 2, 16])
def test_the_papers_accounting_adds_two_parts(num_replicas):
    budget = onefold.Budget.for_numel(onefold.ZERO_3, 1000, 8, num_replicas=num_replicas)
    assert budget.replica_numel == (0 if num_replicas == 1 else 250)
    assert budget.wire_numel == 3000 + budget.replica_numel
    assert budget.params_bytes == onefold.Budget.for_numel(onefold.ZERO_3, 1000, 8).params_bytes


# --- which axis is which


def places(rank, num_ranks, names):
    comm = mesh.connect(CPU, grid((2, 2), names))
    return comm.replica, comm.shard


@pytest.mark.parametrize(
    ("names", "is_turned"),
    [
        (("replicate", "shard"), False),
        (("dp_replicate", "dp_shard"), False),
        (None, False),
        (("shard", "replicate"), True),
        (("dp_shard", "dp_replicate"), True),
    ],
    ids=str,
)
def test_names_say_which_axis_keeps_replicas(ranks, names, is_turned):
    want = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert ranks(4).run(places, names) == ([place[::-1] for place in want] if is_turned else want)


def refused(rank, num_ranks):
    meshes = {
        "3 axes": init_device_mesh("cpu", (1, 1, 2)),
        "('rows', 'columns')": init_device_mesh("cpu", (1, 2), mesh_dim_names=("rows", "columns")),
        "('shard', 'dp_shard')": init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "dp_shard")),
        "do not rise": DeviceMesh("cpu", torch.tensor([[1, 0]]), mesh_dim_names=("replicate", "shard")),
        "holds ranks": DeviceMesh("cpu", [num_ranks - 1 - rank]),
    }
    told = {}
    for words, given in meshes.items():
        try:
            onefold.shard(build(Stack), onefold.ZERO_3, mesh=given)
        except onefold.errors.ShardError as error:
            told[words] = str(error)
    return list(meshes), told


def test_a_mesh_that_means_nothing_is_refused_with_one_that_does(ranks):
    for meshes, told in ranks(2).run(refused):
        assert list(told) == meshes
        assert all(words in message for words, message in told.items())
        assert all("init_device_mesh" in message for words, message in told.items() if words != "holds ranks")


def one_axis_of_two(rank, num_ranks):
    """Weights after a step on one axis of a mesh, the other left to itself."""
    model = onefold.shard(build(Stack), onefold.ZERO_3, mesh=grid((2, 2))["shard"])
    optimizer = onefold.SGD(model, lr=0.1)
    model(torch.full((3, 4), 1.0 + rank)).pow(2).mean().backward()
    optimizer.step()
    return weights(model)


def test_one_axis_of_a_mesh_trains_by_itself(ranks):
    first, second, third, fourth = ranks(4).run(one_axis_of_two, timeout_s=PATIENCE_S)
    assert equal(first, second)
    assert equal(third, fourth)
    assert not equal(first, third)
