"""Owns the number that a backward is divided by.

[Note: What a backward is divided by]
DeepSpeed divides by the number of micro-batches: `engine.backward(loss)` the loss, a plain `loss.backward()` the
gradient as it enters at the engine's outputs. So do hooks on those, unless an `engine.backward` runs: its loss is
divided, and may come through the outputs of several engines, as a generator's does through its discriminator. That one
runs is known to the backward itself, in the thread that called it and in those that autograd uses for it, and to no
other. A loss scale needs nothing from the script in either case: it is applied inside of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_KEY = "onefold.deepspeed.division"


class LossDivision:
    """What gradients are divided by as they enter at one engine's outputs; see [Note: Who keeps a model alive].

    Attributes:
        parts: micro-batches of a step.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def enter(self, grad: Tensor) -> Tensor:
        """The gradient of one of the engine's outputs, as it goes on into the model."""
        return grad if _is_divided() else grad / self.parts


@contextmanager
def already_divided() -> Iterator[None]:
    """Around a backward whose loss is divided already. See [Note: What a backward is divided by]."""
    was_divided = _is_divided()
    torch._C._stash_obj_in_tls(_KEY, True)  # autograd carries it over to its own threads
    try:
        yield
    finally:
        if not was_divided:
            _forget()


def _is_divided() -> bool:
    return torch._C._is_key_in_tls(_KEY) and bool(torch._C._get_obj_in_tls(_KEY))


def _forget() -> None:
    if hasattr(torch._C, "_remove_obj_from_tls"):  # a thread that ends with something left there may hang
        torch._C._remove_obj_from_tls(_KEY)
    else:  # older torch, which leaves something of its own there too
        torch._C._stash_obj_in_tls(_KEY, False)
