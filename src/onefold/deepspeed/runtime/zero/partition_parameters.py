"""DeepSpeed's module of this name, as far as libraries look into it: transformers exempts torch.arange from a wrapper
that `Init` has there. Onefold's `Init` wraps no constructor of tensors."""

from collections.abc import Callable
from typing import Any

import torch

from onefold.deepspeed.accelerator import get_accelerator
from onefold.deepspeed.ds_attributes import ZeroParamStatus
from onefold.deepspeed.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """`fn` itself."""
    return fn
