"""DeepSpeed's package `utils`: single parameters' state, its logger, leaf modules."""

from collections.abc import Iterable, Sequence

from torch import nn

from onefold.deepspeed.runtime.dataloader import RepeatingLoader
from onefold.deepspeed.unsupported_names import unsupported
from onefold.deepspeed.utils import groups
from onefold.deepspeed.utils.logging import log_dist, logger
from onefold.deepspeed.utils.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from onefold.errors import ConfigError

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

OnDevice = unsupported("OnDevice", "no constructor of tensors is wrapped", "torch.device('meta') as a context")


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: "Sequence[type[nn.Module] | str]", raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The modules of `model` that are of these classes. That is all: a unit is gathered as a whole, whatever part of it
    a rank uses.

    Raises:
        ConfigError: there are none.
    """
    classes = tuple(cls for cls in leaf_module_classes if isinstance(cls, type))
    names = {cls for cls in leaf_module_classes if isinstance(cls, str)}
    found = [
        module
        for module in model.modules()
        if isinstance(module, classes)
        or names & {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"}
    ]
    if not found and raise_if_not_found:
        raise ConfigError(f"no module of the model is one of {[str(cls) for cls in leaf_module_classes]}")
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: "Sequence[type[nn.Module] | str]", raise_if_not_found: bool = True
) -> list[nn.Module]:
    """As `set_z3_leaf_modules`."""
    return set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Taken, and not needed: a unit is gathered as a whole."""


def z3_leaf_module(model: nn.Module) -> bool:
    """False: modules need no mark."""
    return False


def get_z3_leaf_modules(model: nn.Module) -> Iterable[nn.Module]:
    """None: modules need no mark."""
    return []
