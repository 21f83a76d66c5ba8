"""Promise: the budget is the ZeRO paper's accounting, to the byte and to the element, for every legal plan."""

import pickle
from fractions import Fraction
from itertools import product
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold import INFINITY, OFFLOAD, OFFLOAD_3, ZERO_0, ZERO_1, ZERO_2, ZERO_3, Budget, Placement, Plan, Tier
from onefold.errors import PlanError
from onefold.plan.budget import FlatSpec, max_numel, split_bytes
from onefold.plan.layout import Layout
from onefold.plan.table import legal_plans
from plans import NAMED_PLANS

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
GB = 10**9
COLUMNS = (ZERO_1, ZERO_2, ZERO_3)  # the paper's P_os, P_os+g, P_os+g+p

# "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", Table 1, as printed; * is bold: fits in 32 GB.
TABLE_1_MODELS = (75 * 10**8, 128 * 10**9, 10**12)
TABLE_1 = {
    1: "120 120 120 | 2048 2048 2048 | 16000 16000 16000",
    4: "52.5 41.3 *30 | 896 704 512 | 7000 5500 4000",
    16: "35.6 *21.6 7.5 | 608 368 128 | 4750 2875 1000",
    64: "*31.4 16.6 1.88 | 536 284 *32 | 4187 2218 250",
    256: "30.4 15.4 0.47 | 518 263 8 | 4046 2054 62.5",
    1024: "30.1 15.1 0.12 | 513 257 2 | 4011 2013 *15.6",
}
TABLE_1_CELLS = [
    (num_ranks, numel, plan, cell)
    for num_ranks, row in TABLE_1.items()
    for numel, cells in zip(TABLE_1_MODELS, row.split("|"), strict=True)
    for plan, cell in zip(COLUMNS, cells.split(), strict=True)
]

# The same paper, Table 2, maximum theoretical model size: model-parallel degree -> baseline and the three columns.
TABLE_2 = {
    1: "2B 7.6B 14.4B 128B",
    2: "4B 15.2B 28.8B 256B",
    4: "8B 30.4B 57.6B 0.5T",
    8: "16B 60.8B 115.2B 1T",
    16: "32B 121.6B 230.4B 2T",
}
TABLE_2_CELLS = [
    (degree, plan, cell, first)
    for degree, row in TABLE_2.items()
    for plan, cell, first in zip((ZERO_0, *COLUMNS), row.split(), TABLE_2[1].split(), strict=True)
]


def read(cell):
    """(value, one unit of its last printed digit) of a cell, as exact numbers; B and T are powers of ten."""
    digits = cell.strip("*BT")
    scale = {"B": 10**9, "T": 10**12}.get(cell[-1], 1)
    return Fraction(digits) * scale, Fraction(scale, 10 ** len(digits.partition(".")[2]))


@pytest.mark.parametrize(("num_ranks", "numel", "plan", "cell"), TABLE_1_CELLS)
def test_table_1_of_the_paper(num_ranks, numel, plan, cell):
    printed, unit = read(cell)  # the paper rounds some cells and cuts others, so less than one unit apart is equal
    budget = Budget.for_numel(plan, numel, num_ranks)
    assert abs(Fraction(budget.device_bytes, GB) - printed) < unit
    assert budget.device_bytes == budget.model_states_bytes


@pytest.mark.parametrize(("numel", "plan"), list(product(TABLE_1_MODELS, COLUMNS)))
def test_the_bold_cells_of_table_1_are_the_first_that_fit_32_gb(numel, plan):
    bold = [ranks for ranks, size, column, cell in TABLE_1_CELLS if (size, column) == (numel, plan) and "*" in cell]
    fitting = [ranks for ranks in TABLE_1 if Budget.for_numel(plan, numel, ranks).device_bytes <= 32 * GB]
    assert fitting[:1] == bold


@pytest.mark.parametrize(("degree", "plan", "cell", "first"), TABLE_2_CELLS)
def test_table_2_of_the_paper_theoretical_half(degree, plan, cell, first):
    # 64 data-parallel ranks hold each of `degree` slices; the paper multiplies its first row after rounding it.
    printed, unit = read(cell)
    first_printed, first_unit = read(first)
    largest = degree * max_numel(plan, 32 * GB, 64)
    assert abs(largest - printed) < max(unit, degree * first_unit)
    assert abs(degree * first_printed - printed) < unit


def test_a_trillion_parameters_need_the_ranks_the_paper_says():
    assert Budget.for_numel(ZERO_3, 10**12, 1024).device_bytes == 15_625_000_000
    assert max_numel(ZERO_0, 32 * GB, 64) == 2 * GB
    assert max_numel(ZERO_3, 32 * GB, 64) == 128 * GB


# Every element of a layout of 16 * num_ranks elements is used, so that Psi has no padding.
def unpadded(num_ranks, rows=1, **itemsizes):
    sizes = {"param_itemsize": 2, "grad_itemsize": 2, "optim_itemsize": 12} | itemsizes
    return FlatSpec(layout=Layout.pack([("weight", (rows, 16 * num_ranks))], num_ranks), **sizes)


def frozen(num_ranks, rows=1):
    return unpadded(num_ranks, rows, grad_itemsize=0, optim_itemsize=0)


@pytest.mark.parametrize(("plan", "times"), [(ZERO_0, 2), (ZERO_1, 2), (ZERO_2, 2), (ZERO_3, 3)])
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_a_step_moves_the_elements_of_section_7(plan, times, num_ranks):
    assert Budget.for_numel(plan, 10**12, num_ranks).wire_numel == times * 10**12
    units = [[unpadded(num_ranks, rows)] for rows in (1, 5, 2)]
    assert Budget.of(plan, units).wire_numel == times * 8 * 16 * num_ranks


@pytest.mark.parametrize("plan", legal_plans(), ids=str)
def test_what_a_step_gathers_and_reduces_follows_from_what_is_split(plan):
    trained, still = 3 * 16 * 4, 16 * 4
    budget = Budget.of(plan, [[unpadded(4), frozen(4)], [unpadded(4, 2)]])
    expected = {
        (False, False): (0, 2 * trained),
        (False, True): (trained, trained),
        (True, True): (2 * (trained + still), trained),
    }
    assert (budget.gather_numel, budget.reduce_numel) == expected[plan.params.partitioned, plan.optim.partitioned]


def test_each_use_of_a_unit_is_gathered():
    units = [[unpadded(4, 7)], [unpadded(4)], [frozen(4, 3)]]  # say the root, a tied unit used twice, frozen layers
    budget = Budget.of(ZERO_3, units, forward_gathers=[1, 2, 1], backward_gathers=[0, 2, 1])
    assert budget.gather_numel == (7 * 1 + 1 * 4 + 3 * 2) * 64
    assert budget.reduce_numel == (7 + 1) * 64
    assert budget.model_states_bytes == (16 * (7 + 1) + 2 * 3) * 16  # used twice, held once
    assert Budget.of(ZERO_2, units, forward_gathers=[1, 2, 1]).wire_numel == 2 * (7 + 1) * 64


@pytest.mark.parametrize("counts", [{"forward_gathers": [1]}, {"backward_gathers": [1, 1, 1]}])
def test_a_missing_gather_count_is_refused(counts):
    with pytest.raises(PlanError, match="each of 2 units"):
        Budget.of(ZERO_3, [[unpadded(2)], [unpadded(2)]], **counts)


@pytest.mark.parametrize("plan", legal_plans(), ids=str)
def test_units_without_padding_cost_what_their_count_costs(plan):
    budget = Budget.of(plan, [[unpadded(8, rows)] for rows in (1, 4, 2)])
    by_count = Budget.for_numel(plan, 7 * 16 * 8, 8)
    for field in ("params_bytes", "grads_bytes", "optim_bytes", "gather_numel", "reduce_numel", "link_bytes"):
        assert getattr(budget, field) == getattr(by_count, field), field
    assert budget.padding_numel == 0


SPECS = st.builds(
    dict,
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=2).map(tuple), max_size=4),
    param_itemsize=st.sampled_from([2, 4]),
    grad_itemsize=st.sampled_from([0, 2, 4]),
    optim_itemsize=st.sampled_from([0, 4, 8, 10, 12]),
)


@settings(deadline=None)
@given(
    plan=st.sampled_from(legal_plans()),
    units=st.lists(st.lists(SPECS, max_size=3), max_size=4),
    num_ranks=st.integers(1, 9),
)
def test_split_state_is_held_once_and_whole_state_by_every_rank(plan, units, num_ranks):
    def flat(shapes, **itemsizes):
        return FlatSpec(layout=Layout.pack([(str(i), s) for i, s in enumerate(shapes)], num_ranks), **itemsizes)

    flats = [[flat(**spec) for spec in unit] for unit in units]
    budget = Budget.of(plan, flats)
    for kind, itemsize in (("params", "param_itemsize"), ("grads", "grad_itemsize"), ("optim", "optim_itemsize")):
        placement, held = getattr(plan, kind), getattr(budget, f"{kind}_bytes")
        whole = sum(f.layout.numel * getattr(f, itemsize) for unit in flats for f in unit)
        (tier,) = placement.tiers
        assert held == {t: 0 for t in Tier} | {tier: whole // num_ranks if placement.partitioned else whole}
        assert whole % num_ranks == 0
    assert sum(budget.tier_bytes.values()) == budget.model_states_bytes
    assert budget.padding_numel == sum(f.layout.numel - f.layout.used_numel for unit in flats for f in unit)


@settings(deadline=None)
@given(
    plan=st.sampled_from(legal_plans()),
    numel=st.integers(0, 10**15),
    num_ranks=st.integers(1, 10**5),
    sizes=st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 4]), st.sampled_from([0, 4, 8, 10, 12])),
)
def test_a_count_costs_its_exact_share_rounded_up_to_a_byte(plan, numel, num_ranks, sizes):
    param, grad, optim = sizes
    held = Budget.for_numel(plan, numel, num_ranks, param_itemsize=param, grad_itemsize=grad, optim_itemsize=optim)
    shares = [
        ceil(Fraction(numel * size, num_ranks if placement.partitioned else 1))
        for placement, size in ((plan.params, param), (plan.grads, grad), (plan.optim, optim))
    ]
    assert [sum(m.values()) for m in (held.params_bytes, held.grads_bytes, held.optim_bytes)] == shares


@pytest.mark.parametrize(("numel", "num_ranks"), [(-1, 4), (10, 0)])
def test_a_count_that_means_nothing_is_refused(numel, num_ranks):
    with pytest.raises(PlanError, match=f"numel={numel}, num_ranks={num_ranks}"):
        Budget.for_numel(ZERO_3, numel, num_ranks)


class Tied(torch.nn.Module):
    """64 000 parameters tied between an embedding and a head, and 4 096 frozen ones."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 64)
        self.body = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.head = torch.nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embed.weight


def tied_units(num_ranks, grad_itemsize=2):
    def flat(trainable):
        shapes = [(n, tuple(p.shape)) for n, p in Tied().named_parameters() if p.requires_grad == trainable]
        sizes = {"grad_itemsize": grad_itemsize, "optim_itemsize": 12}
        return FlatSpec(
            layout=Layout.pack(shapes, num_ranks),
            param_itemsize=2,
            **(sizes if trainable else dict.fromkeys(sizes, 0)),
        )

    return [[flat(True)], [flat(False)]]


# P trainable parameters, F frozen ones, W ranks, G bytes a gradient (4: fp32 accumulators, 2 P more, split with it).
FORMULAS = {
    "zero_0": lambda P, F, W, G: (14 + G) * P + 2 * F,
    "zero_1": lambda P, F, W, G: (2 + G) * P + 12 * P / W + 2 * F,
    "zero_2": lambda P, F, W, G: 2 * P + (12 + G) * P / W + 2 * F,
    "zero_3": lambda P, F, W, G: (14 + G) * P / W + 2 * F / W,
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("grad_itemsize", [2, 4])
def test_tied_weights_count_once_and_frozen_ones_two_bytes(name, num_ranks, grad_itemsize):
    budget = Budget.of(NAMED_PLANS[name], tied_units(num_ranks, grad_itemsize))
    assert budget.model_states_bytes == FORMULAS[name](64_000, 4_096, num_ranks, grad_itemsize)


def test_more_ranks_and_offload_take_bytes_off_the_device():
    assert Budget.of(ZERO_2, tied_units(8)).model_states_bytes < Budget.of(ZERO_2, tied_units(1)).model_states_bytes
    on_device, offloaded = Budget.of(ZERO_3, tied_units(4)), Budget.of(OFFLOAD_3, tied_units(4))
    assert offloaded.tier_bytes == {DEVICE: 0, HOST: on_device.device_bytes, DISK: 0}
    assert Budget.of(INFINITY, tied_units(4)).tier_bytes == {DEVICE: 0, HOST: 32_000, DISK: 226_048}


def test_the_split_master_saves_two_bytes_a_parameter():
    assert Budget.for_numel(ZERO_0, 1000, 1, optim_itemsize=10).model_states_bytes == 14_000
    assert Budget.for_numel(ZERO_0, 1000, 1).model_states_bytes == 16_000


def test_a_mixed_tier_is_cut_by_its_fractions():
    plan = Plan(Placement(False), Placement(True, HOST), Placement(True, {DEVICE: 0.3, HOST: 0.7}))
    assert Budget.for_numel(plan, 1000, 10).optim_bytes == {DEVICE: 360, HOST: 840, DISK: 0}
    assert split_bytes(Placement(True, {tier: 1 / 3 for tier in Tier}), 100) == {DEVICE: 33, HOST: 33, DISK: 34}


MIXES = st.lists(st.integers(1, 99), min_size=3, max_size=3).map(
    lambda w: Placement(True, {tier: Fraction(part, sum(w)) for tier, part in zip(Tier, w, strict=True)})
)


@given(placement=MIXES, nbytes=st.integers(0, 10**16))
def test_a_mix_loses_no_byte_and_no_part_falls_as_the_whole_grows(placement, nbytes):
    parts, more = split_bytes(placement, nbytes), split_bytes(placement, nbytes + 1)
    assert sum(parts.values()) == nbytes
    for tier, fraction in placement.fractions:
        assert abs(parts[tier] - nbytes * fraction) < 2
        assert 0 <= parts[tier] <= more[tier]


@settings(deadline=None)
@given(
    optim=st.one_of(MIXES, st.just(Placement(True))),
    num_ranks=st.integers(1, 2000),
    memory_bytes=st.integers(0, 10**12),
    sizes=st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 4]), st.sampled_from([0, 4, 8, 10, 12])),
    by_tier=st.booleans(),
)
def test_the_largest_model_fits_and_one_more_parameter_does_not(optim, num_ranks, memory_bytes, sizes, by_tier):
    plan = Plan(Placement(False), Placement(True), optim)
    itemsizes = dict(zip(("param_itemsize", "grad_itemsize", "optim_itemsize"), sizes, strict=True))
    limits = {tier: memory_bytes for tier in Tier} if by_tier else {DEVICE: memory_bytes}
    largest = max_numel(plan, limits if by_tier else memory_bytes, num_ranks, **itemsizes)

    def fits(numel):
        held = Budget.for_numel(plan, numel, num_ranks, **itemsizes).tier_bytes
        return all(held[tier] <= limit for tier, limit in limits.items())

    assert fits(largest)
    assert not fits(largest + 1)


def test_a_plan_with_nothing_on_the_device_has_no_largest_model_there():
    with pytest.raises(PlanError, match="nothing on DEVICE"):
        max_numel(OFFLOAD_3, 32 * GB, 64)
    assert max_numel(OFFLOAD_3, {HOST: 32 * GB}, 64) == 128 * GB
    assert max_numel(INFINITY, {HOST: 64 * GB, DISK: 14 * GB}, 1) == GB


def test_offload_moves_four_bytes_a_parameter_over_the_host_link():
    # ZeRO-Offload, section 3: 16-bit gradients down and 16-bit parameters up, 4 M bytes, the least that saves memory.
    assert Budget.for_numel(OFFLOAD, 8000, 4).link_bytes == 4 * 8000 // 4
    assert Budget.for_numel(OFFLOAD_3, 8000, 4).link_bytes == (2 + 2 * 2) * 8000 // 4
    for plan in (ZERO_0, ZERO_1, ZERO_2, ZERO_3):
        assert Budget.for_numel(plan, 8000, 4).link_bytes == 0


@pytest.mark.parametrize(
    ("params", "grads", "optim", "bytes_a_parameter"),
    [
        (Placement(True), Placement(True), Placement(True, HOST), 4),  # the device keeps grads, the host needs them
        (Placement(True, HOST), Placement(True), Placement(True, HOST), 6),  # two gathers up, nothing to refresh
        (Placement(True), Placement(True), Placement(True, {DEVICE: 0.5, HOST: 0.5}), 2),
        (Placement(True), Placement(True, HOST), Placement(True, {DEVICE: 0.5, HOST: 0.5}), 4),  # half the grads return
        (
            Placement(True, HOST),
            Placement(True),
            Placement(True, {DEVICE: 0.5, HOST: 0.5}),
            6,
        ),  # half the params return
    ],
)
def test_the_host_link_carries_what_is_kept_on_one_side_and_used_on_the_other(params, grads, optim, bytes_a_parameter):
    assert Budget.for_numel(Plan(params, grads, optim), 8000, 4).link_bytes == bytes_a_parameter * 2000


def test_frozen_parameters_cross_the_host_link_only_to_be_gathered():
    assert Budget.of(OFFLOAD, [[frozen(4)]]).link_bytes == 0
    assert Budget.of(OFFLOAD_3, [[frozen(4)]]).link_bytes == 2 * 2 * 16


def test_the_window_is_the_root_the_largest_other_unit_and_what_is_gathered_ahead():
    units = [[unpadded(4, 3)], [unpadded(4), frozen(4)], [unpadded(4, 5)], [unpadded(4, 4)]]
    row = 16 * 4 * 2
    budget = Budget.of(ZERO_3, units)
    assert (budget.root_unit_bytes, budget.largest_unit_bytes) == (3 * row, 5 * row)
    assert budget.window_bytes() == 8 * row
    assert budget.window_bytes(2 * row) == 10 * row
    assert budget.window_bytes(10**9) == budget.all_units_bytes == 14 * row  # never more than the model
    last = Budget.of(ZERO_3, units, root=2)
    assert (last.root_unit_bytes, last.largest_unit_bytes) == (5 * row, 4 * row)
    rootless = Budget.of(ZERO_3, units, root=len(units))
    assert (rootless.root_unit_bytes, rootless.largest_unit_bytes) == (0, 5 * row)
    assert Budget.of(ZERO_3, units[:1]).window_bytes(10**9) == 3 * row


@pytest.mark.parametrize("plan", legal_plans(), ids=str)
def test_there_is_a_window_exactly_where_params_are_split(plan):
    budget = Budget.of(plan, [[unpadded(4)], [unpadded(4)]])
    assert (budget.window_bytes(64) > 0) == plan.params.partitioned
    assert Budget.of(plan, []).window_bytes(64) == 0


def test_the_table_shows_every_byte_that_is_held():
    budget = Budget.of(INFINITY, tied_units(4))
    lines = budget.table().splitlines()
    assert str(budget) == budget.table()
    assert len({len(line) for line in lines}) == 1  # fixed width
    cells = [line.split() for line in lines]
    assert ["params", "disk", "0.000", "34,048"] in cells
    assert ["grads", "host", "0.000", "32,000"] in cells
    assert ["optim", "disk", "0.000", "192,000"] in cells
    assert ["total", "all", "tiers", "0.000", "258,048"] in cells
    assert ["gather", f"{budget.gather_numel:,}"] in cells
    assert ["reduce", f"{budget.reduce_numel:,}"] in cells
    assert not [cell for cell in cells if cell[1] == "device"]
    assert ["total", "device", "120.000", f"{120 * 2**30:,}"] in [
        line.split() for line in Budget.for_numel(ZERO_0, 120 * 2**26, 1).table().splitlines()
    ]


def test_a_budget_is_a_value():
    budget = Budget.for_numel(OFFLOAD, 1000, 2)
    partial = Budget(params_bytes={DEVICE: 5}, grads_bytes={}, optim_bytes={HOST: 7})
    assert partial.tier_bytes == {DEVICE: 5, HOST: 7, DISK: 0}
    assert budget == Budget.for_numel(OFFLOAD, 1000, 2) != partial
    assert pickle.loads(pickle.dumps(budget)) == budget  # ranks send each other theirs
    with pytest.raises(AttributeError, match="gather_numel"):
        budget.gather_numel = 0
