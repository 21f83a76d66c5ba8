"""Promise: the schedules give DeepSpeed's learning rates, number for number, and go on after a resume as before."""

import math

import pytest
import torch

from onefold.deepspeed import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from onefold.deepspeed.schedules import SCHEDULES
from onefold.errors import ConfigError


def optimizer(*lrs, cls=torch.optim.Adam):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.1,)]
    return cls(groups)


def rates(schedule, num_steps):
    """The first group's rate before the first step and after each of `num_steps`."""
    group = schedule.optimizer.param_groups[0]
    seen = [group["lr"]]
    for _ in range(num_steps):
        schedule.step()
        seen.append(group["lr"])
        assert schedule.get_last_lr()[0] == schedule.get_lr()[0] == group["lr"]
    return seen


LOG4 = [math.log(n) / math.log(4) for n in (1, 2, 3, 4)]  # 0, 1/2, 0.79, 1

# Worked out by hand from the formulas: the rate before step 0 and after steps 0, 1, 2, ...
CURVES = [
    (WarmupLR, {"warmup_max_lr": 0.8, "warmup_num_steps": 4}, [0, *(0.8 * x for x in LOG4), 0.8, 0.8]),
    (WarmupLR, {"warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.025, 0.05, 0.075, 0.1, 0.1]),
    (WarmupLR, {"warmup_min_lr": 0.2, "warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"},
     [0.2, 0.2, 0.4, 0.6, 0.8, 1.0]),
    (WarmupLR, {"warmup_num_steps": 0}, [0, 0, 0.1, 0.1]),  # at least two steps: log(1) / log(2), log(2) / log(2)
    (WarmupDecayLR, {"total_num_steps": 8, "warmup_max_lr": 0.8, "warmup_num_steps": 4},
     [0, *(0.8 * x for x in LOG4), 0.8, 0.6, 0.4, 0.2, 0, 0]),
    (WarmupDecayLR, {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear", "warmup_min_lr": 0.0005},
     [0.0005, 0.0005, 0.00075, 0.001, 0.000875, 0.00075, 0.000625, 0.0005]),
    (WarmupDecayLR, {"total_num_steps": 2, "warmup_num_steps": 4}, [0, *(0.001 * x for x in LOG4), 0, 0]),
    (WarmupCosineLR, {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear", "cos_min_ratio": 0.2},
     [0, 0, 0.05, *(0.1 * (0.2 + 0.8 * (1 + math.cos(math.pi * n / 4)) / 2) for n in (1, 2, 3, 4)), 0.02]),
    (WarmupCosineLR, {"total_num_steps": 3, "warmup_min_ratio": 0.5, "warmup_num_steps": 4},
     [0, *(0.1 * (0.5 + 0.5 * x) for x in LOG4), 1e-5, 1e-5]),
    (LRRangeTest, {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 4.0},
     [0.01, 0.03, 0.05, 0.07, 0.09]),
    (LRRangeTest, {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
     [0.01, 0.01, 0.02, 0.02, 0.03]),
    (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_second_step_size": 2},
     [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.1, 0.1]),
    (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_first_stair_count": 2},
     [0.1, 0.1, 0.3, 0.3, 0.5, 0.3, 0.3, 0.1, 0.1]),
    (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 1, "decay_step_size": 2,
                "decay_lr_rate": 0.5},
     [0.1, 0.5, 0.1, 0.1 / 1.25, 0.1 / 1.5, 0.1 / 1.75]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "arguments", "curve"), CURVES, ids=[f"{cls.__name__}-{n}" for n, (cls, *_) in enumerate(CURVES)]
)
def test_a_schedule_gives_the_rates_of_its_formula(cls, arguments, curve):
    assert rates(cls(optimizer(), **arguments), len(curve) - 1) == pytest.approx(curve, rel=1e-12, abs=1e-15)


def test_one_cycle_moves_the_first_beta_the_other_way():
    adam = optimizer()
    schedule = OneCycle(adam, 0.1, 0.5, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.1)
    seen = [adam.param_groups[0]["betas"]]
    for _ in range(6):
        schedule.step()
        seen.append(adam.param_groups[0]["betas"])
    firsts = [0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.1, 0.9 * 1.2]
    assert [first for first, _ in seen] == pytest.approx(firsts)
    assert {second for _, second in seen} == {0.99}
    sgd = optimizer(cls=torch.optim.SGD)
    OneCycle(sgd, 0.1, 0.5).step()
    assert "betas" not in sgd.param_groups[0]


RESUMED = {
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_num_steps": 5},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 3},
    "LRRangeTest": {"lr_range_test_step_size": 3},
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_resumed_schedule_goes_on_where_it_was(name):
    whole = SCHEDULES[name](optimizer(0.3, 0.1), **RESUMED[name])
    for _ in range(4):
        whole.step()
    resumed = SCHEDULES[name](optimizer(0.3, 0.1), **RESUMED[name])
    resumed.load_state_dict(whole.state_dict())
    for _ in range(6):
        whole.step()
        resumed.step()
        assert resumed.get_last_lr() == whole.get_last_lr()


def test_groups_have_rates_of_their_own_or_are_refused():
    two = optimizer(0.1, 0.2)
    schedule = WarmupLR(two, [0.0, 0.1], [1.0, 2.0], 2, "linear")
    schedule.step(1)
    assert [group["lr"] for group in two.param_groups] == [0.5, 1.05]
    with pytest.raises(ConfigError, match="warmup_min_lr: 3 values for 2 parameter groups"):
        WarmupLR(two, [0.0, 0.0, 0.0])


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    rate = sgd.param_groups[0]["lr"]
    schedule = WarmupLR(sgd, warmup_max_lr=1.0, warmup_num_steps=2)
    schedule.step(5)
    assert sgd.param_groups[0]["lr"] is rate
    assert rate.item() == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda adam: WarmupLR(adam, warmup_num_steps=-1),
        lambda adam: WarmupLR(adam, warmup_type="cosine"),
        lambda adam: LRRangeTest(adam, lr_range_test_step_size=0),
        lambda adam: OneCycle(adam, 0.1, 0.2, cycle_first_step_size=0),
    ],
    ids=["negative", "type", "size", "cycle"],
)
def test_an_impossible_schedule_is_refused(make):
    with pytest.raises(ConfigError, match="expected"):
        make(optimizer())
