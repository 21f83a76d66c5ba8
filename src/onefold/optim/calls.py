"""Owns how optimizers are called: the arguments that all take, and the answers to calls that are right for torch.optim
and not here.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from torch import nn

from onefold.errors import OptimizerError

NoDecay = Iterable[str] | Callable[[str, nn.Parameter], bool]


class Common(TypedDict, total=False):
    """Arguments every optimizer takes; see `Optimizer`."""

    no_decay: NoDecay
    param_groups: Sequence[Mapping[str, Any]] | None
    max_grad_norm: float | None
    delayed: bool
    delay_after: int


_OF_KERNELS = {"fused", "foreach", "capturable", "differentiable"}
"""How torch runs an update."""


def check_call(cls: type, model: Any, unknown: Mapping[str, Any]) -> None:
    """Refuse what is no model, and arguments that no optimizer takes.

    Raises:
        OptimizerError: says what to give instead.
    """
    name = cls.__name__
    if not isinstance(model, nn.Module):
        raise OptimizerError(
            f"{name} takes the model that onefold.shard returned, not its parameters (a {type(model).__name__}): "
            f"{name}(model, ...). It updates all trained parameters; for some of them, or for groups, pass "
            'param_groups=[{"params": [...], "lr": ...}] beside the model'
        )
    if unknown:
        names = ", ".join(f"{key}=" for key in unknown)
        known = [*inspect.signature(cls).parameters, *inspect.get_annotations(Common)]
        taken = ", ".join(dict.fromkeys(key for key in known if key not in ("model", "common")))
        why = "; updates are fused already, so leave it out" if unknown.keys() <= _OF_KERNELS else ""
        raise OptimizerError(f"{name} does not take {names}{why}. It takes {taken}")
