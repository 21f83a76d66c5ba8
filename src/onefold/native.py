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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from onefold.dtypes import join, split
from onefold.errors import OptimizerError

ABI = 1
LIBRARY = "libonefold.so"
LEVELS = ("base", "avx2", "avx512")
"""Instruction sets by their number in the C ABI; a library for another architecture has only the first."""

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MAX_FACTORS = 2
_TORCH_TILE = 2**16


class Arithmetic(Protocol):
    """What a kernel needs of a rule; every `onefold.rules.Rule` has it."""

    @property
    def name(self) -> str:
        """What compiled kernels go by: a rule with other arithmetic needs another name."""
        ...

    def update(
        self, master: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Mapping[str, Any], step: int
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A contiguous run of a flat shard: 1-D tensors of one length, on the CPU, updated in place.

    Attributes:
        weight: the compute weights. With `exact` None they are exact themselves (fp32; `TorchKernel` also takes fp64).
        exact: int16, the low bits beside a bf16 weight (see `dtypes.split`); or fp32, the copy behind a bf16 or fp16
            weight, which is then written only; or None.
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


class Kernel(Protocol):
    """Host arithmetic on flat shards."""

    @property
    def name(self) -> str:
        """What runs, for people: "native (avx512)" or "torch"."""
        ...

    def supports(self, rule: str, exact: torch.dtype) -> bool:
        """Whether `update` takes rules of this name and exact weights of this dtype."""
        ...

    def update(self, run: Run, step: Step) -> None:
        """Update `run` in place by one step.

        Raises:
            OptimizerError: a tensor is not on the CPU, 1-D and contiguous, or has the wrong dtype or length; a state
                tensor is missing; the rule or the number of factors is not supported.
        """
        ...

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
        is_split = _form(run, own=(torch.float32, torch.float64)) == _SPLIT
        dtype, numel = torch.float32 if run.exact is not None else run.weight.dtype, run.weight.numel()
        _check(run.grad, "grad", tuple(dict.fromkeys((*_FORMATS, dtype))), numel)
        for name, tensor in run.state.items():
            _check(tensor, f"state {name!r}", (dtype,), numel)
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
        _format(values, "values", values.numel())
        return values.numel() - int(values.isfinite().sum())

    def sum_of_squares(self, values: Tensor) -> float:
        _format(values, "values", values.numel())
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
        return rule in _RULES and exact == torch.float32

    def update(self, run: Run, step: Step) -> None:
        if step.rule.name not in _RULES:
            known = ", ".join(sorted(_RULES))
            raise OptimizerError(f"no compiled kernel for the rule {step.rule.name!r}, only {known}: use TorchKernel")
        if len(step.factors) > _MAX_FACTORS:
            raise OptimizerError(f"{len(step.factors)} factors: a kernel takes at most {_MAX_FACTORS}; multiply some")
        plan = _RULES[step.rule.name](step.hyper, step.number)
        factors = [*step.factors, 1.0, 1.0][:_MAX_FACTORS]
        if step.hyper.get("maximize", False):
            factors[-1] = -factors[-1]
        numel, changed = run.weight.numel(), [run.weight]
        call = _Run(numel=numel, rule=plan.number, form=_form(run), factor=(*factors,), scalar=plan.scalars)
        call.grad_format = _format(run.grad, "grad", numel)
        call.weight, call.grad = run.weight.data_ptr(), run.grad.data_ptr()
        if run.exact is not None:
            call.exact = run.exact.data_ptr()
            changed.append(run.exact)
        for place, name in enumerate(plan.state):
            if name not in run.state:
                raise OptimizerError(f"{step.rule.name} needs the state tensor {name!r}; got {sorted(run.state)}")
            _check(run.state[name], f"state {name!r}", (torch.float32,), numel)
            call.state[place] = run.state[name].data_ptr()
            changed.append(run.state[name])
        _succeed(self._library.onefold_update(ctypes.byref(call), self._level, self.num_threads))
        torch.autograd.graph.increment_version(changed)  # as torch does after an operation in place

    def count_nonfinite(self, values: Tensor) -> int:
        kind = _format(values, "values", values.numel())
        arguments = values.data_ptr(), values.numel(), kind, self._level, self.num_threads
        return _succeed(self._library.onefold_count_nonfinite(*arguments))

    def sum_of_squares(self, values: Tensor) -> float:
        numel = values.numel()
        kind = _format(values, "values", numel)
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
            return load_library(path)
    except OSError as error:
        reason = str(error)
    logging.getLogger("onefold").warning(
        "no compiled host kernels (%s): updates on the CPU run in plain torch, several times slower. "
        "Install a C++ compiler and then this package again; ONEFOLD_REQUIRE_NATIVE=1 shows why a build fails.",
        reason,
    )
    return None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A rule as the C ABI wants it: its number, the names of its state and its scalars, in the header's order."""

    number: int
    state: tuple[str, ...]
    scalars: tuple[float, ...]


def _adam(hyper: Mapping[str, Any], step: int, *, decoupled: bool = False) -> _Plan:
    lr, eps, weight_decay = (float(hyper[key]) for key in ("lr", "eps", "weight_decay"))
    beta1, beta2 = (float(beta) for beta in hyper["betas"])
    correction1, correction2 = 1 - beta1**step, (1 - beta2**step) ** 0.5
    decay = 1 - lr * weight_decay if decoupled else weight_decay
    amsgrad = bool(hyper.get("amsgrad", False))
    return _Plan(
        number=2 * decoupled + amsgrad,
        state=("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())),
        scalars=(1 - beta1, beta2, 1 - beta2, correction2, eps, -(lr / correction1), decay),
    )


def _adamw(hyper: Mapping[str, Any], step: int) -> _Plan:
    return _adam(hyper, step, decoupled=True)


def _sgd(hyper: Mapping[str, Any], step: int) -> _Plan:
    lr, momentum, weight_decay = (float(hyper[key]) for key in ("lr", "momentum", "weight_decay"))
    if momentum == 0:
        return _Plan(number=4, state=(), scalars=(-lr, weight_decay))
    rest = 1 - float(hyper.get("dampening", 0))
    scalars = (-lr, weight_decay, momentum, rest, float(hyper.get("nesterov", False)))
    return _Plan(number=5 if step == 1 else 6, state=("momentum_buffer",), scalars=scalars)


def _lion(hyper: Mapping[str, Any], step: int) -> _Plan:
    lr, weight_decay = float(hyper["lr"]), float(hyper["weight_decay"])
    beta1, beta2 = (float(beta) for beta in hyper["betas"])
    return _Plan(number=7, state=("exp_avg",), scalars=(-lr, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2))


def _adagrad(hyper: Mapping[str, Any], step: int) -> _Plan:
    lr, lr_decay, eps, weight_decay = (float(hyper[key]) for key in ("lr", "lr_decay", "eps", "weight_decay"))
    return _Plan(number=8, state=("sum",), scalars=(-(lr / (1 + (step - 1) * lr_decay)), eps, weight_decay))


_RULES: Mapping[str, Callable[[Mapping[str, Any], int], _Plan]] = {
    "adam": _adam,
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
    "adagrad": _adagrad,
}
_OWN, _SPLIT = 0, 1
_COPIES = {torch.bfloat16: 2, torch.float16: 3}


def _form(run: Run, own: tuple[torch.dtype, ...] = (torch.float32,)) -> int:
    """The number of the form of `run`'s weights, told by its dtypes; `own` may be exact by themselves."""
    numel = run.weight.numel()
    if run.exact is None:
        _check(run.weight, "weight", own, numel)
        return _OWN
    _check(run.exact, "exact", (torch.int16, torch.float32), numel)
    if run.exact.dtype == torch.int16:
        _check(run.weight, "weight", (torch.bfloat16,), numel)
        return _SPLIT
    _check(run.weight, "weight", tuple(_COPIES), numel)
    return _COPIES[run.weight.dtype]


def _format(tensor: Tensor, name: str, numel: int) -> int:
    _check(tensor, name, tuple(_FORMATS), numel)
    return _FORMATS[tensor.dtype]


def _check(tensor: Tensor, name: str, dtypes: tuple[torch.dtype, ...], numel: int) -> None:
    """Pointers carry no types: everything that the library relies on is checked here."""
    right = tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.is_contiguous()
    if right and tensor.dtype in dtypes and tensor.numel() == numel:
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise OptimizerError(
        f"{name}: expected a contiguous 1-D CPU tensor of {numel} elements, {wanted}; got {tuple(tensor.shape)} "
        f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}, strides {tensor.stride()}"
    )


def _succeed(result: int) -> int:
    """Every number the library checks was made here; -1 means that this file and csrc/ disagree."""
    if result < 0:
        raise RuntimeError("the compiled host kernels refused a call of native.py: install the package again")
    return result
