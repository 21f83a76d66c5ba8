"""Owns sums whose order is ours: means over ranks, and sums of squares.

[Note: The order of a sum]
Floating-point sums depend on their order. Where ranks bring each other their gradients (over gloo, and by copies) they
are summed here, in rank order, in at least fp32, so a gradient's bits depend neither on where a parameter lies in its
buffer nor on the plan. NCCL chooses its own order; there plans agree to rounding. Two axes are two such sums, see
[Note: Replicas].
"""

from collections.abc import Callable
from functools import partial
from math import gcd

import torch
from torch import Tensor

Mean = Callable[[Tensor, Tensor], None]
"""Puts the mean of the rows of its second argument into its first, as `mean_of_rows` does."""

_ROW_NUMEL, _SHORTEST_ROW = 4096, 512


def mean_of_rows(target: Tensor, rows: Tensor) -> None:
    """Put the mean of `rows` [num_ranks, numel] into `target` [numel]: summed from the first to the last in at least
    fp32, and rounded once."""
    total = rows[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total += row
    number = torch.full((), len(rows), dtype=total.dtype, device=total.device)  # torch multiplies by a number's inverse
    target.copy_(total.div_(number))


def squares(values: Tensor) -> Tensor:
    """The sum of the squares of `values` (1-D): 0-dim, fp64.

    On a GPU torch would first write all of them down as fp64, for more time than an update takes. There rows are summed
    in fp32, in one pass, and their sums in fp64; so a row whose sum overflows fp32 gives inf where `exact_squares` does
    not.
    """
    return _squares_by_rows(values) if values.is_cuda else exact_squares(values)


def _squares_by_rows(values: Tensor) -> Tensor:
    numel = values.numel()
    row_numel = gcd(numel, _ROW_NUMEL)  # no remainder: each operation more is a launch more for every unit
    row_numel = row_numel if row_numel >= _SHORTEST_ROW else _ROW_NUMEL
    num_rows, in_rows = numel // row_numel, numel - numel % row_numel
    rows = values.new_empty(num_rows + (in_rows < numel), dtype=torch.float32)
    norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
    norm(values[:in_rows].view(-1, row_numel), dim=1, out=rows[:num_rows])
    if in_rows < numel:
        norm(values[in_rows:], out=rows[-1])
    return exact_squares(rows)


def exact_squares(values: Tensor) -> Tensor:
    """As `squares`, summed in fp64 throughout."""
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()
