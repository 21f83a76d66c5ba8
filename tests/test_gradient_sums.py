"""Promise: gradients that stay as autograd made them until the wire reads them are the sum that a buffer would hold,
and nobody else's tensor is changed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.engine import grad_accumulator
from onefold.engine.grad_accumulator import LocalSum
from onefold.plan.layout import Layout

SHAPES = ((3, 5), (), (0,), (7,), (4, 4))
LAYOUT = Layout.pack([(str(place), shape) for place, shape in enumerate(SHAPES)], 2)
CPU = torch.device("cpu")


def local_sum(may_be_loose, layout=LAYOUT):
    return LocalSum(layout, torch.float32, CPU, may_be_loose)


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch):
    monkeypatch.setattr(grad_accumulator, "_LOOSE_BYTES", 0)


def test_large_gradients_are_taken_as_they_came():
    local, given = local_sum(True), gradients(0)
    local.add(given)
    places = {grad.data_ptr() for grad in given if grad.numel()}
    assert places <= {part.data_ptr() for part in local.take()}
    assert not local.is_there


def test_small_gradients_are_copied_together(monkeypatch):
    monkeypatch.setattr(grad_accumulator, "_LOOSE_BYTES", LAYOUT.numel * 4 + 1)
    local = local_sum(True)
    local.add(gradients(0))
    assert len(local.take()) == 1


missing, turned, scattered = ("missing", "turned", "scattered")
turns = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9), st.sampled_from([None, missing, turned, scattered])),
        st.tuples(st.just("clear"), st.integers(0, len(SHAPES) - 1), st.none()),
        st.tuples(st.just("multiply"), st.sampled_from([0.5, 3.0]), st.none()),
        st.tuples(st.just("take"), st.none(), st.none()),
    ),
    max_size=6,
)


def in_form(grads, form):
    if form == missing:
        grads[3] = None
    elif form == turned:
        grads[4] = grads[4].t()
    elif form == scattered:
        grads[0] = grads[0].to_sparse()
    return grads


def do(local, turn):
    """What a turn gives back, if it does."""
    name, what, form = turn
    if name == "take":
        parts = local.take()
        assert sum(part.numel() for part in parts) == LAYOUT.numel
        return torch.cat(list(parts))
    if name == "add":
        local.add(in_form(gradients(what), form))
    else:
        getattr(local, name)(what)
    return None


@given(turns)
def test_a_loose_sum_is_the_packed_one(turns):
    loose, packed = local_sum(True), local_sum(False)
    for turn in [*turns, ("take", None, None)]:
        got, want = do(loose, turn), do(packed, turn)
        assert loose.is_there == packed.is_there
        assert loose.nbytes == packed.nbytes
        assert want is None or torch.equal(got, want)


def test_what_autograd_made_stays_as_it_was():
    local, first = local_sum(True), gradients(0)
    before = [grad.clone() for grad in first]
    local.add(first)
    local.add(gradients(1))
    local.multiply(2.0)
    local.clear(0)
    assert all(torch.equal(grad, was) for grad, was in zip(first, before, strict=True))


def test_a_single_gradient_that_is_the_whole_buffer_is_not_added_to():
    layout = Layout.pack([("only", (32,))], 2)
    assert layout.numel == 32
    local, first = local_sum(True, layout=layout), torch.ones(32)
    local.add([first])
    local.add([torch.ones(32)])
    assert torch.equal(first, torch.ones(32))
    assert torch.equal(torch.cat(list(local.take())), torch.full((32,), 2.0))
