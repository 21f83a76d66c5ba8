"""Promise: a `Layout` gives every element of every parameter exactly one place, and a shard's range is few boxes."""

from itertools import product
from math import prod

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onefold.plan.layout import ALIGN_NUMEL, Box, Layout, Piece, align, boxes

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
MODELS = st.lists(SHAPES, max_size=8).map(lambda shapes: [(f"p{i}", shape) for i, shape in enumerate(shapes)])
NUM_SHARDS = st.integers(1, 9)
unhurried = settings(deadline=None, max_examples=200)


@unhurried
@given(model=MODELS, num_shards=NUM_SHARDS)
@example(model=[], num_shards=3)
@example(model=[("scalar", ())], num_shards=9)
@example(model=[("empty", (0, 3)), ("weight", (5, 5)), ("also_empty", (0,)), ("bias", (5,))], num_shards=2)
def test_every_element_is_in_exactly_one_piece_of_exactly_one_shard(model, num_shards):
    layout = Layout.pack(model, num_shards)
    found = [[] for _ in model]
    for shard in range(num_shards):
        low, high = layout.shard_range(shard)
        assert high - low == layout.shard_numel
        for piece in layout.pieces(shard):
            assert 0 <= piece.start < piece.stop <= layout.shard_numel
            assert piece.numel == piece.stop - piece.start
            slot = layout.slots[piece.slot]
            assert low + piece.start == slot.start + piece.slot_start  # both names point at the same element
            found[piece.slot] += range(piece.slot_start, piece.slot_start + piece.numel)
    assert found == [list(range(prod(shape))) for _, shape in model]


@unhurried
@given(model=MODELS, num_shards=NUM_SHARDS)
def test_slots_keep_names_shapes_and_order_and_never_overlap(model, num_shards):
    layout = Layout.pack(model, num_shards)
    assert [(slot.name, slot.shape) for slot in layout.slots] == model
    assert [slot.numel for slot in layout.slots] == [prod(shape) for _, shape in model]
    ends = [slot.stop for slot in layout.slots]
    assert all(slot.start >= end for slot, end in zip(layout.slots, [0, *ends[:-1]], strict=False))
    assert max(ends, default=0) <= layout.numel


@unhurried
@given(model=MODELS, num_shards=NUM_SHARDS)
def test_slots_and_shards_are_aligned_and_padding_is_least(model, num_shards):
    layout = Layout.pack(model, num_shards)
    assert all(slot.start % ALIGN_NUMEL == 0 for slot in layout.slots)
    assert layout.shard_numel % ALIGN_NUMEL == 0
    assert layout.numel == num_shards * layout.shard_numel
    assert layout.used_numel + layout.padding_numel == layout.numel
    packed = sum(align(prod(shape)) for _, shape in model)
    assert 0 <= layout.numel - packed < num_shards * ALIGN_NUMEL  # one aligned step less a shard would not hold it


@unhurried
@given(model=MODELS, num_shards=NUM_SHARDS)
def test_the_number_of_shards_moves_no_slot(model, num_shards):
    assert Layout.pack(model, num_shards).slots == Layout.pack(model, 1).slots


@given(numel=st.integers(0, 10**6))
def test_align_is_the_least_multiple_not_below(numel):
    assert align(numel) % ALIGN_NUMEL == 0
    assert 0 <= align(numel) - numel < ALIGN_NUMEL


def test_a_small_layout_by_hand():
    layout = Layout.pack([("weight", (3, 5)), ("gate", ()), ("none", (0, 4)), ("bias", (20,))], 3)
    assert [slot.start for slot in layout.slots] == [0, 16, 32, 32]
    assert (layout.numel, layout.shard_numel, layout.used_numel, layout.padding_numel) == (96, 32, 36, 60)
    assert layout.pieces(0) == (
        Piece(slot=0, start=0, stop=15, slot_start=0),
        Piece(slot=1, start=16, stop=17, slot_start=0),
    )
    assert layout.pieces(1) == (Piece(slot=3, start=0, stop=20, slot_start=0),)
    assert layout.pieces(2) == ()


def flat_indices(shape, box):
    """Row-major indices of a box's elements within an array of `shape`, in row-major order."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
    return [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in product(*ranges)]


def check_boxes(shape, start, stop):
    cut = list(boxes(shape, start, stop))
    assert [index for box in cut for index in flat_indices(shape, box)] == list(range(start, stop))
    assert len(cut) <= max(2 * len(shape) - 1, 1)
    for box in cut:
        assert len(box.offsets) == len(box.sizes) == len(shape)
        assert all(o >= 0 and n >= 1 and o + n <= d for o, n, d in zip(box.offsets, box.sizes, shape, strict=True))
    return cut


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 1), (3, 4), (4, 1, 3), (2, 3, 4), (3, 2, 2, 3), (2, 1, 3, 1, 2)])
def test_every_range_of_a_small_array_is_few_boxes_that_reassemble_it(shape):
    most = 0
    for start in range(prod(shape) + 1):
        for stop in range(start, prod(shape) + 1):
            most = max(most, len(check_boxes(shape, start, stop)))
    if all(dim > 2 for dim in shape):
        assert most == max(2 * len(shape) - 1, 1)  # the bound is reached, so it is the least


@unhurried
@given(data=st.data(), shape=st.lists(st.integers(1, 9), max_size=4).map(tuple))
def test_any_range_of_any_array_is_few_boxes_that_reassemble_it(data, shape):
    start = data.draw(st.integers(0, prod(shape)))
    check_boxes(shape, start, data.draw(st.integers(start, prod(shape))))


def test_boxes_of_nothing_of_a_scalar_and_of_everything():
    assert list(boxes((3, 4), 5, 5)) == list(boxes((0, 4), 0, 0)) == list(boxes((), 0, 0)) == []
    assert list(boxes((), 0, 1)) == [Box(offsets=(), sizes=())]
    assert list(boxes((3, 4, 5), 0, 60)) == [Box(offsets=(0, 0, 0), sizes=(3, 4, 5))]


@unhurried
@given(model=MODELS, num_shards=NUM_SHARDS)
def test_the_boxes_of_all_pieces_cover_each_parameter_once(model, num_shards):
    layout = Layout.pack(model, num_shards)
    covered = [[] for _ in model]
    for shard in range(num_shards):
        for piece in layout.pieces(shard):
            shape = layout.slots[piece.slot].shape
            for box in boxes(shape, piece.slot_start, piece.slot_start + piece.numel):
                covered[piece.slot] += flat_indices(shape, box)
    assert covered == [list(range(prod(shape))) for _, shape in model]
