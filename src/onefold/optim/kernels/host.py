"""Owns the door to the compiled host kernels (csrc/): updates of flat CPU shards in one pass over their memory.

Invariant: both kernels update alike. The compiled one repeats the operations and roundings of `rules.py` as torch runs
them on a CPU, bit for bit, in one pass instead of ten. One exception: its square roots (Adam, Adagrad) are correctly
rounded, and torch's on x86, which are MKL's, can be off by one unit in the last place. Where no library was built,
`TorchKernel` runs the rule itself; that is decided once and said once, in the log. No other module calls C.

A call into the library lets go of the interpreter's lock until it returns, so a worker thread can update shards while
the main thread runs the next forward. Elements are independent, and sums are added tile by tile in order: the number of
threads changes no bit.
"""

import ctypes
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from onefold.optim.kernels.kernel_args import (
    FORMATS,
    RULES,
    SPLIT,
    check,
    factors_of,
    form_of,
    format_of,
    plan_of,
    state_of,
)
from onefold.plan.precision import join, split

ABI = 1
LIBRARY = "libonefold.so"
LEVELS = ("base", "avx2", "avx512")
"""Instruction sets by their number in the C ABI; a library for another architecture has only the first."""

_TORCH_TILE = 2**16


class Arithmetic(Protocol):
    """What a kernel needs of a rule; every `onefold.optim.rules.Rule` has it."""

    @property
    def name(self) -> str:
        """What compiled kernels go by: a rule with other arithmetic needs another name."""
        ...

    def update(
        self, master: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Mapping[str, Any], step: int
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A contiguous run of a flat shard: 1-D tensors of one length, on one device, updated in place.

    Attributes:
        weight: the compute weights. With `exact` None they are exact themselves (fp32; `TorchKernel` also takes fp64).
        exact: int16, the low bits beside a bf16 weight (see `dtypes.split`); or fp32, the copy behind a bf16 or fp16
            weight, which host kernels then only write; or None.
        grad: fp32, bf16 or fp16; read only.
        state: the rule's state by name, in the dtype of the exact weights: fp32 (with fp64 weights fp64, grad too).
    """

    weight: Tensor
    exact: Tensor | None
    grad: Tensor
    state: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One update of a run: the rule, its live hyper-parameters by torch.optim's names, the 1-based number of this
    update, and at most two factors (unscaling, clipping) that the gradient is multiplied by in fp32, one by one."""

    rule: Arithmetic
    hyper: Mapping[str, Any]
    number: int
    factors: Sequence[float] = ()


class Updater(Protocol):
    """What updates runs of flat shards, on one type of device."""

    @property
    def name(self) -> str:
        """What runs, for people: "native (avx512)", "torch" or "fused"."""
        ...

    def supports(self, rule: str, exact: torch.dtype) -> bool:
        """Whether `update` takes rules of this name and exact weights of this dtype."""
        ...

    def update(self, run: Run, step: Step) -> None:
        """Update `run` in place by one step.

        Raises:
            OptimizerError: a tensor is not on this type of device, 1-D and contiguous, or has the wrong dtype or
                length; a state tensor is missing; the rule or the number of factors is not supported.
        """
        ...


class Kernel(Updater, Protocol):
    """Host arithmetic on flat shards."""

    def count_nonfinite(self, values: Tensor) -> int:
        """How many of `values` (1-D, CPU; fp32, bf16 or fp16) are infinite or NaN."""
        ...

    def sum_of_squares(self, values: Tensor) -> float:
        """The sum of the squares of `values` (1-D, CPU; fp32, bf16 or fp16) in fp64; each kernel has its own order."""
        ...


class TorchKernel:
    """The same in torch, several passes: for machines without a library, and for fp64 or a rule of the user's own."""

    name = "torch"

    def supports(self, rule: str, exact: torch.dtype) -> bool:
        return True

    @torch.no_grad()
    def update(self, run: Run, step: Step) -> None:
        is_split = form_of(run.weight, run.exact, own=(torch.float32, torch.float64)) == SPLIT
        dtype, numel = torch.float32 if run.exact is not None else run.weight.dtype, run.weight.numel()
        check(run.grad, "grad", tuple(dict.fromkeys((*FORMATS, dtype))), numel)
        for name, tensor in run.state.items():
            check(tensor, f"state {name!r}", (dtype,), numel)
        # Tile by tile: what lies between two passes stays in the processor's cache, and nothing large is allocated.
        for start in range(0, numel, _TORCH_TILE):
            part = slice(start, start + _TORCH_TILE)
            weight, rest = run.weight[part], None if run.exact is None else run.exact[part]
            master = weight if rest is None else join(weight, rest) if is_split else rest
            grad = run.grad[part].to(dtype, copy=True)
            for factor in step.factors:
                grad.mul_(factor)
            state = {name: tensor[part] for name, tensor in run.state.items()}
            step.rule.update(master, grad, state, step.hyper, step.number)
            if rest is not None and is_split:
                top, low = split(master)
                weight.copy_(top)
                rest.copy_(low)
            elif rest is not None:
                weight.copy_(master)

    def count_nonfinite(self, values: Tensor) -> int:
        format_of(values, "values", values.numel())
        return values.numel() - int(values.isfinite().sum())

    def sum_of_squares(self, values: Tensor) -> float:
        format_of(values, "values", values.numel())
        return float(torch.linalg.vector_norm(values, dtype=torch.float64).square())


class NativeKernel:
    """The compiled kernels, at one level and with up to `num_threads` threads a call.

    Args:
        library: what `load_library` gave.
        num_threads: None takes torch's number when the kernel is made. A library without OpenMP has one thread.
        level: one of `levels(library)`; None takes the best.
    Raises:
        ValueError: the level was not built or this processor lacks it, or `num_threads` is below 1.
    """

    def __init__(self, library: ctypes.CDLL, *, num_threads: int | None = None, level: str | None = None) -> None:
        has = levels(library)
        level = has[-1] if level is None else level
        if level not in has:
            raise ValueError(f"level={level!r}: this library and processor have {', '.join(has)}")
        num_threads = torch.get_num_threads() if num_threads is None else num_threads
        if num_threads < 1:
            raise ValueError(f"num_threads={num_threads}: expected at least 1")
        self.num_threads = num_threads if library.onefold_has_threads() else 1
        self.name = f"native ({level})"
        self._library = library
        self._level = LEVELS.index(level)
        self._tile = int(library.onefold_tile())

    def supports(self, rule: str, exact: torch.dtype) -> bool:
        return rule in RULES and exact == torch.float32

    def update(self, run: Run, step: Step) -> None:
        plan, numel = plan_of(step.rule.name, step.hyper, step.number), run.weight.numel()
        factors, form = factors_of(step.factors, step.hyper), form_of(run.weight, run.exact)
        call = _Run(numel=numel, rule=plan.number, form=form, factor=factors, scalar=plan.scalars)
        call.grad_format = format_of(run.grad, "grad", numel)
        state = state_of(step.rule.name, plan.state, run.state, numel, "cpu")
        call.weight, call.grad = run.weight.data_ptr(), run.grad.data_ptr()
        changed = [run.weight, *state] if run.exact is None else [run.weight, run.exact, *state]
        if run.exact is not None:
            call.exact = run.exact.data_ptr()
        for place, tensor in enumerate(state):
            call.state[place] = tensor.data_ptr()
        _succeed(self._library.onefold_update(ctypes.byref(call), self._level, self.num_threads))
        torch.autograd.graph.increment_version(changed)  # as torch does after an operation in place

    def count_nonfinite(self, values: Tensor) -> int:
        kind = format_of(values, "values", values.numel())
        arguments = values.data_ptr(), values.numel(), kind, self._level, self.num_threads
        return _succeed(self._library.onefold_count_nonfinite(*arguments))

    def sum_of_squares(self, values: Tensor) -> float:
        numel = values.numel()
        kind = format_of(values, "values", numel)
        # Not of torch: under `with torch.device(...)` torch.empty would not be memory of the host.
        partial, total = (ctypes.c_double * -(-numel // self._tile))(), ctypes.c_double()
        arguments = values.data_ptr(), numel, kind, self._level, self.num_threads, partial
        _succeed(self._library.onefold_sum_of_squares(*arguments, ctypes.byref(total)))
        return total.value


def host_kernel(num_threads: int | None = None, *, path: Path | None = None) -> Kernel:
    """The kernel for this machine: compiled where the package was installed with its library, else torch's.

    Args:
        num_threads: threads a compiled call may use; None takes torch's number, which torch's operations always use.
        path: a library to take instead of the package's own.
    """
    library = _library(path)
    return TorchKernel() if library is None else NativeKernel(library, num_threads=num_threads)


def load_library(path: Path) -> ctypes.CDLL:
    """Load the library at `path` and declare its functions.

    Raises:
        OSError: it is not there, cannot be loaded, or was built from another version of csrc/.
    """
    library = ctypes.CDLL(str(path))
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "onefold_abi": (i32, []),
        "onefold_sources": (ctypes.c_char_p, []),
        "onefold_has_level": (i32, [i32]),
        "onefold_has_threads": (i32, []),
        "onefold_binds_threads": (i32, []),
        "onefold_tile": (i64, []),
        "onefold_update": (i32, [ctypes.POINTER(_Run), i32, i32]),
        "onefold_count_nonfinite": (i64, [pointer, i64, i32, i32, i32]),
        "onefold_sum_of_squares": (i32, [pointer, i64, i32, i32, i32, pointer, ctypes.POINTER(ctypes.c_double)]),
    }
    try:
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        found = library.onefold_abi()
    except AttributeError as missing:
        raise OSError(f"{path}: {missing}") from missing
    if found != ABI:
        raise OSError(f"{path} has ABI {found}, this version of onefold needs {ABI}: install the package again")
    return library


def levels(library: ctypes.CDLL) -> tuple[str, ...]:
    """The instruction sets that `library` was built for and this processor has, the best last."""
    return tuple(name for number, name in enumerate(LEVELS) if library.onefold_has_level(number))


def find_library() -> Path | None:
    """Where the package's library is: beside its modules, or, in an editable install, where the build put it."""
    spec = importlib.util.find_spec("onefold")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((path for folder in folders or () if (path := Path(folder) / LIBRARY).is_file()), None)


@cache
def _library(path: Path | None) -> ctypes.CDLL | None:
    """Looked for once a process, so that a fallback is announced once."""
    path, reason = path or find_library(), "the package was installed without them"
    try:
        if path is not None:
            library = load_library(path)
            _warn_if_bound(library)
            return library
    except OSError as error:
        reason = str(error)
    logging.getLogger("onefold").warning(
        "no compiled host kernels (%s): updates on the CPU run in plain torch, several times slower. "
        "Install a C++ compiler and then this package again; ONEFOLD_REQUIRE_NATIVE=1 shows why a build fails.",
        reason,
    )
    return None


def _warn_if_bound(library: ctypes.CDLL) -> None:
    if library.onefold_binds_threads():
        logging.getLogger("onefold").warning(
            "OpenMP was told to bind threads to cores (OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY), and bound the "
            "main thread when torch was imported: updates on the host then use that thread's core(s) %s only, or take "
            "turns with it. Unset these variables; onefold keeps updates off the core that launches the computation",
            sorted(os.sched_getaffinity(0)),
        )


class _Run(ctypes.Structure):
    """`onefold_run` of csrc/onefold.h."""

    _fields_ = (
        ("numel", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("exact", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("state", ctypes.c_void_p * 3),
        ("factor", ctypes.c_float * 2),
        ("scalar", ctypes.c_float * 8),
        ("rule", ctypes.c_int32),
        ("form", ctypes.c_int32),
        ("grad_format", ctypes.c_int32),
    )


def _succeed(result: int) -> int:
    """Every number the library checks was made here; -1 means that this file and csrc/ disagree."""
    if result < 0:
        raise RuntimeError("the compiled host kernels refused a call of host.py: install the package again")
    return result
