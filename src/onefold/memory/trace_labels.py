"""Owns the names that a profiler's trace shows: a verb and a unit, such as "gather model.layers.3".

`torch.profiler` shows what the thread that started it does, and on a GPU the same label over the kernels that were
launched under it. Updates on the host run on a thread of their own: those are in a trace taken with
`experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.profiler import record_function


def label(verb: str, unit: str) -> AbstractContextManager[Any]:
    """What runs inside is "`verb` `unit`" in a trace; the root unit, whose name is empty, is "(root)"."""
    name = f"{verb} {unit or '(root)'}"
    if torch._C._autograd._profiler_enabled():
        return record_function(name)
    # 0.2 us where no profiler runs, a twentieth of the other. A profiler that another thread started sees it.
    quick: AbstractContextManager[Any] = torch._C._profiler._RecordFunctionFast(name)
    return quick
