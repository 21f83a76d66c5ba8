"""Promise: a mesh of two axes, replicate and shard, trains as any other ranks do, and all of Onefold works on it.

Every plan on every mesh of 2 and 4 ranks against plain PyTorch in one process; what is equal to the bit; what is read,
written and saved; what each axis sends; what is refused.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import onefold
from checkpoint_models import Run, equal
from onefold import Precision, mesh
from onefold.comm import CountingComm
from onefold.errors import OnefoldError
from onefold.plan import NAMED_PLANS
from onefold.session import session_of
from ranks import WIDTH, Block, Case, Stack, Turn, average, build, same, tensors, train, weights

PATIENCE_S = 60.0
CPU = torch.device("cpu")
MESHES = [(2, 2), (4, 1), (1, 4), (2, 1), (1, 2)]
PLANS = {
    # the plan's name, and options of shard
    **{name: (name, {}) for name in NAMED_PLANS if name != "infinity"},
    "mix": ("offload_3", {"fraction": 0.5}),
    "kept": ("zero_3", {"keep_bytes": 2**20}),
}
ON_DEVICE = ("zero_0", "zero_1", "zero_2", "zero_3", "kept")
ON_HOST = ("offload", "offload_3")
every_mesh = pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
every_plan = pytest.mark.parametrize("plan", list(PLANS))


def grid(shape, names=("replicate", "shard")):
    """A mesh of all ranks; None for `shape` None."""
    return None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(model, plan, shape, **options):
    name, more = PLANS[plan]
    return onefold.shard(model, NAMED_PLANS[name], mesh=grid(shape), **more, **options)


# --- training


class Routed(nn.Module):
    """Blocks of which a forward may leave some out, and a statistic."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, order=(0, 1, 2, 3)):
        x = self.norm(self.embed(x))
        for index in order:
            x = self.blocks[index](x)
        return self.head(x)


ORDERS = [(0, 1, 2, 3), (0, 2, 3), (1, 3), (0, 1)]


def work(model, turn):
    """Ranks and replicas run different branches, add gradients up, and reduce twice in a step."""
    order = ORDERS[(turn.rank + turn.step) % 4]
    with turn.accumulate(model):
        (model(turn.randn(3, 4), order=order).pow(2).mean() / 3).backward()
    for _ in range(2):
        (model(turn.randn(3, 4), order=order).pow(2).mean() / 3).backward()


def against_plain(rank, num_ranks, shape, plan):
    name, more = PLANS[plan]
    options = {"mesh": grid(shape), **more}
    return train(rank, num_ranks, Case(model=Routed, work=work, optimizer="adamw", steps=3, options=options), name)


@every_plan
@every_mesh
def test_training_is_that_of_one_process(ranks, shape, plan):
    num_ranks = shape[0] * shape[1]
    assert ranks(num_ranks).run(against_plain, shape, plan, timeout_s=PATIENCE_S) == ["same"] * num_ranks


# --- norm and clipping


def clipped(rank, num_ranks, shape):
    """Norms of clipped training and end weights, of plain PyTorch and by plan."""
    replicas = [build(Stack) for _ in range(num_ranks)]
    plain = [torch.optim.AdamW(replica.parameters(), lr=1e-2, eps=1e-3) for replica in replicas]
    wanted, found = [], {}
    for step in range(3):
        for number, replica in enumerate(replicas):
            replica.zero_grad()
            replica(Turn(number, step, sharded=False).randn(3, 4)).pow(2).mean().backward()
        average(replicas)
        wanted += {float(nn.utils.clip_grad_norm_(replica.parameters(), 0.05)) for replica in replicas}
        for optimizer in plain:
            optimizer.step()
    for plan in PLANS:
        model, norms = sharded(build(Stack), plan, shape), []
        optimizer = onefold.AdamW(model, lr=1e-2, eps=1e-3, max_grad_norm=0.05)
        for step in range(3):
            model(Turn(rank, step, sharded=True).randn(3, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        found[plan] = norms, weights(model)
    return wanted, tensors(replicas[0]), found


@every_mesh
def test_the_norm_counts_each_shard_once_and_is_the_same_everywhere(ranks, shape):
    outcomes = ranks(shape[0] * shape[1]).run(clipped, shape, timeout_s=PATIENCE_S)
    for wanted, end, found in outcomes:
        for plan, (norms, got) in found.items():
            assert norms == outcomes[0][2][plan][0]
            assert norms == pytest.approx(wanted, rel=1e-5)
            same(got, end)


def totals(rank, num_ranks):
    comm = mesh.connect(CPU, grid((2, 2)))
    return float(comm.total(torch.tensor(2.0**rank, dtype=torch.float64)))


def test_what_replicas_sum_differently_is_replica_0s(ranks):
    assert ranks(4).run(totals) == [3.0] * 4


# --- bits

PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(params="bf16"),
    "bf16, all else fp32": Precision(params="bf16", master="fp32", reduce="fp32"),
    "fp16": Precision(params="fp16", loss_scale=onefold.DynamicLossScale(initial=2.0**8, window=2, hysteresis=1)),
}


def bits(rank, num_ranks, shape, precision, plans, max_grad_norm):
    """By plan: exact weights on rank 0 and the norms, after three steps."""
    found = {}
    for plan in plans:
        model = sharded(build(Stack), plan, shape, precision=PRECISIONS[precision])
        optimizer = onefold.AdamW(model, lr=1e-2, max_grad_norm=max_grad_norm)
        norms = []
        for step in range(3):
            model(Turn(rank, step, sharded=True).randn(3, 4)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        seen = weights(model)
        found[plan] = onefold.full_state_dict(model, dtype="fp32"), norms, optimizer.loss_scale, seen
    return found


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("plans", [ON_DEVICE, ON_HOST], ids=["device", "host"])
def test_on_one_mesh_plans_agree_to_the_bit_and_so_do_all_ranks(ranks, plans, precision):
    outcomes = ranks(4).run(bits, (2, 2), precision, plans, 0.05, timeout_s=PATIENCE_S)
    want, norms, scale, seen = outcomes[0][plans[0]]
    assert want
    for found in outcomes:
        for plan in plans:
            exact, got_norms, got_scale, got = found[plan]
            assert not exact or same_bits(exact, want)
            assert (got_norms, got_scale) == (norms, scale)
            assert same_bits(got, seen)


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize(("shape", "is_norm_exact"), [((1, 4), True), ((4, 1), False)], ids=str)
def test_an_axis_of_one_rank_changes_no_bit(ranks, shape, is_norm_exact, precision):
    """(R, 1) sums the same gradients in the same order, and only its norm in another; so it is not clipped here."""
    chosen = (precision, ("zero_0", "zero_3", "offload"), 0.05 if is_norm_exact else None)
    found = ranks(4).run(bits, shape, *chosen, timeout_s=PATIENCE_S)[0]
    want = ranks(4).run(bits, None, *chosen, timeout_s=PATIENCE_S)[0]
    for plan, (exact, norms, scale, _) in found.items():
        assert same_bits(exact, want[plan][0])
        assert scale == want[plan][2]
        assert norms == (want[plan][1] if is_norm_exact else pytest.approx(want[plan][1], rel=1e-12))


def test_other_meshes_agree_to_rounding(ranks):
    found = ranks(4).run(bits, (2, 2), "fp32", ("zero_3",), 0.05, timeout_s=PATIENCE_S)[0]["zero_3"]
    want = ranks(4).run(bits, None, "fp32", ("zero_3",), 0.05, timeout_s=PATIENCE_S)[0]["zero_3"]
    for name, weight in want[0].items():
        torch.testing.assert_close(found[0][name], weight, rtol=1e-4, atol=1e-5)


# --- ranks decide together


def overflowing(rank, num_ranks, plan):
    """By step: whether it was skipped, and the loss scale; in step 1 rank 2 alone, of replica 1, overflows."""
    model = sharded(build(Stack), plan, (2, 2), precision=PRECISIONS["fp16"])
    optimizer = onefold.SGD(model, lr=0.1)
    told, seen = [], []
    for step in range(4):
        loss = model(Turn(rank, step, sharded=True).randn(3, 4)).float().pow(2).mean()
        (loss * (2.0**20 if step == 1 and rank == 2 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append((optimizer.skipped, optimizer.loss_scale))
        seen.append(weights(model))
    return told, same_bits(seen[0], seen[1]), same_bits(seen[1], seen[2]), seen[-1]


@every_plan
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, plan):
    outcomes = ranks(4).run(overflowing, plan, timeout_s=PATIENCE_S)
    for told, is_kept, is_stuck, end in outcomes:
        assert told == [(False, 256.0), (True, 128.0), (False, 128.0), (False, 128.0)]
        assert is_kept
        assert not is_stuck
        assert same_bits(end, outcomes[0][3])


def failing(rank, num_ranks, plan):
    """What the step after a backward says that failed on the last rank alone."""
    model = sharded(build(Stack), plan, (2, 2))
    optimizer = onefold.SGD(model, lr=0.1)
    model(torch.ones(3, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == num_ranks - 1:
        model.blocks[0].register_full_backward_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model(torch.ones(3, 4)).pow(2).mean().backward()
    try:
        optimizer.step()
    except OnefoldError as error:
        return str(error)
    return None


@pytest.mark.parametrize("plan", ["zero_0", "zero_2", "zero_3"])
def test_a_backward_that_fails_on_one_rank_is_an_error_on_all(ranks, plan):
    for rank, message in enumerate(ranks(4).run(failing, plan, timeout_s=PATIENCE_S)):
        assert "failed on rank 3 alone" in message
        assert f"this is rank {rank}" in message


# --- reading and writing


def started(rank, num_ranks, plan):
    """Weights and statistics of a model that was built otherwise on every rank, on a device or on meta."""

    def make():
        return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(3)))

    model = build(make, seed=rank)
    for buffer in model.buffers():
        buffer.fill_(rank + 1)
    torch.manual_seed(rank)
    with torch.device("meta"):
        unborn = make()
    born = sharded(unborn, plan, (2, 2))
    return weights(sharded(model, plan, (2, 2))), weights(born)


@every_plan
def test_all_replicas_start_from_rank_0(ranks, plan):
    outcomes = ranks(4).run(started, plan, timeout_s=PATIENCE_S)
    for found in outcomes:
        assert all(same_bits(got, want) for got, want in zip(found, outcomes[0], strict=True))
        assert all(bool((value == 1).all()) for name, value in found[0].items() if "running" in name)


def looked_at(rank, num_ranks, plan, directory):
    """Everything that reads or writes a model whole, in turn; what is wrong."""
    torch.manual_seed(0)
    model = sharded(build(Stack), plan, (2, 2), precision=PRECISIONS["bf16"])
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
    fresh = sharded(build(Stack, seed=9), plan, (2, 2), precision=PRECISIONS["bf16"])
    onefold.load_pretrained(fresh, directory / plan)
    expect(same_bits(weights(fresh), weights(model)), "what was exported and loaded")
    with onefold.gathered(model, write=True), torch.no_grad():
        model.head.weight.fill_(rank + 1)
    expect(bool((weights(model)["head.weight"] == 1).all()), "what rank 0 wrote")
    mine = session_of(model, "a test")
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
    # saved on a mesh under a plan, loaded on another mesh or on ranks without one
    ((2, 2), "zero_3", (1, 2), "zero_1"),
    ((2, 2), "offload", (4, 1), "zero_3"),
    ((2, 2), "zero_0", None, "zero_2"),
    ((4, 1), "mix", (2, 1), "offload_3"),
    ((1, 2), "zero_2", (2, 2), "zero_3"),
    (None, "zero_3", (2, 2), "offload"),
]


@pytest.mark.parametrize("is_beside", [False, True], ids=["now", "beside"])
@pytest.mark.parametrize(("shape", "plan", "other", "plan_there"), WAYS, ids=str)
def test_a_checkpoint_is_written_once_and_loads_on_any_mesh(ranks, tmp_path, shape, plan, other, plan_there, is_beside):
    path, alone = tmp_path / "saved", tmp_path / "alone"
    num_there = 2 if other is None else other[0] * other[1]
    states = ranks(2 if shape is None else shape[0] * shape[1]).run(
        saved, shape, plan, path, is_beside, timeout_s=PATIENCE_S
    )
    for state in ranks(num_there).run(loaded, other, plan_there, path, timeout_s=PATIENCE_S):
        assert equal(state, states[0])
    saved(0, 1, None, "zero_0", alone, False)
    parts = data_bytes(path)
    assert sum(parts) == sum(data_bytes(alone))
    assert max(parts) < 0.7 * sum(parts)  # replicas share the work


# --- the wire


def counts(shards, replicas):
    return shards.gather_numel, shards.reduce_numel, replicas.gather_numel + replicas.reduce_numel


def sent(rank, num_ranks, shape, plan):
    """Elements that a step sends over each axis, and those predicted."""
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
    psi = sum(flat.layout.numel for unit in session_of(model, "a test").runtime.units for flat in unit.flats)
    return [new - old for new, old in zip(after, before, strict=True)], budget, psi


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("plan", ["zero_0", "zero_1", "zero_2", "zero_3"])
def test_each_axis_sends_what_was_predicted(ranks, plan, shape):
    for (gathered, reduced, across), budget, psi in ranks(4).run(sent, shape, plan, timeout_s=PATIENCE_S):
        assert across == budget.replica_numel == 2 * psi // shape[1]
        # The norm costs one number a shard. Where nothing is split an all-reduce is made of a scatter and a gather.
        assert gathered + reduced - shape[1] == budget.gather_numel + budget.reduce_numel
        assert budget.wire_numel == (3 if plan == "zero_3" else 2) * psi + across
        assert f"{across:,}" in str(budget)


def foreseen(rank, num_ranks, plan):
    def budget(shape):
        model = sharded(build(Stack), plan, shape)
        return onefold.predicted(model, onefold.AdamW(model))

    return budget((1, 2)) == budget(None)


@every_plan
def test_without_replicas_the_budget_is_that_of_one_axis(ranks, plan):
    assert ranks(2).run(foreseen, plan) == [True, True]


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
    assert same_bits(first, second)
    assert same_bits(third, fourth)
    assert not same_bits(first, third)
