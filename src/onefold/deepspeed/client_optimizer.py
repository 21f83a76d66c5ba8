"""Owns the choice of optimizer and schedule: the script's own (DeepSpeed calls it the client's) or the configuration's.

Invariant: groups name their parameters while the model is sharded, so that they hold the parameters it has after.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

from onefold.deepspeed.spec import NATIVE, OptimizerSpec, Translation, UncorrectedAdam
from onefold.errors import OptimizerError
from onefold.optim.optimizer import Optimizer
from onefold.optim.optimizers import Elementwise
from onefold.plan.precision import DynamicLossScale

_HOW = frozenset({"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"})
"""Arguments of torch's classes that say how they compute, not what."""


_THEIRS = object()
"""The key under which a group comes with the dict that stands for it in the script's optimizer."""


class DeepSpeedOptimizer(Optimizer):
    """One of Onefold's optimizers, with the names that scripts written for DeepSpeed read."""

    def add_param_group(self, param_group: dict[Any, Any]) -> None:
        """As Onefold's, but where the script's optimizer has a dict for the group, that one is used on."""
        theirs = param_group.pop(_THEIRS, None)
        if theirs is not None:
            theirs.clear()
            theirs.update(param_group)
            param_group = theirs
        super().add_param_group(param_group)

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient on some rank was not finite."""
        return self.skipped

    @property
    def cur_scale(self) -> float:
        """The loss scale now; 1.0 without one."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes by itself."""
        return isinstance(self._session.precision.loss_scale, DynamicLossScale)

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Refused: only the engine knows how many micro-batches a step has.

        Raises:
            OptimizerError: always.
        """
        raise OptimizerError("optimizer.backward(loss) is not carried over: call engine.backward(loss)")


_MAKERS: Mapping[str, Callable[..., Optimizer]] = {
    cls.__name__: type(cls.__name__, (DeepSpeedOptimizer, cls), {"__doc__": cls.__doc__, "__module__": __name__})
    for cls in (*NATIVE.values(), Elementwise)
}


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group by the names of its parameters, with the hyper-parameters that are its own."""

    names: Sequence[str]
    hyper: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChosenOptimizer:
    """What is to be updated, and how.

    Args:
        spec: the optimizer; None where neither the script nor the configuration has one.
        torch_class: the class to run through `Elementwise`; None for Onefold's own.
        groups: None means every trained parameter in one group.
        client: the script's own optimizer, where it made one.
    """

    spec: OptimizerSpec | None
    torch_class: type[torch.optim.Optimizer] | None = None
    groups: Sequence[Group] | None = None
    client: torch.optim.Optimizer | None = None

    def build(self, model: nn.Module, max_grad_norm: float | None) -> Optimizer | None:
        """The optimizer of the sharded `model`. The script's own, where there is one, shares its groups from here on,
        so that learning rates written into either are those of both. So does one whose groups it was made of, as
        accelerate does for updates on the host: a schedule may belong to that.

        Raises:
            OptimizerError: it cannot run on parts of parameters; says why.
        """
        if self.spec is None:
            return None
        common: dict[str, Any] = {"max_grad_norm": max_grad_norm, "param_groups": self._groups(model)}
        kind = () if self.torch_class is None else (self.torch_class,)
        make = _MAKERS[self.spec.name if self.torch_class is None else Elementwise.__name__]
        built = make(model, *kind, **self.spec.arguments, **common)
        if self.client is not None:
            self.client.param_groups = built.param_groups
            self.client.state.clear()
            # What torch's schedules look at to see whether the optimizer they belong to goes first: it does, by proxy.
            vars(self.client)["_opt_called"] = True
        return built

    def _groups(self, model: nn.Module) -> list[dict[Any, Any]] | None:
        if self.groups is None:
            return None
        params = dict(model.named_parameters(remove_duplicate=False))
        made = [{**group.hyper, "params": [params[name] for name in group.names]} for group in self.groups]
        if self.client is None:
            return made
        theirs = [group for group in self.client.param_groups if group["params"]]
        return [{**ours, _THEIRS: its} for ours, its in zip(made, theirs, strict=True)]


def choose_optimizer(
    model: nn.Module,
    optimizer: "torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None",
    model_parameters: "Iterable[Any] | None",
    translation: Translation,
) -> ChosenOptimizer:
    """The script's optimizer, or else the configuration's. Called before the model is sharded.

    Raises:
        OptimizerError: parameters are not the model's; the optimizer is none, or is in use already.
    """
    given = None if model_parameters is None else _listed(model_parameters)
    if given is not None and not given and optimizer is None and translation.optimizer is not None:
        raise OptimizerError(
            "model_parameters is empty: no parameter is trained, or it is a generator that was read to its end before"
        )
    if optimizer is None:
        spec = translation.optimizer
        torch_class = None if spec is None else spec.torch_class
        return ChosenOptimizer(spec, torch_class, None if given is None else _by_name(model, _as_groups(given)))
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise OptimizerError(
                f"optimizer={optimizer!r}: give a torch.optim.Optimizer, or a function of parameters that makes one"
            )
        optimizer = optimizer(list(model.parameters()) if given is None else given)
    if translation.optimizer is not None:
        logging.getLogger("onefold").info(
            "the script's optimizer, %s, is used; %s of the configuration is not",
            type(optimizer).__name__,
            translation.optimizer,
        )
    return _of_client(model, optimizer)


def _of_client(model: nn.Module, client: torch.optim.Optimizer) -> ChosenOptimizer:
    if not isinstance(client, torch.optim.Optimizer):
        raise OptimizerError(f"the function given as optimizer= returned {client!r}, which is no torch.optim.Optimizer")
    if isinstance(client, Optimizer):
        raise OptimizerError(
            "initialize shards the model and makes Onefold's optimizer itself: hand it the model as it is, with an "
            "optimizer of torch.optim, or with none and one in the configuration"
        )
    if any(float(state.get("step", 1)) for state in client.state.values()):  # Adagrad's is there from the start
        raise OptimizerError(
            f"this {type(client).__name__} has made steps or loaded state, which cannot be taken into shards: hand "
            "over a new one, and load with engine.load_checkpoint"
        )
    spec, torch_class = _recipe(client)
    dropped = _HOW if torch_class is None else frozenset()
    groups = [
        {key: value for key, value in group.items() if key not in dropped}
        for group in client.param_groups
        if group["params"]
    ]
    return ChosenOptimizer(spec, torch_class, _by_name(model, groups), client)


def _recipe(client: torch.optim.Optimizer) -> tuple[OptimizerSpec, type[torch.optim.Optimizer] | None]:
    """The optimizer that does what `client` does, and the class to run where Onefold has no rule of its own for it."""
    own = getattr(client, "spec", None)
    if isinstance(own, OptimizerSpec):  # one of onefold.deepspeed.ops
        return own, None
    cls, defaults = type(client), dict(client.defaults)
    if isinstance(client, UncorrectedAdam):
        return OptimizerSpec("UncorrectedAdam", defaults | {"decoupled": client.decoupled}), UncorrectedAdam
    base = _torchs(cls)
    name = "AdamW" if base is torch.optim.Adam and defaults.get("decoupled_weight_decay") else base.__name__
    if name in NATIVE and base is getattr(torch.optim, base.__name__, None):
        taken = signature(NATIVE[name]).parameters
        arguments = {key: value for key, value in defaults.items() if key in taken}
        rest = [key for key, value in defaults.items() if key not in taken and key not in _HOW and value]
        if not rest:
            return OptimizerSpec(name, arguments), None
    taken = signature(cls).parameters
    arguments = {key: value for key, value in defaults.items() if key in taken and key not in _HOW}
    return OptimizerSpec(cls.__name__, arguments), cls


def _torchs(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class of torch.optim that `cls` is under other arguments; itself, if it changes more than those."""
    base = next((each for each in cls.__mro__ if each.__module__.startswith("torch.optim")), cls)
    above = cls.__mro__[: cls.__mro__.index(base)]
    own = {name for each in above for name in vars(each) if not name.startswith("__")}
    return cls if any(hasattr(base, name) for name in own) else base


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, Mapping | torch.Tensor) else list(parameters)


def _as_groups(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups."""
    if all(isinstance(item, Mapping) for item in items):
        groups = [dict(item) for item in items]
    elif all(isinstance(item, torch.Tensor) for item in items):
        groups = [{"params": list(items)}]
    else:
        named = all(isinstance(item, tuple) and len(item) == 2 for item in items)
        if not named:
            raise OptimizerError("model_parameters are parameters, or dicts with params, as for torch.optim; not a mix")
        groups = [{"params": [param for _, param in items]}]
    for group in groups:
        params = group.get("params", ())
        group["params"] = _listed(params)
    return [group for group in groups if group["params"]]


def _by_name(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[Group]:
    """`groups` by the names of their parameters.

    Raises:
        OptimizerError: a parameter is not the model's, or is in two groups.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    seen: set[str] = set()
    found = []
    for index, group in enumerate(groups):
        for param in group["params"]:
            if id(param) not in names:
                raise OptimizerError(
                    f"group {index} holds a tensor of shape {tuple(param.shape)} that is not a parameter of the model; "
                    "make groups from the model that is handed to initialize, after all changes to it"
                )
            if names[id(param)] in seen:
                raise OptimizerError(f"{names[id(param)]!r} is in two parameter groups, or twice in one")
            seen.add(names[id(param)])
        hyper = {key: value for key, value in group.items() if key != "params"}
        found.append(Group([names[id(param)] for param in group["params"]], hyper))
    return found


def choose_scheduler(
    lr_scheduler: Any, optimizer: Optimizer | None, chosen: ChosenOptimizer, translation: Translation
) -> Any:
    """The schedule: the script's, or else the configuration's.

    Args:
        lr_scheduler: one of the script's own optimizer, a function of an optimizer that makes one, or None.
    Raises:
        OptimizerError: it belongs to another optimizer than the one that was handed over, or there is none.
    """
    if lr_scheduler is None:
        spec = translation.scheduler
        return None if spec is None or optimizer is None else spec.build(optimizer)
    if optimizer is None:
        raise OptimizerError("lr_scheduler= without an optimizer: give one, or write one into the configuration")
    if translation.scheduler is not None:
        logging.getLogger("onefold").info(
            "the script's schedule is used; %s of the configuration is not", translation.scheduler
        )
    if callable(lr_scheduler):
        return lr_scheduler(optimizer)
    owner = getattr(lr_scheduler, "optimizer", chosen.client)
    groups = getattr(owner, "param_groups", ())
    if owner is not chosen.client and not any(mine is its for mine in optimizer.param_groups for its in groups):
        raise OptimizerError(
            f"this {type(lr_scheduler).__name__} sets the learning rates of another optimizer; make it of the one that "
            "is handed to initialize, or hand over a function: lr_scheduler=lambda optimizer: ..."
        )
    return lr_scheduler
