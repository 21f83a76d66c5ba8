"""Promise: 16-bit training loses nothing it did not say it would.

A split master is an fp32 master in 14 bytes instead of 16; an fp16 overflow on one rank skips the step on all of them
and leaves no trace; a loss scale is never seen outside; what a precision does not name keeps its dtype.
"""

import functools

import pytest
import torch
from torch import nn

import onefold
from checks import differing, grads, weights
from models import Stack, build
from onefold import DynamicLossScale, Precision
from onefold.comm import reductions
from onefold.engine import gradients
from pairs import pairwise
from plans import NAMED_PLANS, PLANS, every_plan, one_and_two_ranks
from ranks import Turn

SPLIT, WHOLE = Precision(params="bf16"), Precision(params="bf16", master="fp32")


def bits(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def model_bytes(budget):
    return sum(sum(kind.values()) for kind in (budget.params_bytes, budget.grads_bytes, budget.optim_bytes))


# --- master weights


def step_by_step(rank, plan, precision, steps=12):
    """Weights after every step."""
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], precision=precision)
    optimizer = onefold.AdamW(model, lr=1e-3, weight_decay=0.1, max_grad_norm=1.0)
    history = []
    for step in range(steps):
        model(Turn(rank, step, sharded=True).randn(5, 4)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(bits(weights(model)))
    return history


def by_hand(num_ranks, steps=12):
    """The same with plain PyTorch: an fp32 copy, updated by torch.optim.AdamW and rounded to bf16 for each forward."""
    exact = build(Stack)
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
    history = []
    for step in range(steps):
        rounded = build(Stack)
        rounded.load_state_dict(exact.state_dict())
        rounded.bfloat16()
        by_rank = []
        for rank in range(num_ranks):
            rounded.zero_grad()
            x = Turn(rank, step, sharded=False).randn(5, 4).bfloat16()
            rounded(x).float().square().mean().backward()
            by_rank.append([param.grad.float() for param in rounded.parameters()])
        for param, *found in zip(exact.parameters(), *by_rank, strict=True):
            param.grad = (functools.reduce(torch.add, found) / num_ranks).bfloat16().float()
        torch.nn.utils.clip_grad_norm_(exact.parameters(), 1.0)
        optimizer.step()
        history.append({name: param.detach().bfloat16() for name, param in exact.named_parameters()})
    return history


def masters_compared(rank, num_ranks, plan):
    split, whole = step_by_step(rank, plan, SPLIT), step_by_step(rank, plan, WHOLE)
    moved = differing(split[-1], split[0])
    return [differing(*each) for each in zip(split, whole, strict=True)], len(moved) == len(split[-1])


@one_and_two_ranks
@every_plan
def test_a_split_master_trains_as_an_fp32_copy_does(ranks, plan, num_ranks):
    """Without ties, which these numbers do not meet: equal in every bit, after every step."""
    assert ranks(num_ranks).run(masters_compared, plan) == [([[]] * 12, True)] * num_ranks


def master_by_hand(rank, num_ranks):
    found, want = step_by_step(rank, "zero_3", SPLIT), by_hand(num_ranks)
    worst = [
        max((got[name].float() - want[name].float()).abs().max().item() for name in want)
        for got, want in zip(found, want, strict=True)
    ]
    return max(worst)


@one_and_two_ranks
def test_a_split_master_is_mixed_precision_training(ranks, num_ranks):
    """To one rounding of the weights: clipping rounds otherwise here and there."""
    assert max(ranks(num_ranks).run(master_by_hand)) <= 2**-8


def one_tie(rank, num_ranks, precision):
    """A weight that lies half-way between two bf16 numbers: (rounded, master, rounded and master after an update)."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1 + 2**-8)
    model = onefold.shard(model, onefold.ZERO_3, precision=precision)
    optimizer = onefold.SGD(model, lr=2.0**-10)
    found = [weights(model)["weight"].item()]
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(model)["weight"].item())
    return found


TIES = {
    # 1 + 2^-8 is a tie between 1 and 1 + 2^-7; the updates take 2^-10 each, from the exact weight.
    "split": (SPLIT, [1 + 2**-7, 1.0, 1.0]),
    "fp32": (WHOLE, [1.0, 1.0, 1.0]),
}


@one_and_two_ranks
@pytest.mark.parametrize("master", list(TIES))
def test_only_a_tie_is_rounded_otherwise(ranks, master, num_ranks):
    precision, want = TIES[master]
    assert ranks(num_ranks).run(one_tie, precision) == [want] * num_ranks


def small_updates(rank, num_ranks, precision):
    """Updates of 2^-12 vanish in bf16 weights of 1, and add up in exact ones."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model = onefold.shard(model, onefold.ZERO_3, precision=precision)
    optimizer = onefold.SGD(model, lr=2.0**-12)
    for _ in range(64):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)["weight"].item()


@pytest.mark.parametrize("master", list(TIES))
def test_updates_smaller_than_a_weights_rounding_add_up(ranks, master):
    assert ranks(2).run(small_updates, TIES[master][0]) == [1 - 64 * 2.0**-12] * 2


def bytes_a_parameter(rank, num_ranks, plan, precision):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], precision=precision)
    optimizer = onefold.AdamW(model)
    model(torch.ones(2, 4)).float().sum().backward()
    optimizer.step()
    padded = onefold.predicted(model, optimizer).padding_numel + sum(p.numel() for p in model.parameters())
    return model_bytes(onefold.measured(model, optimizer)) * num_ranks / padded


BYTES = {
    "bf16": (SPLIT, 14),
    "bf16, whole master": (WHOLE, 16),
    "bf16, reduced in fp32": (Precision(params="bf16", reduce="fp32"), 16),
    "fp16": (Precision(params="fp16", loss_scale="dynamic"), 16),
    "fp32": (Precision(params="fp32"), 16),
    "as is": (Precision(), 16),
}


@one_and_two_ranks
@pytest.mark.parametrize("precision", list(BYTES))
def test_bytes_a_parameter(ranks, precision, num_ranks):
    dtypes, want = BYTES[precision]
    assert ranks(num_ranks).run(bytes_a_parameter, "zero_3", dtypes) == [want] * num_ranks


# --- fp16: an overflow on one rank


GOOD, BAD = 1.0, 1e4
"""What the inputs of the last rank are multiplied by: the other makes its gradients overflow."""


def overflow(rank, num_ranks, plan, loss_scale, sizes):
    """(skipped, loss scale, norm is finite, weights moved) of every step, and the weights at the end."""
    precision = Precision(params="fp16", loss_scale=loss_scale)
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], precision=precision)
    optimizer = onefold.AdamW(model, lr=1e-2, max_grad_norm=1.0)
    before, seen = weights(model), []
    for step, size in enumerate(sizes):
        x = Turn(rank, step, sharded=True).randn(3, 4) * (size if rank == num_ranks - 1 else GOOD)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = weights(model)
        is_finite = optimizer.grad_norm < float("inf")
        seen.append((optimizer.skipped, optimizer.loss_scale, is_finite, differing(after, before) != []))
        before = after
    return seen, before


OVERFLOWS = {
    # loss scale, sizes of the inputs, and (skipped, loss scale, finite, moved) of each step
    "fixed": (8.0, [GOOD, BAD, GOOD], [(False, 8, True, True), (True, 8, False, False), (False, 8, True, True)]),
    "none": (None, [GOOD, BAD, GOOD], [(False, 1, True, True), (True, 1, False, False), (False, 1, True, True)]),
    "halves at once": (
        DynamicLossScale(initial=8.0, hysteresis=1),
        [GOOD, BAD, GOOD],
        [(False, 8, True, True), (True, 4, False, False), (False, 4, True, True)],
    ),
    "halves at the second": (
        DynamicLossScale(initial=8.0, hysteresis=2),
        [BAD, BAD, GOOD],
        [(True, 8, False, False), (True, 4, False, False), (False, 4, True, True)],
    ),
    "doubles again": (
        DynamicLossScale(initial=8.0, hysteresis=1, window=1),
        [BAD, GOOD, GOOD],
        [(True, 4, False, False), (False, 4, True, True), (False, 8, True, True)],
    ),
}


@pairwise(case=list(OVERFLOWS), plan=PLANS, num_ranks=(1, 2))
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, case, plan, num_ranks):
    loss_scale, sizes, want = OVERFLOWS[case]
    results = ranks(num_ranks).run(overflow, plan, loss_scale, sizes)
    assert [seen for seen, _ in results] == [want] * num_ranks


def with_and_without(rank, num_ranks, plan):
    """Weights after steps around a skipped one, and after the same steps without it."""
    with_it = _trained_on(rank, num_ranks, plan, [GOOD, BAD, GOOD])
    without = _trained_on(rank, num_ranks, plan, [GOOD, None, GOOD])
    return differing(with_it, without)


def _trained_on(rank, num_ranks, plan, sizes):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], precision=Precision(params="fp16", loss_scale=8.0))
    optimizer = onefold.AdamW(model, lr=1e-2)
    for step, size in enumerate(sizes):
        if size is not None:
            x = Turn(rank, step, sharded=True).randn(3, 4) * (size if rank == num_ranks - 1 else GOOD)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@every_plan
def test_a_skipped_step_leaves_no_trace_in_the_optimizer(ranks, plan):
    assert ranks(2).run(with_and_without, plan) == [[], []]


# --- the loss scale is never seen outside


def scaled_gradients(rank, num_ranks, plan, loss_scale, is_in_place=False):
    model = build(Stack)
    model = onefold.shard(model, NAMED_PLANS[plan], precision=Precision(params="fp16", loss_scale=loss_scale))
    optimizer = onefold.SGD(model, lr=0.0)
    x = Turn(rank, 0, sharded=True).randn(3, 4).requires_grad_()
    output = model(x)
    output.retain_grad()
    if is_in_place:
        output *= 3
    loss = output.float().square().mean()
    loss.backward()
    found = grads(model)
    optimizer.step()
    return found, optimizer.grad_norm, x.grad, output.grad


@every_plan
@pytest.mark.parametrize("loss_scale", [256.0, DynamicLossScale(initial=256.0)], ids=["fixed", "dynamic"])
def test_gradients_are_unscaled_wherever_they_are_read(ranks, loss_scale, plan):
    """A power of two scales nothing but exponents: up to numbers too small for fp16, the bits are those without it."""
    scaled, unscaled = (ranks(2).run(scaled_gradients, plan, scale) for scale in (loss_scale, None))
    for (found, norm, inward, _), (want, want_norm, want_inward, _) in zip(scaled, unscaled, strict=True):
        assert all(torch.allclose(found[name], want[name], rtol=2e-3, atol=2e-6) for name in want)
        assert min(want[name].abs().max() for name in want) > 1e-3
        assert norm == pytest.approx(want_norm, rel=1e-3)
        assert torch.allclose(inward, want_inward, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("plan", ["zero_0", "zero_3"])
def test_outputs_may_be_changed_in_place(ranks, plan):
    scaled, unscaled = (ranks(2).run(scaled_gradients, plan, scale, True) for scale in (256.0, None))
    for (found, norm, inward, _), (want, want_norm, want_inward, _) in zip(scaled, unscaled, strict=True):
        assert all(torch.allclose(found[name], want[name], rtol=2e-3, atol=2e-6) for name in want)
        assert norm == pytest.approx(want_norm, rel=1e-3)
        assert torch.allclose(inward, want_inward, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("plan", ["zero_0", "zero_3"])
def test_the_gradient_retained_on_an_output_is_unscaled(ranks, plan):
    scaled, unscaled = (ranks(2).run(scaled_gradients, plan, scale) for scale in (256.0, None))
    for (*_, outward), (*_, want) in zip(scaled, unscaled, strict=True):
        assert torch.allclose(outward, want, rtol=2e-3, atol=2e-6)


# --- what gradients are summed in


def summed(rank, num_ranks, plan, reduce, is_accumulated):
    """The norm of a gradient that is 256 in one place and 1 in another: added over ranks, or over micro-batches."""
    model = nn.Linear(1, 1, bias=False)
    model = onefold.shard(model, NAMED_PLANS[plan], precision=Precision(params="bf16", reduce=reduce))
    optimizer = onefold.SGD(model, lr=0.0)
    if is_accumulated:
        with onefold.accumulate(model):
            model(torch.full((1, 1), 256.0)).sum().backward()
        model(torch.full((1, 1), 1.0)).sum().backward()
    else:
        model(torch.full((1, 1), 256.0 if rank == 0 else 1.0)).sum().backward()
    optimizer.step()
    return optimizer.grad_norm


@every_plan
@pytest.mark.parametrize(
    ("is_accumulated", "reduce", "want"),
    [(False, None, 128.0), (False, "fp32", 128.5), (True, None, 256.0), (True, "fp32", 257.0)],
)
def test_gradients_are_summed_and_kept_in_the_dtype_of_reduce(ranks, is_accumulated, reduce, want, plan):
    """bf16 has no 128.5 and no 257."""
    assert ranks(2).run(summed, plan, reduce, is_accumulated) == [want, want]


# --- what a precision does not name


class Normed(nn.Module):
    """Batch norm and buffers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("offset", torch.full((4,), 1 / 3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        x = self.norm(self.conv(x)).mean(-1) + self.offset.to(x.dtype)
        return self.head(x)


def normed(rank, num_ranks, plan, dtype):
    model = onefold.shard(build(Normed), NAMED_PLANS[plan], precision=Precision(params=dtype))
    optimizer = onefold.AdamW(model, lr=1e-2)
    before = weights(model)
    for step in range(3):
        model(Turn(rank, step, sharded=True).randn(4, 2, 5)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = weights(model)
    return {name: tensor.dtype for name, tensor in after.items()}, differing(after, before), after


@every_plan
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_batch_norm_and_buffers_keep_their_dtypes_and_train(ranks, dtype, plan):
    for dtypes, moved, after in ranks(2).run(normed, plan, dtype):
        wide = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
        integers = {"norm.num_batches_tracked", "count"}
        own = {**dict.fromkeys(wide, torch.float32), **dict.fromkeys(integers, torch.int64), "offset": torch.float64}
        assert dtypes == {name: own.get(name, dtype) for name in dtypes}
        # A bias before batch norm has a gradient of zero but for rounding.
        assert set(moved) | {"conv.bias"} == set(dtypes) - {"offset"} | {"conv.bias"}
        assert after["count"] == 3
        assert all(torch.isfinite(tensor.float()).all() for tensor in after.values())


# --- the norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [0, 16, 4096, 4112, 100_000])
def test_squares_summed_by_rows_are_the_exact_ones_to_rounding(numel, dtype):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    quick, exact = reductions._squares_by_rows(values), reductions.exact_squares(values)
    assert quick.dtype == torch.float64
    assert float(quick) == pytest.approx(float(exact), rel=1e-5)


def test_finite_gradients_that_overflow_a_quick_sum_are_no_overflow(monkeypatch):
    """On a GPU rows are summed in fp32, whose largest number is about 3e38."""
    monkeypatch.setattr(gradients, "squares", reductions._squares_by_rows)
    model = onefold.shard(nn.Linear(64, 64, bias=False), onefold.ZERO_2)
    optimizer = onefold.SGD(model, lr=0.0)
    (model(torch.ones(1, 64)).sum() * 1e25).backward()
    optimizer.step()
    assert not optimizer.skipped
    assert optimizer.grad_norm == pytest.approx(64e25, rel=1e-5)
