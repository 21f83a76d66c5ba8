"""Owns pairwise matrices: rows of values, one of each axis, in which every two values of different axes meet.

Most faults need two things to come together, seldom three: a product of many axes finds hardly more than the pairs do,
in many times the time. Invariant: the same axes give the same rows, in any process, so that every worker of a run
collects the same tests.
"""

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import pytest


def pairs(**axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value of each axis, in the axes' order, that hold every pair; about as many as the two longest make.

    Greedy: each row starts with a pair that is still missing, and takes of every other axis the value that brings most
    missing pairs; of equals, the value that came least often, so that costs are spread.
    """
    values = [list(axis) for axis in axes.values()]
    numbers = [range(len(axis)) for axis in values]
    columns = range(len(values))
    missing = {
        (first, one, second, other): None
        for first, second in itertools.combinations(columns, 2)
        for one, other in itertools.product(numbers[first], numbers[second])
    }
    if len(values) < 2:
        return [(value,) for axis in values for value in axis]
    times = {(column, number): 0 for column in columns for number in numbers[column]}
    rows = []
    while missing:
        first, one, second, other = next(iter(missing))
        row = {first: one, second: other}
        for column in columns:
            if column not in row:
                gains = {number: _gain(row, column, number, missing) for number in numbers[column]}
                row[column] = max(gains, key=lambda number, c=column, g=gains: (g[number], -times[c, number], -number))
        for pair in itertools.combinations(sorted(row.items()), 2):
            missing.pop((*pair[0], *pair[1]), None)
        for place in row.items():
            times[place] += 1
        rows.append(tuple(values[column][row[column]] for column in columns))
    return rows


def _gain(row: dict[int, int], column: int, number: int, missing: dict[tuple[int, int, int, int], None]) -> int:
    """How many missing pairs a value brings to the row."""
    met = (sorted([(column, number), place]) for place in row.items())
    return sum((*one, *other) in missing for one, other in met)


def pairwise(**axes: Collection[Any]) -> pytest.MarkDecorator:
    """Marks a test with arguments of the axes' names, to be run once for each row.

    Of a mapping the values are passed, under the names that it gives them.
    """
    named = {axis: _named(values) for axis, values in axes.items()}
    rows = [
        pytest.param(*(named[axis][name] for axis, name in zip(axes, row, strict=True)), id="-".join(row))
        for row in pairs(**named)
    ]
    return pytest.mark.parametrize(tuple(axes), rows)


def _named(values: Collection[Any]) -> dict[str, Any]:
    """Values by the names that they have in the ids of tests."""
    if isinstance(values, Mapping):
        return dict(values)
    named = {getattr(value, "__name__", str(value)): value for value in values}
    assert len(named) == len(values), f"give names to {values}: pass a mapping"
    return named
