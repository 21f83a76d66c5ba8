"""Promise: a `Precision` that exists is consistent, and `split`/`join` lose no bit of an fp32 master weight."""

import pytest
import torch

from onefold import DynamicLossScale, Precision
from onefold.errors import PrecisionError
from onefold.plan.precision import join, split

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TIE = 0x8000
EXTREMES = {
    "zero": 0x00000000,
    "minus zero": 0x80000000,
    "least denormal": 0x00000001,
    "greatest denormal": 0x007FFFFF,
    "minus greatest denormal": 0x807FFFFF,
    "denormal tie": 0x00008000,
    "least normal": 0x00800000,
    "greatest finite": 0x7F7FFFFF,
    "minus greatest finite": 0xFF7FFFFF,
    "infinity": 0x7F800000,
    "minus infinity": 0xFF800000,
}


def floats(bits):
    """fp32 values of the given bit patterns (python integers or an int64 tensor in [0, 2**32))."""
    bits = torch.as_tensor(bits, dtype=torch.int64)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def low_bits(values):
    return values.view(torch.int32) & 0xFFFF


def random_floats(numel=1 << 20, seed=0):
    """Random fp32 bit patterns: every exponent and sign is equally likely. NaNs left out."""
    values = floats(torch.randint(0, 2**32, (numel,), generator=torch.Generator().manual_seed(seed)))
    return values[~values.isnan()]


def sweep():
    """Every upper half with the low halves where rounding turns, and every low half with a few upper halves."""
    high, low = torch.arange(2**16), torch.arange(2**16)
    patterns = [(high << 16) | turn for turn in (0x0000, 0x0001, 0x7FFF, TIE, 0x8001, 0xFFFF)]
    patterns += [(turn << 16) | low for turn in (0x0000, 0x8000, 0x0080, 0x3F80, 0xBF81, 0x7F7F, 0xFF7F)]
    values = floats(torch.cat(patterns))
    return values[~values.isnan()]


def same_bits(a, b):
    """Equal bit for bit, so that -0.0 differs from 0.0."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("values", [random_floats, sweep])
def test_join_undoes_split_bit_for_bit(values):
    master = values()
    weight, low = split(master)
    assert (weight.dtype, low.dtype, weight.shape, low.shape) == (BF16, torch.int16, master.shape, master.shape)
    assert same_bits(join(weight, low), master)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_written_over_any_weight_stays_zero(zero):
    low = torch.arange(2**16).to(torch.int16)
    weight = torch.full((2**16,), zero, dtype=BF16)
    assert torch.equal(split(join(weight, low))[0].view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize("pattern", EXTREMES.values(), ids=EXTREMES.keys())
def test_extreme_values_survive_and_their_weight_is_the_nearest(pattern):
    master = floats([pattern])
    weight, low = split(master)
    assert same_bits(join(weight, low), master)
    assert torch.equal(weight.signbit(), master.signbit())
    if pattern & 0xFFFF != TIE:
        assert torch.equal(weight.view(torch.int16), master.to(BF16).view(torch.int16))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 5)])
def test_split_keeps_any_shape(shape):
    master = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight, low = split(master)
    assert weight.shape == low.shape == master.shape
    assert same_bits(join(weight, low), master)


@pytest.mark.parametrize("values", [random_floats, sweep])
def test_the_weight_is_rounded_to_nearest_even_except_on_ties(values):
    master = values()
    plain = master[low_bits(master) != TIE]
    assert torch.equal(split(plain)[0].view(torch.int16), plain.to(BF16).view(torch.int16))


def test_on_a_tie_the_weight_goes_away_from_zero_where_nearest_even_may_not():
    high = torch.arange(2**16)
    high = high[(high & 0x7F80) != 0x7F80]  # no infinities, no NaNs
    ties = floats((high << 16) | TIE)
    ours, nearest_even = split(ties)[0].view(torch.int16), ties.to(BF16).view(torch.int16)
    away = floats((high + 1) << 16).to(BF16).view(torch.int16)
    even = high % 2 == 0
    assert torch.equal(ours, away)
    assert torch.equal(ours[~even], nearest_even[~even])
    assert torch.equal(nearest_even[even].to(torch.int32) & 0xFFFF, high[even].to(torch.int32))  # stays where we move
    one_and_a_half_steps = floats([0x3F808000])
    assert split(one_and_a_half_steps)[0].item() == 1.0078125
    assert one_and_a_half_steps.to(BF16).item() == 1.0


@pytest.mark.parametrize(
    "pattern",
    [
        0x7FC00000,
        0xFFC00000,
        0x7F81ABCD,
        # CUDA's own NaN is 0x7FFFFFFF: rounding carries out of the exponent and the weight comes out as -0.0.
        0x7FFFFFFF,
        0xFFFFFFFF,
        0x7F800001,
    ],
    ids=hex,
)
def test_a_nan_master_gives_a_nan_weight(pattern):
    weight, low = split(floats([pattern]))
    assert weight.isnan().all()
    assert join(weight, low).isnan().all()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"params": "int8"}, "'int8'"),
        ({"params": torch.float64}, "torch.float64"),
        ({"params": 16}, "16"),
        ({"reduce": "double"}, "'double'"),
        ({"reduce": torch.int32}, "torch.int32"),
        ({"master": "none"}, "'none'"),
        ({"loss_scale": "static"}, "'static'"),
        ({"loss_scale": True}, "True"),
        ({"loss_scale": 0}, "0"),
        ({"loss_scale": -2.0}, "-2.0"),
        ({"loss_scale": float("inf")}, "inf"),
        ({"loss_scale": float("nan")}, "nan"),
    ],
    ids=str,
)
def test_a_precision_without_meaning_is_refused_by_field_and_value(settings, named):
    (field,) = settings
    with pytest.raises(PrecisionError) as refused:
        Precision(**settings)
    assert f"{field}={named}" in str(refused.value)
    assert "choose" in str(refused.value) or "positive" in str(refused.value)


@pytest.mark.parametrize("field", ["initial", "window", "hysteresis", "minimum"])
def test_a_dynamic_loss_scale_refuses_zero_and_shows_itself(field):
    with pytest.raises(PrecisionError, match=f"{field}=0"):
        DynamicLossScale(**{field: 0})


def test_dynamic_means_the_default_rule():
    assert Precision(loss_scale="dynamic").loss_scale == DynamicLossScale()
    assert Precision(loss_scale=DynamicLossScale(window=7)).loss_scale.window == 7
    assert Precision(loss_scale=128).loss_scale == 128
    assert Precision().loss_scale is None


@pytest.mark.parametrize(
    ("names", "dtype"), [(("bf16", "bfloat16"), BF16), (("fp16", "float16"), FP16), (("fp32", "float32"), FP32)]
)
def test_dtypes_may_be_written_as_names(names, dtype):
    for value in (*names, dtype):
        assert Precision(params=value, reduce=value) == Precision(params=dtype, reduce=dtype)
        assert Precision(params=value).params is dtype


@pytest.mark.parametrize("own", [BF16, FP16, FP32, torch.float64, torch.int32])
def test_without_a_choice_each_parameter_keeps_its_own_dtype(own):
    assert Precision().param_dtype(own) is own
    assert Precision().grad_dtype(own) is own


def test_a_choice_casts_floating_point_and_nothing_else():
    precision = Precision(params="bf16", reduce="fp32")
    assert precision.param_dtype(FP32) is BF16
    assert precision.param_dtype(torch.int32) is torch.int32
    assert precision.grad_dtype(BF16) is FP32


@pytest.mark.parametrize(
    ("param", "master", "form"),
    [
        (BF16, "split", "split"),
        (BF16, "fp32", "fp32"),
        (FP16, "split", "fp32"),
        (FP16, "fp32", "fp32"),
        (FP32, "split", "own"),
        (FP32, "fp32", "own"),
    ],
)
def test_master_weights_take_the_form_their_parameter_needs(param, master, form):
    assert Precision(master=master).master_form(param) == form
