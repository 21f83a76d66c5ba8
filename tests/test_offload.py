"""Promise: state that rests on the host is as exact as on the device, is where the table says, and crosses the link as
rarely as the ZeRO-Offload paper's minimum.

Every table whose state rests on device and host, on 1 to 4 ranks, is held to ZERO_0. Both run torch's arithmetic on
these machines where the rule needs no square root; there, and with the torch kernel for every rule, results are equal
bit for bit. The compiled kernel rounds square roots correctly, which torch's on x86 does not always: there they are
equal to rounding.
"""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from checks import same, tensors, weights
from inside import TorchKernel, finish_updates, insides, kernel_on_the_host, units_of
from models import Stack, build
from onefold import Placement, Plan, Precision, Tier
from onefold.errors import HostMemoryError, PlanError
from onefold.memory.streams import HostLanes
from onefold.plan.table import legal_plans
from onefold.tiers.tier import Host, available_bytes
from ranks import Turn

TABLES = {
    str(plan): plan
    for plan in legal_plans()
    if plan.optim.farthest == Tier.HOST and Tier.DISK not in (*plan.params.tiers, *plan.grads.tiers)
}
NUM_TABLES = 7
_PART, _HOST, _MIX = Placement(True), Placement(True, Tier.HOST), Placement(True, {Tier.DEVICE: 0.3, Tier.HOST: 0.7})
MIXES = [
    onefold.OFFLOAD.keeping(0.5),
    onefold.OFFLOAD_3.keeping(0.6),
    Plan(params=Placement(False), grads=_HOST, optim=_MIX),
    Plan(params=_MIX, grads=_PART, optim=_HOST),
]
TABLES |= {str(plan): plan for plan in MIXES}
every_table = pytest.mark.parametrize("table", TABLES)

PRECISIONS = {
    "fp32": None,
    "bf16": Precision(params="bf16"),
    "bf16 with copies": Precision(params="bf16", master="fp32"),
    "bf16 reduced in fp32": Precision(params="bf16", reduce="fp32"),
    "fp16": Precision(params="fp16", loss_scale=256.0),
}


def test_the_tables_are_all_of_device_and_host():
    assert len(TABLES) == NUM_TABLES + len(MIXES)
    assert all(plan.optim.tiers != (Tier.DEVICE, Tier.HOST) for name, plan in list(TABLES.items())[:NUM_TABLES])


class Tied(Stack):
    """With a frozen part, a tied one and one that is never used."""

    def __init__(self):
        super().__init__(depth=3)
        self.blocks[1].up.requires_grad_(False)
        self.blocks[2].down.weight = self.blocks[0].down.weight
        self.unused = nn.Linear(3, 5)


def run(rank, num_ranks, plan, rule, precision, steps=5):
    """Weights after a few steps with clipping, weight decay, accumulation and a schedule; and every step's norm."""
    torch.manual_seed(rank)
    model = onefold.shard(build(Tied), plan, precision=precision)
    make, options = RULES[rule]
    optimizer = make(model, lr=0.02, weight_decay=0.1, max_grad_norm=0.3, no_decay=("*.bias",), **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    norms = []
    for step in range(steps):
        turn = Turn(rank, step, sharded=True)
        if step % 2:
            with onefold.accumulate(model):
                (model(turn.randn(3, 4)).square().mean() / 2).backward()
        else:
            (model(turn.randn(3, 4)).square().mean() / 2).backward()  # reduced, and added to
        (model(turn.randn(3, 4)).square().mean() / 2).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return weights(model), norms


RULES = {
    "adamw": (onefold.AdamW, {}),
    "adam": (onefold.Adam, {"amsgrad": True}),
    "sgd": (onefold.SGD, {"momentum": 0.9, "nesterov": True}),
    "lion": (onefold.Lion, {}),
    "adagrad": (onefold.Adagrad, {}),
    "rmsprop": (lambda model, **options: onefold.Elementwise(model, torch.optim.RMSprop, **options), {}),
}
rules_and_precisions = pytest.mark.parametrize(
    ("rule", "precision"), [("adamw", precision) for precision in PRECISIONS] + [(rule, "bf16") for rule in RULES][1:]
)
ROOTLESS = ("sgd", "lion", "rmsprop")
"""Rules whose results do not depend on who takes a square root."""


def in_torch(rank, num_ranks, *arguments):
    """`run` with torch's kernel in the compiled one's place."""
    with kernel_on_the_host(lambda *_: TorchKernel()):
        return run(rank, num_ranks, *arguments)


def differing(rank, num_ranks, base, runner, rule, precision, tolerance, tables=tuple(TABLES)):
    """The tables that do not end as `base` does, and how."""
    want, want_norms = run(rank, num_ranks, base, rule, precision)
    wrong = {}
    for name in tables:
        table = TABLES[name]
        got, norms = runner(rank, num_ranks, table, rule, precision)
        try:
            same(got, want, tolerance)
            assert norms == pytest.approx(want_norms, rel=tolerance, abs=0)
        except AssertionError as error:
            wrong[name] = str(error)
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_every_table_trains_as_zero_0(ranks, rule, num_ranks):
    tolerance = 0 if rule in ROOTLESS else 1e-5
    arguments = differing, onefold.ZERO_0, run, rule, None, tolerance
    assert ranks(num_ranks).run(*arguments) == [{}] * num_ranks


@rules_and_precisions
def test_torchs_kernel_equals_the_device_bit_for_bit(ranks, rule, precision):
    arguments = differing, onefold.ZERO_0, in_torch, rule, PRECISIONS[precision], 0
    assert ranks(2).run(*arguments) == [{}] * 2


@rules_and_precisions
def test_all_tables_equal_each_other_bit_for_bit(ranks, rule, precision):
    tables = tuple(TABLES) if rule in ROOTLESS else tuple(TABLES)[:NUM_TABLES]  # in a mix both kernels take roots
    arguments = differing, onefold.OFFLOAD, run, rule, PRECISIONS[precision], 0, tables
    assert ranks(2).run(*arguments) == [{}] * 2


# --- bytes


def held_and_moved(rank, num_ranks, plan, precision):
    model = onefold.shard(build(Tied), plan, precision=precision)
    optimizer = onefold.AdamW(model, lr=0.1)
    x = Turn(rank, 0, sharded=True).randn(3, 4)
    moved = []
    for _ in range(3):
        host = insides(model).houses[Tier.HOST]
        before = host.up_bytes, host.down_bytes
        model(x).square().mean().backward()
        held = onefold.measured(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        finish_updates(model)
        moved.append((host.up_bytes - before[0], host.down_bytes - before[1]))
    return onefold.predicted(model, optimizer), held, moved


@every_table
@pytest.mark.parametrize(("num_ranks", "precision"), [(1, "fp16"), (2, "bf16"), (3, "fp32")])
def test_bytes_are_where_the_table_says(ranks, table, num_ranks, precision):
    for predicted, held, moved in ranks(num_ranks).run(held_and_moved, TABLES[table], PRECISIONS[precision]):
        for kind in ("params_bytes", "grads_bytes", "optim_bytes"):
            assert (kind, getattr(held, kind)) == (kind, getattr(predicted, kind))
        assert moved[1] == moved[2]
        if not TABLES[table].params.partitioned:
            assert sum(moved[2]) == predicted.link_bytes


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_offload_moves_four_bytes_a_parameter(ranks, num_ranks):
    """Two down, two up: the minimum of the ZeRO-Offload paper (section 3)."""
    for predicted, _, moved in ranks(num_ranks).run(held_and_moved, onefold.OFFLOAD, Precision(params="bf16")):
        up, down = moved[-1]
        trained = predicted.reduce_numel // num_ranks
        assert (up, down) == (2 * trained, 2 * trained)
        assert predicted.device_bytes == predicted.params_bytes[Tier.DEVICE]


@pytest.mark.parametrize("fraction", [0, 0.25, 0.5, 0.75, 1])
def test_a_mix_is_of_whole_units_those_of_the_next_forward_first_on_the_device(fraction):
    model = onefold.shard(build(Stack), onefold.OFFLOAD.keeping(fraction))
    units = units_of(model)
    tiers = [flat.trained.rest.tier for unit in units for flat in unit.flats]
    sizes = [flat.layout.used_numel for unit in units for flat in unit.flats]
    assert tiers == sorted(tiers)
    kept = sum(size for size, tier in zip(sizes, tiers, strict=True) if tier == Tier.DEVICE)
    assert kept <= fraction * sum(sizes)
    if kept < sum(sizes):
        assert kept + sizes[tiers.index(Tier.HOST)] > fraction * sum(sizes)


# --- what users do between steps


def clamped(model):
    for param in model.parameters():
        param.data.clamp_(-0.1, 0.1)


def written(rank, num_ranks, plan, precision, is_gathered):
    model = onefold.shard(build(Stack), plan, precision=precision)
    optimizer = onefold.SGD(model, lr=0.0)
    model(torch.ones(3, 4)).square().mean().backward()
    if is_gathered:
        with onefold.gathered(model, write=True):
            clamped(model)
            want = tensors(model)
    else:
        clamped(model)
        want = tensors(model)
    optimizer.step()
    same(weights(model), want, 0)
    assert max(value.abs().max().item() for value in want.values()) < 0.11


@pytest.mark.parametrize(
    ("table", "is_gathered"),
    [(name, True) for name in TABLES] + [(name, False) for name in TABLES if not TABLES[name].params.partitioned],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_is_written_between_steps_stays(ranks, table, precision, is_gathered):
    ranks(2).run(written, TABLES[table], PRECISIONS[precision], is_gathered)


def reordered(weight):
    weight.data.copy_(weight.data.flip(0))


def flipped_in_a_column(weight):
    with torch.no_grad():
        weight[:, 1].neg_()  # an even number of words whose highest bit changes


@pytest.mark.parametrize("write", [reordered, flipped_in_a_column])
@pytest.mark.parametrize("table", [name for name in TABLES if not TABLES[name].params.partitioned])
def test_what_is_written_is_seen_where_sums_are_as_before(table, write):
    model = onefold.shard(build(lambda: nn.Linear(8, 8, bias=False)), TABLES[table])
    optimizer = onefold.SGD(model, lr=0.0)
    model(torch.ones(3, 8)).square().mean().backward()
    optimizer.step()
    write(model.weight)
    want = tensors(model)
    optimizer.step()
    same(weights(model), want, 0)


def written_and_saved(rank, num_ranks, directory, plan, precision):
    model = onefold.shard(build(Stack), plan, precision=precision)
    optimizer = onefold.SGD(model, lr=0.1)
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    clamped(model)
    want = tensors(model)
    onefold.save(directory / "it", model, optimizer)
    other = onefold.shard(build(Stack, 7), plan, precision=precision)
    onefold.load(directory / "it", other)
    same(weights(other), want, 0)


@pytest.mark.parametrize("table", [name for name in TABLES if not TABLES[name].params.partitioned])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_is_written_after_a_step_is_saved(ranks, tmp_path, table, precision):
    ranks(2).run(written_and_saved, tmp_path, TABLES[table], PRECISIONS[precision])


def saved_and_loaded(rank, num_ranks, plan):
    ends = []
    for is_resumed in (False, True):
        model = onefold.shard(build(Stack), plan, precision=Precision(params="bf16"))
        optimizer = onefold.AdamW(model, lr=0.05)
        for step in range(4):
            if is_resumed and step == 2:
                with onefold.gathered(model):
                    kept = {name: value.clone() for name, value in model.state_dict().items()}
                state = optimizer.state_dict()
                model = onefold.shard(build(Stack, 7), plan, precision=Precision(params="bf16"))
                optimizer = onefold.AdamW(model, lr=0.05)
                model.load_state_dict(kept)
                optimizer.load_state_dict(state)
            model(Turn(rank, step, sharded=True).randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights(model))
    same(ends[1], ends[0], 0)


@every_table
def test_state_can_be_saved_and_loaded(ranks, table):
    ranks(2).run(saved_and_loaded, TABLES[table])


# --- what cannot be had


def left(rank, num_ranks, plan):
    """Trains, and takes torch.distributed down right after the last step, whose updates are late. Returns how often it
    sent before, and after."""
    model = onefold.shard(build(Stack), plan)
    optimizer = onefold.AdamW(model, lr=1e-2)
    session, sent = insides(model), []
    send = session.comm.refresh

    def noted(whole, shard):
        sent.append(shard)
        return send(whole, shard)

    session.comm.refresh = noted
    for step in range(3):
        turn = Turn(rank, step, sharded=True)
        model(turn.randn(3, 4)).square().mean().backward()
        held = threading.Event()
        session.houses[Tier.HOST].worker.submit(held.wait)
        optimizer.step()
        optimizer.zero_grad()
        if step < 2:
            held.set()
    num_sent = len(sent)
    dist.destroy_process_group()
    held.set()
    for unit in session.runtime.units:
        for flat in unit.flats:
            flat.finish_update()
    for late in [each for each in threading.enumerate() if isinstance(each, threading.Timer)]:
        late.join()  # whoever would send what the loop does not has come and gone
    return num_sent, len(sent) - num_sent


@pytest.mark.parametrize("plan", [onefold.OFFLOAD, onefold.OFFLOAD.keeping(0.5)], ids=str)
def test_no_rank_is_left_in_a_collective_when_a_script_ends_after_a_step(ranks, plan):
    for before, after in ranks(2).run(left, plan):
        assert before
        assert after == 0


def test_memory_that_is_not_there_is_an_error():
    with pytest.raises(HostMemoryError, match=r"needs [\d,]+ more bytes of host memory and [\d,]+ are available"):
        Host(torch.device("cpu"), HostLanes(), [0]).allocate(2**50, torch.float32)


def test_files_that_were_read_do_not_count_as_memory_in_use(tmp_path):
    stat = "anon 300\nactive_file 400\ninactive_file 200\n"
    for name, text in {"max": "1000\n", "current": "900\n", "stat": stat}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_bytes(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 1000


def test_a_tier_that_is_not_built_is_named():
    part = Placement(True, Tier.DISK)
    with pytest.raises(PlanError, match=r"DEVICE and on HOST"):
        onefold.shard(
            Stack(), Plan(params=Placement(True, Tier.DEVICE), grads=Placement(True, Tier.DEVICE), optim=part)
        )
