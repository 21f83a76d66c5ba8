"""Owns the use of any element-wise `torch.optim` class on flat shards, and the experiment that tells whether it is one.

Invariant: a class passes `tried` only if cutting a parameter's numbers into flat pieces leaves its result as it was.
State is opaque here: it is whatever dict the class keeps for a parameter, one dict for each slice.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path

from onefold.errors import OptimizerError

_NUM_STEPS = 8
"""Enough for rules that change course after some steps: RAdam starts to rectify at its sixth."""
_CUTS: Mapping[tuple[int, ...], tuple[int, ...]] = {
    (24,): (0, 1, 6, 8, 24),
    (6, 4): (0, 1, 6, 8, 24),
    (2, 3, 4): (0, 7, 8, 24),
    (2, 3, 2, 2): (0, 1, 6, 8, 24),
    (64, 130): (0, 4097, 4098, 4129, 8320),
}
"""Shapes to try and where to cut them. The last is for classes that treat large parameters otherwise (8-bit states)."""
_LEAST_LR = 1e-2
"""Updates much smaller than a weight would drown in its rounding: a class is tried with at least this learning rate."""
_ROUNDING = 1e-5
"""How far a weight may end apart, of the largest it has been: a vectorized pow may round otherwise at the end of a run.
Taking part in a norm moves it by far more."""
_STATE_NUMELS = (24, 40)
"""Two slice sizes: state that grows with them is per element, state that does not is fixed."""
_INSTEAD = {"SparseAdam": "Adam", "Adafactor": "Lion", "LARS": "SGD"}


@dataclass(frozen=True, slots=True, eq=False)
class TorchRule:
    """A `torch.optim` class as a rule for flat slices, built anew over the slice at every update.

    Args:
        cls: a subclass of `torch.optim.Optimizer`. Only `tried` tells whether it may be used on slices.
        kwargs: its keyword arguments, as in `cls(parameters, **kwargs)`.
    Raises:
        OptimizerError: `cls` is no optimizer class, refuses `kwargs`, or cannot be built over a 1-D parameter.
    """

    cls: type[Optimizer]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    _defaults: Mapping[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.cls, type) and issubclass(self.cls, Optimizer)):
            raise OptimizerError(f"expected a subclass of torch.optim.Optimizer, not {self.cls!r}")
        try:
            optimizer = _build(self.cls, Parameter(torch.zeros(2)), self.kwargs)
        except Exception as error:
            raise self._unbuildable(error) from error
        object.__setattr__(self, "_defaults", dict(optimizer.defaults))

    def _unbuildable(self, flat: Exception) -> OptimizerError:
        """Is it the flat parameter that the class refuses, or its arguments?"""
        try:
            _build(self.cls, Parameter(torch.zeros(2, 2)), self.kwargs)
        except Exception as error:
            return OptimizerError(f"{_call(self)} cannot be built: {_said(error)}")
        return _refusal(self.cls, f"it does not take 1-D parameters ({_said(flat)})")

    @property
    def name(self) -> str:
        """What tells its state from that of other rules."""
        return f"Elementwise({self.cls.__name__})"

    def defaults(self) -> dict[str, Any]:
        """The hyper-parameters that parameter groups start from: the class's own `defaults`."""
        return dict(self._defaults)

    def new_state(self) -> dict[str, Any]:
        """The state of a slice that has not been updated yet."""
        return {}

    def update_slice(
        self, master_slice: Tensor, grad_slice: Tensor, state: dict[str, Any], hyper: Mapping[str, Any]
    ) -> None:
        """Update `master_slice` and `state` in place by one step. Called under `torch.no_grad`.

        Args:
            master_slice: 1-D, fp32 or fp64: the exact weights.
            grad_slice: 1-D, its dtype and length; averaged, unscaled and clipped. May be overwritten.
            state: from `new_state`, then as the last update of this slice left it (tensors may be replaced).
            hyper: live hyper-parameters; keys that are not among `defaults()` are ignored.
        """
        if master_slice.numel() == 0:
            return
        param = Parameter(master_slice.detach())
        param.grad = grad_slice
        # As a group's own values, so that hyper-parameters the constructor has no argument for reach it too.
        group = {key: hyper[key] for key in self._defaults if key in hyper}
        optimizer = _build(self.cls, {"params": [param], **group}, self.kwargs)
        if state:
            optimizer.state[param] = state
        optimizer.step()
        kept = optimizer.state.get(param, {})
        if kept is not state:
            state.clear()
            state.update(kept)
        if param.data_ptr() != master_slice.data_ptr():  # the class has put a new tensor in place of the slice
            master_slice.copy_(param.detach())

    def state_itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of state for each element whose exact weight is of `dtype`; what does not grow with them (`step`) is
        not counted.

        Raises:
            OptimizerError: some state grows otherwise.
        """
        states = [self.new_state() for _ in _STATE_NUMELS]
        with torch.no_grad():
            for numel, state in zip(_STATE_NUMELS, states, strict=True):
                self.update_slice(torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=dtype), state, self._defaults)
        itemsize = 0
        for (path, small), large in zip(tree_leaves_with_path(states[0]), tree_leaves(states[1]), strict=True):
            sizes = tuple(value.numel() if isinstance(value, Tensor) else 1 for value in (small, large))
            if sizes == _STATE_NUMELS:
                itemsize += small.element_size()
            elif sizes[0] != sizes[1]:
                told = f"its state{keystr(path)} has {sizes} elements for {_STATE_NUMELS} parameter elements"
                raise _refusal(self.cls, told)
        return itemsize


def tried(cls: type[Optimizer], kwargs: Mapping[str, Any]) -> TorchRule:
    """`cls(..., **kwargs)` as a rule, once it was found by experiment to update each element by itself, in fp32.

    Parameters of several shapes are trained by the class as it is, and as flat pieces by `TorchRule`; gradients and
    weights span six orders of magnitude, so that a norm taken over a parameter shows. The result holds for the
    hyper-parameters in `kwargs`: where groups differ in a way that could matter, try each. Leaves torch's global random
    state as it was.

    Raises:
        OptimizerError: the class needs a closure, sparse gradients or whole parameters, draws random numbers, keeps
            state outside `state[parameter]`, or does not work at all; the message says which, and what to use.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        rule = TorchRule(cls, dict(kwargs))
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise _refusal(cls, "its step needs a closure that evaluates the loss again")
        for shape, ends in _CUTS.items():
            try:
                apart = _apart(rule, shape, ends)
            except Exception as error:
                raise _refusal(cls, f"a step on a dense parameter of shape {shape} failed ({_said(error)})") from error
            if isnan(apart):
                raise OptimizerError(
                    f"{_call(rule)}: weights are no longer finite after {_NUM_STEPS} steps on gradients between 1e-4 "
                    "and 1e4; check these hyper-parameters"
                )
            if apart > _ROUNDING:
                raise _refusal(
                    cls,
                    f"a parameter of shape {shape} cut into flat pieces ends with other weights (off by up to "
                    f"{apart:.1e} of their size after {_NUM_STEPS} steps), so an element's update depends on other "
                    "elements, on the parameter's shape, on random numbers, or on state kept outside state[parameter]",
                )
        rule.state_itemsize(torch.float32)
    return rule


def _apart(rule: TorchRule, shape: tuple[int, ...], ends: tuple[int, ...]) -> float:
    """How far weights are apart, in their size, that the class has trained whole and `rule` in pieces; nan where they
    are not finite."""
    numel = prod(shape)
    generator = torch.Generator().manual_seed(numel)

    def draw(decades: float) -> Tensor:
        """Magnitudes differ within and between pieces and steps; some are zero."""
        scale = 10 ** ((torch.rand(numel, generator=generator) - 0.5) * decades)
        return torch.randn(numel, generator=generator) * scale

    master, hyper = draw(2), rule.defaults()
    if isinstance(hyper.get("lr"), (int, float, Tensor)):
        hyper["lr"] = max(float(hyper["lr"]), _LEAST_LR)
    param, largest = Parameter(master.clone().view(shape)), master.abs()
    optimizer = _build(rule.cls, {"params": [param], **hyper}, rule.kwargs)
    buffer = torch.empty_like(master)  # used again for every step, as a shard's is: a class may not hold on to it
    pieces = [(slice(*pair), rule.new_state()) for pair in pairwise(ends)]
    for step in range(_NUM_STEPS):
        grad = draw(6) * 10.0 ** (step % 3 - 1)
        grad[:: 1 + numel // 3] = 0
        param.grad = grad.clone().view(shape)
        optimizer.step()
        largest = torch.maximum(largest, param.detach().flatten().abs())
        buffer.copy_(grad)
        with torch.no_grad():
            for where, state in pieces:
                rule.update_slice(master[where], buffer[where], state, hyper)
    return float(((param.detach().flatten() - master).abs() / largest).max())


def _build(cls: type[Optimizer], param: "Parameter | dict[str, Any]", kwargs: Mapping[str, Any]) -> Optimizer:
    constructor: Any = cls  # a subclass's constructor takes other arguments than Optimizer's
    optimizer: Optimizer = constructor([param], **kwargs)
    return optimizer


def _call(rule: TorchRule) -> str:
    return f"{rule.cls.__name__}({', '.join(f'{key}={value!r}' for key, value in rule.kwargs.items())})"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().rstrip(".")


def _refusal(cls: type[Optimizer], reason: str) -> OptimizerError:
    return OptimizerError(
        f"{cls.__name__} cannot run on flat shards: {reason}. Use onefold.{_INSTEAD.get(cls.__name__, 'AdamW')}, or a "
        "class whose update of an element looks at that element alone (Adamax, NAdam, RAdam, RMSprop, Rprop, ASGD, "
        "Adadelta, ...); layouts that keep parameters whole do not exist yet"
    )
