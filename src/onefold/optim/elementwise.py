"""Owns the use of any element-wise `torch.optim` class on flat shards, and the experiment that tells whether it is one.

Invariant: a class passes `probe` only if cutting a parameter's numbers into flat pieces leaves its result as it was.
State is opaque here: it is whatever dict the class keeps for a parameter, one dict for each slice.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from onefold.errors import OptimizerError

_CPU = torch.device("cpu")
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
_STATE_NUMELS = (24, 40)
"""Two slice sizes: state that grows with them is per element, state that does not is fixed."""
_INSTEAD = {"SparseAdam": "Adam", "Adafactor": "Lion", "LARS": "SGD"}


@dataclass(frozen=True, slots=True, eq=False)
class TorchRule:
    """A `torch.optim` class as a rule for flat slices, built anew over the slice at every update.

    Args:
        cls: a subclass of `torch.optim.Optimizer`. Only `probe` tells whether it may be used on slices.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """What the experiment found out about an element-wise class.

    `exact`: the pieces equalled the whole bit for bit (else up to rounding). `per_element`: names of the state that has
    one entry for each parameter element. `fixed`: names of the state whose size does not depend on the slice (`step`).
    """

    rule: TorchRule
    device: torch.device
    exact: bool
    per_element: tuple[str, ...]
    fixed: tuple[str, ...]

    def state_itemsize(self, master_dtype: torch.dtype) -> int:
        """Bytes of state for each parameter element when the master weights are of `master_dtype`; `fixed` not counted.

        Raises:
            OptimizerError: the class does not work in this dtype.
        """
        with _own_rng(self.device):
            return sum(_itemsizes(self.rule, master_dtype, self.device)[0].values())


def probe(cls: type[Optimizer], kwargs: Mapping[str, Any], device: torch.device = _CPU) -> Probe:
    """Find out by experiment whether `cls(..., **kwargs)` updates each element by itself, in fp32.

    Parameters of several shapes are trained by the class as it is, and as flat pieces by `TorchRule`; gradients and
    weights span six orders of magnitude, so that a norm taken over a parameter shows. The result holds for the
    hyper-parameters in `kwargs`: where groups differ in a way that could matter, probe each. Leaves torch's global
    random state as it was.

    Raises:
        OptimizerError: the class needs a closure, sparse gradients or whole parameters, draws random numbers, keeps
            state outside `state[parameter]`, or does not work at all; the message says which, and what to use.
    """
    exact = True
    with _own_rng(device), torch.enable_grad():
        rule = TorchRule(cls, dict(kwargs))
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise _refusal(cls, "its step needs a closure that evaluates the loss again")
        one, other = (_train_whole(rule, (6, 4), device, seed) for seed in (1, 2))
        if not torch.equal(one[-1], other[-1]):
            raise _refusal(cls, "it draws random numbers, so two runs on the same gradients differ")
        for shape in _CUTS:
            exact &= _same(rule, shape, _train_whole(rule, shape, device, seed=1), _train_pieces(rule, shape, device))
        per_element, fixed = _itemsizes(rule, torch.float32, device)
    return Probe(rule=rule, device=device, exact=exact, per_element=tuple(per_element), fixed=fixed)


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


@contextmanager
def _own_rng(device: torch.device) -> Iterator[None]:
    """Whatever is drawn or seeded inside is forgotten afterwards."""
    devices = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if device.type == "cpu" else device.type):
        yield


@contextmanager
def _refused_if_it_fails(cls: type[Optimizer], doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _refusal(cls, f"{doing} failed ({_said(error)})") from error


def _numbers(numel: int) -> tuple[Tensor, list[Tensor]]:
    """Weights and each step's gradients: magnitudes differ within and between pieces and steps; some are zero."""
    generator = torch.Generator().manual_seed(numel)

    def draw(decades: float) -> Tensor:
        scale = 10 ** ((torch.rand(numel, generator=generator) - 0.5) * decades)
        return torch.randn(numel, generator=generator) * scale

    weights = draw(2)
    grads = [draw(6) * 10.0 ** (step % 3 - 1) for step in range(_NUM_STEPS)]
    for grad in grads:
        grad[:: 1 + numel // 3] = 0
    return weights, grads


def _trial_hyper(rule: TorchRule) -> dict[str, Any]:
    hyper = rule.defaults()
    if isinstance(hyper.get("lr"), (int, float, Tensor)):
        hyper["lr"] = max(float(hyper["lr"]), _LEAST_LR)
    return hyper


def _train_whole(rule: TorchRule, shape: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    """The weights before and after every step of the class itself on one parameter: [_NUM_STEPS + 1, numel]."""
    weights, grads = _numbers(prod(shape))
    torch.default_generator.manual_seed(seed)
    with _refused_if_it_fails(rule.cls, f"a step of its own on a dense parameter of shape {shape}"):
        param = Parameter(weights.to(device).view(shape))
        optimizer = _build(rule.cls, {"params": [param], **_trial_hyper(rule)}, rule.kwargs)
        path = [param.detach().flatten().clone()]
        for grad in grads:
            param.grad = grad.to(device).view(shape)
            optimizer.step()
            path.append(param.detach().flatten().clone())
    if not path[-1].isfinite().all():
        raise OptimizerError(
            f"{_call(rule)}: weights are no longer finite after {_NUM_STEPS} steps on gradients between 1e-4 and 1e4; "
            "check these hyper-parameters"
        )
    return torch.stack(path)


def _train_pieces(rule: TorchRule, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The same weights after `TorchRule` has trained them in pieces: [numel]."""
    weights, grads = _numbers(prod(shape))
    master = weights.to(device)
    buffer = torch.empty_like(master)  # used again for every step, as a shard's is: a class may not hold on to it
    pieces = [(slice(*ends), rule.new_state()) for ends in pairwise(_CUTS[shape])]
    hyper = _trial_hyper(rule)
    with torch.no_grad(), _refused_if_it_fails(rule.cls, "a step on a flat piece of a parameter"):
        for grad in grads:
            buffer.copy_(grad)
            for where, state in pieces:
                rule.update_slice(master[where], buffer[where], state, hyper)
    return master


def _same(rule: TorchRule, shape: tuple[int, ...], path: Tensor, pieces: Tensor) -> bool:
    """Do the pieces end where the path does, bit for bit (True) or up to rounding (False)? Anything else is refused."""
    if torch.equal(path[-1], pieces):
        return True
    # A vectorized pow may round otherwise at the end of a run. What that can add up to goes by how large a weight has
    # been on its way; taking part in a norm moves it by far more.
    worst = ((path[-1] - pieces).abs() / path.abs().amax(dim=0)).max().item()
    if worst < 1e-5:
        return False
    raise _refusal(
        rule.cls,
        f"a parameter of shape {shape} cut into flat pieces ends with other weights (off by up to {worst:.1e} of their "
        f"size after {_NUM_STEPS} steps), so an element's update depends on other elements, on the parameter's shape, "
        "or on state kept outside state[parameter]",
    )


def _itemsizes(rule: TorchRule, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, int], tuple[str, ...]]:
    """Bytes per element by state name, and the names of the state of fixed size."""
    found = []
    for numel in _STATE_NUMELS:
        weights, grads = _numbers(numel)
        master, state = weights.to(device, dtype), rule.new_state()
        with torch.no_grad(), _refused_if_it_fails(rule.cls, f"a step on a flat piece of {dtype}"):
            for grad in grads:
                rule.update_slice(master, grad.to(device, dtype), state, rule.defaults())
        found.append(dict(_walk("", state)))
    small, large = found
    per_element, fixed = {}, []
    for name in small.keys() | large.keys():
        sizes = tuple(_numel(entries.get(name)) for entries in found)
        if sizes == _STATE_NUMELS:
            per_element[name] = int(small[name].element_size())
        elif sizes[0] == sizes[1]:
            fixed.append(name)
        else:
            raise _refusal(rule.cls, f"its state {name!r} has {sizes} elements for {_STATE_NUMELS} parameter elements")
    return dict(sorted(per_element.items())), tuple(sorted(fixed))


def _walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf of nested state, with a dotted name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _walk(f"{prefix}.{index}", inner)
    else:
        yield prefix, value


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 1
