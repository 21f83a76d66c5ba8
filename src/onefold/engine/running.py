"""Owns the answer to whether a forward that began still runs: a KeyboardInterrupt ends one without telling any hook."""

import sys
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

_CALLS = nn.Module.__call__.__code__.co_filename
"""Where torch calls a module's hooks and its forward."""


class Running:
    """The outermost forward of a model, by the frame that called it."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        """Held while the forward runs, so that no other frame can be taken for it."""
        self._thread = 0

    def begin(self) -> None:
        """To be called below a hook that torch calls before the forward."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename != _CALLS and frame.f_back is not None:
            frame = frame.f_back
        self._frame, self._thread = frame, get_ident()

    def end(self) -> None:
        """It told that it is over, or was found to be."""
        self._frame = None

    @property
    def is_lost(self) -> bool:
        """Whether it is over and did not tell. Only the main thread is interrupted, so this is asked on the forward's
        own thread; on others the answer is no."""
        if self._frame is None or self._thread != get_ident():
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is None


def outside_of_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode sees what is done. Torch's own way takes 40 us where there is none."""
    return _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext()


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)
