"""Promise: a `Plan` that exists is legal, and a table that is not says which law it breaks and how to mend it."""

from collections import Counter
from fractions import Fraction
from itertools import product

import pytest

from onefold import INFINITY, OFFLOAD, OFFLOAD_3, ZERO_0, ZERO_1, ZERO_2, ZERO_3, Placement, Plan, Tier
from onefold.errors import OnefoldError, PlanError
from onefold.plan.table import LAWS, NAMED_PLANS, legal_plans

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
CELLS = [(partitioned, tier) for partitioned in (False, True) for tier in Tier]


def whole(tier=DEVICE):
    return Placement(False, tier)


def part(tier=DEVICE):
    return Placement(True, tier)


OFFLOADED = (whole(), part(HOST), part(HOST))


def broken_laws(params, grads, optim):
    """The laws a single-tier table breaks, worked out from the prose of the design and not from the code under test."""
    laws = set()
    if (params[0] and not grads[0]) or (grads[0] and not optim[0]):
        laws.add(0)
    if any(tier != DEVICE and not partitioned for partitioned, tier in (params, grads, optim)):
        laws.add(1)
    if params[1] > optim[1] or grads[1] > optim[1]:
        laws.add(2)
    return laws


def cell_names(cells):
    return "-".join(f"{'part' if partitioned else 'whole'}_{tier.name.lower()}" for partitioned, tier in cells)


@pytest.mark.parametrize("cells", list(product(CELLS, repeat=3)), ids=cell_names)
def test_each_of_the_216_tables_is_made_or_refused_by_a_law_it_breaks(cells):
    laws = broken_laws(*cells)
    placements = [Placement(*cell) for cell in cells]
    if not laws:
        plan = Plan(*placements)
        assert (plan.params, plan.grads, plan.optim) == tuple(placements)
        return
    with pytest.raises(PlanError) as refused:
        Plan(*placements)
    named = {index for index, law in enumerate(LAWS) if law in str(refused.value)}
    assert len(named) == 1
    assert named <= laws


def test_exactly_24_tables_are_legal():
    plans = legal_plans()
    assert len(plans) == len(set(plans)) == 24
    # One with nothing split, then 3 tiers for optim alone, 1 + 2 + 3 pairs grads <= optim, and 1 + 4 + 9 triples.
    split = Counter((plan.params.partitioned, plan.grads.partitioned, plan.optim.partitioned) for plan in plans)
    assert split == {(False, False, False): 1, (False, False, True): 3, (False, True, True): 6, (True, True, True): 14}


@pytest.mark.parametrize(
    ("broken", "law", "way_out", "mended"),
    [
        ((part(), whole(), part()), 0, "partition the optimizer state first, then the gradients", (part(),) * 3),
        ((whole(), part(), whole()), 0, "partition the optimizer state first", (whole(), part(), part())),
        ((whole(), whole(), whole(HOST)), 1, "make optim partitioned, or", (whole(), whole(), part(HOST))),
        ((whole(), whole(HOST), part(HOST)), 1, "make grads partitioned, or keep it on DEVICE", OFFLOADED),
        ((whole(DISK), part(HOST), part(DISK)), 1, "or keep it on DEVICE", (whole(), part(HOST), part(DISK))),
        ((whole(), part(HOST), part()), 2, "move optim to HOST too, or bring grads back to DEVICE", OFFLOADED),
        ((part(DISK), part(HOST), part(HOST)), 2, "or bring params back to HOST", (part(HOST),) * 3),
    ],
)
def test_a_broken_law_is_named_with_a_way_out_that_leads_out(broken, law, way_out, mended):
    with pytest.raises(PlanError) as refused:
        Plan(*broken)
    message = str(refused.value)
    assert LAWS[law] in message
    assert way_out in message
    assert [other for other in LAWS if other in message] == [LAWS[law]]
    for kind, placement in zip(("params", "grads", "optim"), broken, strict=True):
        assert f"{kind}: {placement}" in message
    Plan(*mended)  # raises if the advice is wrong


def test_the_named_plans_are_the_rows_of_the_published_table():
    assert {
        "zero_0": Plan(whole(), whole(), whole()),
        "zero_1": Plan(whole(), whole(), part()),
        "zero_2": Plan(whole(), part(), part()),
        "zero_3": Plan(part(), part(), part()),
        "offload": Plan(whole(), part(HOST), part(HOST)),
        "offload_3": Plan(part(HOST), part(HOST), part(HOST)),
        "infinity": Plan(part(DISK), part(HOST), part(DISK)),
    } == NAMED_PLANS
    assert list(NAMED_PLANS.values()) == [ZERO_0, ZERO_1, ZERO_2, ZERO_3, OFFLOAD, OFFLOAD_3, INFINITY]
    assert set(NAMED_PLANS.values()) <= set(legal_plans())


def test_a_mixed_tier_keeps_exact_fractions_nearest_first():
    mixed = Placement(True, {HOST: 0.7, DEVICE: 0.3})
    assert mixed.fractions == ((DEVICE, Fraction(3, 10)), (HOST, Fraction(7, 10)))
    assert mixed.tiers == (DEVICE, HOST)
    assert mixed.farthest is HOST
    assert mixed == Placement(True, {DEVICE: 0.3, HOST: 0.7})
    assert len({mixed, Placement(True, {DEVICE: 0.3, HOST: 0.7})}) == 1
    assert str(mixed) == "part, 30% device + 70% host"
    thirds = Placement(True, {tier: 1 / 3 for tier in Tier})
    assert [fraction for _, fraction in thirds.fractions] == [Fraction(1, 3)] * 3


def test_a_mix_of_one_tier_is_that_tier():
    assert Placement(True, {HOST: 1.0}) == Placement(True, HOST)
    assert Placement(False) == Placement(False, DEVICE)


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        ({DEVICE: 0.5}, "sum to 1"),
        ({DEVICE: 0.5, HOST: 0.6}, "sum to 1"),
        ({DEVICE: 0, HOST: 1}, "in (0, 1]"),
        ({DEVICE: -0.5, HOST: 1.5}, "in (0, 1]"),
        ({}, "DEVICE"),
        ({"host": 1.0}, "DEVICE"),
        ({1: 1.0}, "DEVICE"),
        ("host", "DEVICE"),
        (1, "DEVICE"),
        (None, "DEVICE"),
    ],
    ids=repr,
)
def test_a_placement_refuses_what_is_no_tier_or_no_whole_and_repeats_it(tier, expected):
    with pytest.raises(PlanError) as refused:
        Placement(True, tier)
    assert repr(tier) in str(refused.value)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    "split", [{DEVICE: 0.3, HOST: 0.7}, {HOST: 0.5, DISK: 0.5}, {DEVICE: 0.2, HOST: 0.3, DISK: 0.5}]
)
def test_the_laws_look_at_the_farthest_part_of_a_mix(split):
    mixed = Placement(True, split)
    for params, grads in product((whole(), part(mixed.farthest), mixed), (part(mixed.farthest), mixed)):
        assert Plan(params, grads, mixed).optim == mixed
    with pytest.raises(PlanError, match="law 2"):
        Plan(whole(), whole(), Placement(False, split))
    with pytest.raises(PlanError, match="law 3"):
        Plan(whole(), mixed, part(Tier(mixed.farthest - 1)))


@pytest.mark.parametrize("kind", ["params", "grads", "optim"])
def test_a_plan_takes_placements_only_and_names_the_kind(kind):
    cells = {"params": part(), "grads": part(), "optim": part()} | {kind: HOST}
    with pytest.raises(PlanError, match=f"{kind} of a Plan is a Placement"):
        Plan(**cells)


def test_plan_errors_are_both_onefold_and_value_errors():
    with pytest.raises(OnefoldError, match="law 1"):
        Plan(part(), whole(), whole())
    with pytest.raises(ValueError, match="law 1"):
        Plan(part(), whole(), whole())
