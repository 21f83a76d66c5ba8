"""Owns the choice of number formats: compute, reduction, master weights, loss scale.

Invariant: a `Precision` that exists is consistent; dtypes are torch dtypes from here on, never strings.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from onefold.errors import PrecisionError

_NAMES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
_COMPUTE = (torch.bfloat16, torch.float16, torch.float32)


def _dtype(field: str, value: "torch.dtype | str | None") -> torch.dtype | None:
    if value is None:
        return None
    dtype = _NAMES.get(value) if isinstance(value, str) else value
    if dtype not in _COMPUTE:
        raise PrecisionError(f"Precision({field}={value!r}): choose one of bf16, fp16, fp32 (or torch.bfloat16, ...)")
    return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicLossScale:
    """DeepSpeed's dynamic loss-scale rule, its names and its defaults.

    The scale halves when gradients overflow `hysteresis` times, and doubles after `window` good steps in a row (the
    first doubling comes one step later: the rule counts from the last overflow, which is one before the start).
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    raise_at_minimum: bool = True

    def __post_init__(self) -> None:
        if not (self.initial > 0 and self.minimum > 0 and self.window >= 1 and self.hysteresis >= 1):
            raise PrecisionError(
                f"a dynamic loss scale needs positive scales, and window and hysteresis of at least 1: {self}"
            )


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of a training run.

    | write                                            | compute | master weights        | Adam, bytes a parameter |
    |--------------------------------------------------|---------|-----------------------|-------------------------|
    | `Precision()`                                    | as is   | as below, by dtype    |                         |
    | `Precision(params="fp32")`                       | fp32    | the parameters        | 16                      |
    | `Precision(params="bf16")`                       | bf16    | bf16 + 16 extra bits  | 14                      |
    | `Precision(params="bf16", master="fp32")`        | bf16    | a separate fp32 copy  | 16                      |
    | `Precision(params="fp16", loss_scale="dynamic")` | fp16    | a separate fp32 copy  | 16                      |

    Args:
        params: dtype of floating-point parameters in forward and backward; None keeps each parameter's own. Buffers are
            never touched, and batch-norm parameters stay as they are (their kernels mix 16-bit inputs with fp32
            weights).
        reduce: dtype in which gradients are summed over ranks and kept; None means the parameter's.
        loss_scale: None (no scaling), a fixed factor, "dynamic", or a `DynamicLossScale`.
        master: "split" keeps 16 extra bits beside a bf16 weight; "fp32" keeps a whole fp32 copy. fp16 always uses
            "fp32".
        cast_inputs: cast floating-point inputs of the model's forward to `params` (when `params` is given).

    Raises:
        PrecisionError: a value is none of the above.
    """

    params: "torch.dtype | str | None" = None
    reduce: "torch.dtype | str | None" = None
    loss_scale: "float | Literal['dynamic'] | DynamicLossScale | None" = None
    master: Literal["split", "fp32"] = "split"
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", _dtype("params", self.params))
        object.__setattr__(self, "reduce", _dtype("reduce", self.reduce))
        if self.master not in ("split", "fp32"):
            raise PrecisionError(f'Precision(master={self.master!r}): choose "split" or "fp32"')
        scale = self.loss_scale
        if scale == "dynamic":
            object.__setattr__(self, "loss_scale", DynamicLossScale())
        elif isinstance(scale, bool) or not isinstance(scale, (int, float, DynamicLossScale, type(None))):
            raise PrecisionError(f'Precision(loss_scale={scale!r}): choose None, a positive number or "dynamic"')
        elif isinstance(scale, (int, float)) and not 0 < scale < float("inf"):
            raise PrecisionError(f"Precision(loss_scale={scale!r}): a fixed loss scale is a positive finite number")

    def param_dtype(self, own: torch.dtype) -> torch.dtype:
        """The dtype a parameter of dtype `own` computes in. 8-bit floats are some module's packed form and stay."""
        if isinstance(self.params, torch.dtype) and own.is_floating_point and own.itemsize > 1:
            return self.params
        return own

    def grad_dtype(self, param: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of parameters of dtype `param` are reduced and kept."""
        return self.reduce if isinstance(self.reduce, torch.dtype) else param

    def master_form(self, param: torch.dtype) -> Literal["own", "split", "fp32"]:
        """How the exact weights of a parameter of dtype `param` are kept: in itself, beside it, or as a copy."""
        if param == torch.bfloat16:
            return self.master
        return "fp32" if param == torch.float16 else "own"


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut fp32 values into a bf16 weight and its 16 low bits, exactly invertible by `join`.

    The weight is the value rounded half up (in magnitude) on the 16 dropped bits; it equals round-to-nearest-even
    except on an exact tie.

    Args:
        master: fp32, any shape. A NaN gives a NaN weight; its payload is not preserved.
    Returns:
        (weight, low): bf16 and int16, same shape.
    """
    bits = master.view(torch.int32)
    low = bits.to(torch.int16)
    weight = (bits + (1 << 15)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)  # only a NaN overflows
    return torch.where(master.isnan(), master.to(torch.bfloat16), weight), low


def join(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 values that `split` cut: bf16 `weight` and int16 `low`, same shape.

    No value is rounded up to zero. A zero beside such a `low` was written by the user since, and stays one: the pattern
    before it is a NaN's.
    """
    low = torch.where((weight != 0) | (low >= 0), low, 0)
    # A low half that reads as negative is one that was rounded up: adding it takes that back.
    return weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low).view(torch.float32)
