"""Promise: the dynamic loss scale moves exactly as DeepSpeed's does, and a fixed one does not move."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold import DynamicLossScale
from onefold.engine.loss_scale import LossScaler, Scaler, StaticScaler, make_scaler
from onefold.errors import LossScaleError

# Each table: the configuration, then (overflow?, scale afterwards, allowance afterwards) for every step, by hand.
GOOD, OVER = False, True
TABLES = {
    "doubles after window + 1 good steps, then every window": (
        DynamicLossScale(initial=16, window=2),
        [(GOOD, 16, 2), (GOOD, 16, 2), (GOOD, 32, 2), (GOOD, 32, 2), (GOOD, 64, 2), (GOOD, 64, 2), (GOOD, 128, 2)],
    ),
    "window of one": (
        DynamicLossScale(initial=16, window=1),
        [(GOOD, 16, 2), (GOOD, 32, 2), (GOOD, 64, 2), (OVER, 64, 1), (GOOD, 64, 1), (GOOD, 128, 2)],
    ),
    "hysteresis 1: every overflow halves": (
        DynamicLossScale(initial=16, window=2, hysteresis=1),
        [(OVER, 8, 1), (GOOD, 8, 1), (OVER, 4, 1), (OVER, 2, 1), (GOOD, 2, 1), (GOOD, 2, 1), (GOOD, 4, 1)],
    ),
    "hysteresis 2: one overflow is let pass, good steps do not refill the allowance, doubling does": (
        DynamicLossScale(initial=16, window=2, hysteresis=2),
        [
            *[(OVER, 16, 1), (GOOD, 16, 1), (OVER, 8, 1), (OVER, 4, 1)],
            *[(GOOD, 4, 1), (GOOD, 4, 1), (GOOD, 8, 2)],
            *[(OVER, 8, 1), (OVER, 4, 1)],
        ],
    ),
    "hysteresis 3": (
        DynamicLossScale(initial=16, window=9, hysteresis=3),
        [(OVER, 16, 2), (OVER, 16, 1), (OVER, 8, 1), (OVER, 4, 1)],
    ),
    "an overflow that is let pass restarts the window": (
        DynamicLossScale(initial=16, window=2, hysteresis=2),
        [(GOOD, 16, 2), (GOOD, 16, 2), (OVER, 16, 1), (GOOD, 16, 1), (GOOD, 16, 1), (GOOD, 32, 2)],
    ),
    "consecutive hysteresis: every good step refills the allowance": (
        DynamicLossScale(initial=16, window=9, hysteresis=2, consecutive_hysteresis=True),
        [(OVER, 16, 1), (GOOD, 16, 2), (OVER, 16, 1), (GOOD, 16, 2), (OVER, 16, 1), (OVER, 8, 1), (GOOD, 8, 2)],
    ),
    "the minimum holds the scale": (
        DynamicLossScale(initial=8, hysteresis=1, minimum=3, raise_at_minimum=False),
        [(OVER, 4, 1), (OVER, 3, 1), (OVER, 3, 1), (OVER, 3, 1)],
    ),
    "the scale leaves the minimum again": (
        DynamicLossScale(initial=2, window=1, hysteresis=1, minimum=1),
        [(OVER, 1, 1), (GOOD, 1, 1), (GOOD, 2, 1), (OVER, 1, 1)],
    ),
    "at the minimum an allowance is used up first": (
        DynamicLossScale(initial=1, hysteresis=3, minimum=1),
        [(OVER, 1, 2), (OVER, 1, 1)],
    ),
}


@pytest.mark.parametrize(("config", "steps"), TABLES.values(), ids=TABLES)
def test_moves_as_worked_out_by_hand(config, steps):
    scaler = LossScaler(config)
    assert scaler.scale == config.initial
    for number, (overflow, scale, allowance) in enumerate(steps):
        scaler.update(overflow)
        assert (number, scaler.scale, scaler.cur_hysteresis) == (number, scale, allowance)


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_says_so_when_it_cannot_go_lower_and_stays_as_it_was(hysteresis):
    scaler = LossScaler(DynamicLossScale(initial=2, minimum=1, hysteresis=hysteresis))
    for _ in range(hysteresis):
        scaler.update(True)
    before = scaler.state_dict()
    assert scaler.scale == 1
    with pytest.raises(LossScaleError, match=r"already at its minimum of 1.*Lower the learning rate"):
        scaler.update(True)
    assert scaler.state_dict() == before


class Transcription:
    """DeepSpeed's rule, line for line and with its names, written down apart from the code under test."""

    def __init__(self, init_scale, scale_window, min_scale, delayed_shift, consecutive, raise_error):
        self.cur_scale, self.cur_iter, self.last_overflow_iter = init_scale, 0, -1
        self.scale_window, self.min_scale, self.delayed_shift = scale_window, min_scale, delayed_shift
        self.cur_hysteresis, self.consecutive_hysteresis = delayed_shift, consecutive
        self.raise_error_at_min_scale = raise_error

    def update_scale(self, overflow):
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
                    raise OverflowError
                self.cur_scale = max(self.cur_scale / 2, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable_interval = (self.cur_iter - self.last_overflow_iter) - 1
            if stable_interval > 0 and stable_interval % self.scale_window == 0:
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= 2
        self.cur_iter += 1


configs = st.builds(
    DynamicLossScale,
    initial=st.sampled_from([0.5, 1.0, 2.0, 6.0, 2.0**16]),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
    minimum=st.sampled_from([0.25, 1.0, 3.0]),
    raise_at_minimum=st.booleans(),
)
runs = st.lists(st.booleans(), max_size=80)


@given(configs, runs)
def test_follows_the_rule_on_any_run(config, run):
    ours = LossScaler(config)
    theirs = Transcription(
        config.initial,
        config.window,
        config.minimum,
        config.hysteresis,
        config.consecutive_hysteresis,
        config.raise_at_minimum,
    )
    for overflow in run:
        try:
            theirs.update_scale(overflow)
        except OverflowError:
            with pytest.raises(LossScaleError, match="already at its minimum"):
                ours.update(overflow)
            return
        ours.update(overflow)
        assert ours.state_dict() == {
            "scale": theirs.cur_scale,
            "cur_iter": theirs.cur_iter,
            "last_overflow_iter": theirs.last_overflow_iter,
            "cur_hysteresis": theirs.cur_hysteresis,
        }


@given(configs, runs, runs)
def test_a_resumed_scale_goes_on_as_if_never_stopped(config, before, after):
    def follow(scaler, run):
        seen = []
        for overflow in run:
            try:
                scaler.update(overflow)
            except LossScaleError:
                seen.append("raised")
            seen.append(scaler.state_dict())
        return seen

    first = LossScaler(config)
    follow(first, before)
    second = LossScaler(config)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert follow(second, after) == follow(first, after)


@pytest.mark.parametrize(("configured", "scale"), [(None, 1.0), (128, 128.0), (0.5, 0.5)], ids=str)
def test_a_fixed_scale_stays(configured, scale):
    scaler = make_scaler(configured)
    assert isinstance(scaler, StaticScaler)
    for overflow in (True, False, True):
        scaler.update(overflow)
    scaler.load_state_dict(LossScaler(DynamicLossScale()).state_dict())
    assert scaler.scale == scale
    assert scaler.state_dict() == {"scale": scale}


def test_makes_the_dynamic_scaler_from_its_configuration():
    scaler = make_scaler(DynamicLossScale(initial=8.0))
    assert isinstance(scaler, LossScaler)
    assert scaler.scale == 8.0


@pytest.mark.parametrize("loss_scale", [None, 2.0, DynamicLossScale()], ids=str)
def test_every_scaler_has_the_same_face(loss_scale):
    assert isinstance(make_scaler(loss_scale), Scaler)


def test_a_fixed_scales_state_cannot_start_a_dynamic_one():
    with pytest.raises(LossScaleError, match="cur_hysteresis, cur_iter, last_overflow_iter missing"):
        LossScaler(DynamicLossScale()).load_state_dict(StaticScaler(4.0).state_dict())


def test_resuming_with_hysteresis_1_takes_effect_at_once():
    scaler = LossScaler(DynamicLossScale(initial=8.0, hysteresis=1))
    scaler.load_state_dict(LossScaler(DynamicLossScale(initial=8.0, hysteresis=3)).state_dict())
    scaler.update(True)
    assert scaler.scale == 4.0
