"""Promise: in a pairwise matrix every two values of different axes meet, in the same rows every time, and in not many
more than the two longest axes make."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pairs import pairs, pairwise

sizes = st.lists(st.integers(1, 7), min_size=2, max_size=5)


def matrix(sizes):
    return {f"axis{number}": [f"{number}.{value}" for value in range(size)] for number, size in enumerate(sizes)}


@given(sizes)
def test_every_two_values_meet(sizes):
    axes = matrix(sizes)
    rows = pairs(**axes)
    for first, second in itertools.combinations(range(len(sizes)), 2):
        wanted = set(itertools.product(*(list(axes.values())[column] for column in (first, second))))
        assert {(row[first], row[second]) for row in rows} == wanted
    assert len(set(rows)) == len(rows)


@given(sizes)
def test_the_rows_are_the_same_every_time_and_few(sizes):
    rows = pairs(**matrix(sizes))
    assert rows == pairs(**matrix(sizes))
    longest = sorted(sizes)[-2:]
    assert longest[0] * longest[1] <= len(rows) <= 2 * longest[0] * longest[1]


def test_costs_are_spread_over_the_shorter_axes():
    rows = pairs(name=range(10), plan="abcd", num_ranks=(1, 2))
    assert len(rows) == 40
    assert [num_ranks for _, _, num_ranks in rows].count(1) == 20


@pytest.mark.parametrize(("axes", "wanted"), [({}, []), ({"one": "ab"}, [("a",), ("b",)])])
def test_without_a_second_axis_there_are_no_pairs(axes, wanted):
    assert pairs(**axes) == wanted


@pairwise(word={"first": 10, "second": 20}, number=(1, 2, 3), function=(pairs, pairwise))
def test_a_test_is_marked_with_the_rows_and_their_names(request, word, number, function):
    name = {10: "first", 20: "second"}[word]
    assert request.node.name.endswith(f"[{name}-{number}-{function.__name__}]")


def test_values_without_names_of_their_own_need_some():
    with pytest.raises(AssertionError, match="pass a mapping"):
        pairwise(word=(1, "1"), number=(1, 2))
