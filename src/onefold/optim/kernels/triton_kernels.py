"""Owns the device code of the fused update, in Triton: one pass over a run; and of the mean over ranks. Imported by
`fused.py` alone, when needed.

Invariant: operations and their order are those of csrc/rules.h and csrc/forms.h, and so are the numbers of rules and
forms and the order of `scalars`. What those write as one fused multiply-add is `tl.fma` here; launched with
`enable_fp_fusion=False`, the compiler adds no others. Roots and quotients are IEEE's. Nothing depends on an element's
position.
"""
# Triton has no annotations, and reads those of its kernels as its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

_OWN, _SPLIT = tl.constexpr(0), tl.constexpr(1)
_ADAM, _ADAM_AMSGRAD, _ADAMW, _ADAMW_AMSGRAD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_SGD, _SGD_FIRST, _SGD_MOMENTUM, _LION = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)


@triton.jit
def _join(weight, low):
    own = weight.to(tl.int16, bitcast=True).to(tl.int32)
    bits = low.to(tl.int32)
    bits = tl.where(((own & 0x7FFF) == 0) & (bits < 0), 0, bits)  # a zero that was written since
    top = own + (bits >> 31)
    return ((top << 16) | (bits & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _split(value):
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits >> 16) + ((bits >> 15) & 1)
    # A NaN's low half could carry past the NaNs: its weight is set, its payload given up.
    top = tl.where(value != value, 0x7FC0, rounded).to(tl.int16)
    return top.to(tl.bfloat16, bitcast=True), bits.to(tl.int16)


@triton.jit
def _load_exact(weight, exact, places, mask, FORM: tl.constexpr):
    value = tl.load(weight + places, mask=mask)
    if FORM != _OWN:
        beside = tl.load(exact + places, mask=mask)
        if FORM == _SPLIT:
            value = _join(value, beside)
        else:
            # A weight that is not its copy's rounding was written by the user since (see buffer.CopyMaster).
            written = value.to(tl.float32) != beside.to(value.dtype).to(tl.float32)
            value = tl.where(written, value.to(tl.float32), beside)
    return value


@triton.jit
def _store_exact(weight, exact, places, mask, value, FORM: tl.constexpr):
    if FORM == _OWN:
        tl.store(weight + places, value, mask=mask)
    elif FORM == _SPLIT:
        top, low = _split(value)
        tl.store(weight + places, top, mask=mask)
        tl.store(exact + places, low, mask=mask)
    else:
        tl.store(exact + places, value, mask=mask)
        tl.store(weight + places, value.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def _decayed(grad, weight, decay):
    # Untouched without decay: 0 * inf would make a NaN.
    return tl.where(decay != 0.0, tl.fma(weight, decay, grad), grad)


@triton.jit
def _adam(value, grad, state, places, mask, scalars, DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr):
    blend, beta2, rest2, correction2, eps, rate, decay = scalars
    if DECOUPLED:
        value = value * decay
    else:
        grad = _decayed(grad, value, decay)
    mean = tl.load(state[0] + places, mask=mask)
    square = tl.load(state[1] + places, mask=mask)
    # torch's lerp starts from the nearer end.
    near = blend < 0.5
    mean = tl.fma(tl.where(near, blend, blend - 1.0), grad - mean, tl.where(near, mean, grad))
    square = tl.fma(rest2 * grad, grad, square * beta2)
    greatest = square
    if AMSGRAD:
        old = tl.load(state[2] + places, mask=mask)
        greatest = tl.where((old >= square) | (old != old), old, square)  # a NaN on either side stays
        tl.store(state[2] + places, greatest, mask=mask)
    tl.store(state[0] + places, mean, mask=mask)
    tl.store(state[1] + places, square, mask=mask)
    return value + tl.div_rn(rate * mean, tl.div_rn(tl.sqrt_rn(greatest), correction2) + eps)


@triton.jit
def _sgd_momentum(value, grad, buffer, places, mask, scalars, FIRST: tl.constexpr):
    rate, decay, momentum, damped, nesterov = scalars
    moved = _decayed(grad, value, decay)
    grad = moved
    if not FIRST:
        moved = tl.fma(grad, damped, tl.load(buffer + places, mask=mask) * momentum)
    tl.store(buffer + places, moved, mask=mask)
    return tl.fma(tl.where(nesterov != 0.0, tl.fma(moved, momentum, grad), moved), rate, value)


@triton.jit
def _lion(value, grad, momentum, places, mask, scalars):
    rate, decay, beta1, rest1, beta2, rest2 = scalars
    old = tl.load(momentum + places, mask=mask)
    blend = tl.fma(grad, rest1, old * beta1)
    sign = tl.where(blend > 0.0, 1.0, 0.0) - tl.where(blend < 0.0, 1.0, 0.0)  # 0 for a NaN, as torch has it
    tl.store(momentum + places, tl.fma(grad, rest2, old * beta2), mask=mask)
    return tl.fma(sign, rate, value * decay)


@triton.jit
def _adagrad(value, grad, total, places, mask, rate, eps, decay):
    grad = _decayed(grad, value, decay)
    square = tl.fma(grad, grad, tl.load(total + places, mask=mask))
    tl.store(total + places, square, mask=mask)
    return value + tl.div_rn(rate * grad, tl.sqrt_rn(square) + eps)


@triton.jit
def _block(weight, exact, grad, state, places, mask, factors, scalars, RULE: tl.constexpr, FORM: tl.constexpr):
    s0, s1, s2, s3, s4, s5, _ = scalars
    value = _load_exact(weight, exact, places, mask, FORM)
    wide = tl.load(grad + places, mask=mask).to(tl.float32) * factors[0] * factors[1]
    if RULE <= _ADAMW_AMSGRAD:
        value = _adam(value, wide, state, places, mask, scalars, RULE >= _ADAMW, RULE % 2 == _ADAM_AMSGRAD)
    elif RULE == _SGD:
        value = tl.fma(_decayed(wide, value, s1), s0, value)
    elif RULE <= _SGD_MOMENTUM:
        value = _sgd_momentum(value, wide, state[0], places, mask, (s0, s1, s2, s3, s4), RULE == _SGD_FIRST)
    elif RULE == _LION:
        value = _lion(value, wide, state[0], places, mask, (s0, s1, s2, s3, s4, s5))
    else:
        value = _adagrad(value, wide, state[0], places, mask, s0, s1, s2)
    _store_exact(weight, exact, places, mask, value, FORM)


@triton.jit(do_not_specialize=["numel"])
def update(
    weight,
    exact,
    grad,
    state0,
    state1,
    state2,
    numel,
    factor0,
    factor1,
    s0,
    s1,
    s2,
    s3,
    s4,
    s5,
    s6,
    RULE: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update `numel` elements from the pointers on, one block a program. Pointers a rule has no use for are None."""
    state, factors, scalars = (state0, state1, state2), (factor0, factor1), (s0, s1, s2, s3, s4, s5, s6)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    # Without a mask loads and stores are as wide as the pointers allow, whatever the length of the run.
    if start + BLOCK <= numel:
        _block(weight, exact, grad, state, places, None, factors, scalars, RULE, FORM)
    else:
        _block(weight, exact, grad, state, places, places < numel, factors, scalars, RULE, FORM)


@triton.jit
def _mean(target, rows, row_numel, places, mask, NUM_ROWS: tl.constexpr):
    total = tl.load(rows + places, mask=mask).to(tl.float32)
    for row in tl.static_range(1, NUM_ROWS):
        total += tl.load(rows + row * row_numel + places, mask=mask).to(tl.float32)
    tl.store(target + places, tl.div_rn(total, NUM_ROWS * 1.0).to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["numel"])
def mean(target, rows, row_numel, numel, NUM_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Put the mean of `NUM_ROWS` rows, `row_numel` apart, into `numel` elements of `target`: `sums.mean_of_rows`."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:  # as in `update`
        _mean(target, rows, row_numel, places, None, NUM_ROWS)
    else:
        _mean(target, rows, row_numel, places, places < numel, NUM_ROWS)
