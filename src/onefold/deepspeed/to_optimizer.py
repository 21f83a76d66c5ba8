"""Owns the way to optimizer and schedule: types and arguments in DeepSpeed's words, as specs of what runs here."""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch

from onefold.deepspeed.optimizer_sections import NO_OPTIMIZERS, OPTIMIZERS, SCHEDULERS, AdamParams, OptimizerParams
from onefold.deepspeed.spec import NATIVE, OptimizerSpec, SchedulerSpec
from onefold.deepspeed.values import as_number, said
from onefold.deepspeed.walk import Findings
from onefold.errors import OptimizerError
from onefold.optim.elementwise import TorchRule

_NO_SCHEDULES = {
    "ReduceLROnPlateau": "it needs a metric at every step",
    "SequentialLR": "it is made of schedules",
    "ChainedScheduler": "it is made of schedules",
    "LambdaLR": "it is made of functions",
    "MultiplicativeLR": "it is made of functions",
}
_TORCH_SCHEDULES = sorted(
    name
    for name, cls in vars(torch.optim.lr_scheduler).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.lr_scheduler.LRScheduler) and not name.startswith("_")
)
_TORCH_OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name != "Optimizer"
)


def optimizer_of(findings: Findings) -> OptimizerSpec | None:
    """The optimizer; None where the script brings its own, or what was written cannot be used."""
    section = findings.config.optimizer
    if section is None:
        return None
    kind, path = section.type, "optimizer.type"
    refused = NO_OPTIMIZERS.get(kind.lower())
    if refused:
        findings.refuse(path, f"{kind}: {refused[0]}; nearest: {refused[1]}")
        findings.note("optimizer.params", "the type is refused", "ignored")
        return None
    if kind.lower() not in OPTIMIZERS:
        return _torch_optimizer(findings, kind, section.params or {})
    params = findings.optimizer
    if params is None:
        return None
    spec = _adam(kind, params) if isinstance(params, AdamParams) else _plain(kind, params)
    unlike = f"; {spec.name} is what {kind} computes" if spec.name.lower() != kind.lower() else ""
    findings.note(path, f"{spec.name}{unlike}")
    return spec


def _adam(kind: str, params: AdamParams) -> OptimizerSpec:
    decoupled = kind.lower() == "adamw" or params.adam_w_mode
    decay = params.weight_decay
    if params.torch_adam and decoupled and "weight_decay" not in params.model_fields_set:
        decay = 0.01
    arguments: dict[str, Any] = {
        "lr": params.lr,
        "betas": params.betas,
        "eps": params.eps,
        "weight_decay": decay,
    }
    if not params.bias_correction:
        return OptimizerSpec("UncorrectedAdam", {**arguments, "decoupled": decoupled})
    if params.amsgrad:
        arguments["amsgrad"] = True
    return OptimizerSpec("AdamW" if decoupled else "Adam", arguments)


def _plain(kind: str, params: OptimizerParams) -> OptimizerSpec:
    skipped = {"max_grad_norm", "set_grad_none"}
    arguments = {name: getattr(params, name) for name in type(params).model_fields if name not in skipped}
    return OptimizerSpec({"lion": "Lion", "adagrad": "Adagrad"}[kind.lower()], arguments)


def _torch_optimizer(findings: Findings, kind: str, params: Mapping[str, Any]) -> OptimizerSpec | None:
    if kind not in _TORCH_OPTIMIZERS:
        known = [*_TORCH_OPTIMIZERS, *(name for name in ("Lion",))]
        folded = {name.lower(): name for name in known}
        plain = kind.lower().removeprefix("deepspeed").removeprefix("cpu").removeprefix("fused")  # names of classes
        close = get_close_matches(plain, folded, n=1, cutoff=0.6)
        meant = f"did you mean {folded[close[0]]}?" if close else f"known are {', '.join(known)}"
        findings.refuse("optimizer.type", f"there is no optimizer {kind!r}; {meant}")
        return None
    cls = getattr(torch.optim, kind)
    arguments = _arguments(findings, "optimizer.params", cls, params)
    if arguments is None:
        return None
    try:
        TorchRule(cls, arguments)
    except OptimizerError as error:
        findings.refuse("optimizer.params", str(error))
        return None
    findings.note("optimizer.type", kind if kind in NATIVE else f"Elementwise(torch.optim.{kind})")
    return OptimizerSpec(kind, arguments)


def scheduler_of(findings: Findings) -> SchedulerSpec | None:
    """The schedule; None where there is none, or what was written cannot be used."""
    section = findings.config.scheduler
    if section is None:
        return None
    if section.type in SCHEDULERS:
        params = findings.scheduler
        if params is None:
            return None
        findings.note("scheduler.type", f"onefold.deepspeed.{section.type}")
        names = [name for name in params.model_fields_set if name != "last_batch_iteration"]
        return SchedulerSpec(section.type, {name: getattr(params, name) for name in sorted(names)})
    if section.type in _NO_SCHEDULES:
        findings.refuse("scheduler.type", f"{section.type}: {_NO_SCHEDULES[section.type]}; make it in the script")
        return None
    if section.type not in _TORCH_SCHEDULES:
        known = [*SCHEDULERS, *_TORCH_SCHEDULES]
        close = get_close_matches(section.type, known, n=1, cutoff=0.6)
        meant = f"did you mean {close[0]}?" if close else f"DeepSpeed's are {', '.join(SCHEDULERS)}"
        findings.refuse("scheduler.type", f"there is no schedule {section.type!r}; {meant}")
        return None
    return _torch_schedule(findings, section.type, section.params or {})


def _torch_schedule(findings: Findings, kind: str, params: Mapping[str, Any]) -> SchedulerSpec | None:
    cls = getattr(torch.optim.lr_scheduler, kind)
    arguments = _arguments(findings, "scheduler.params", cls, params)
    if arguments is None:
        return None
    weight = torch.nn.Parameter(torch.zeros(1))
    try:
        cls(torch.optim.SGD([weight], lr=0.1, momentum=0.9), **arguments)
    except Exception as error:  # torch's classes raise whatever their arithmetic does
        findings.refuse("scheduler.params", f"torch.optim.lr_scheduler.{kind} refuses them: {error}")
        return None
    findings.note("scheduler.type", f"torch.optim.lr_scheduler.{kind}")
    return SchedulerSpec(kind, arguments)


def _arguments(findings: Findings, path: str, cls: type, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """`params` as arguments of `cls`, numeric strings as numbers; None if a name or a value is none of its."""
    known = dict(list(inspect.signature(cls).parameters.items())[1:])  # the first is the parameters, or the optimizer
    arguments, wrong = {}, False
    for name, value in params.items():
        if name in known:
            argument = _like(known[name].default, value)
            what = None if argument is not _NOT else f"expected {_expected(known[name].default)}, not {said(value)}"
            arguments[name] = argument
        else:
            close = get_close_matches(name, known, n=1, cutoff=0.7)
            meant = f"did you mean {close[0]}?" if close else f"{cls.__name__} takes {', '.join(known)}"
            what = f"unknown key; {meant}"
        if what is not None:
            findings.refuse(f"{path}.{name}", what)
            wrong = True
    return None if wrong else arguments


_NOT = object()


def _like(default: Any, value: Any) -> Any:
    """`value` as what an argument with this default may be; `_NOT` if it is none."""
    if isinstance(default, bool) or isinstance(value, bool) or value is None:
        fits = isinstance(value, bool) if isinstance(default, bool) else default is None
        return value if fits else _NOT
    if isinstance(default, str):
        return value if isinstance(value, str) else _NOT
    if isinstance(value, list):
        numbers = [as_number(item) for item in value]
        fits = bool(numbers) and None not in numbers
        if isinstance(default, tuple):
            return tuple(numbers) if fits and len(numbers) == len(default) else _NOT
        return numbers if fits and not isinstance(default, int | float) else _NOT
    number = as_number(value)
    return _NOT if number is None or isinstance(default, tuple) else number


def _expected(default: Any) -> str:
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, tuple):
        return f"{len(default)} numbers"
    return "a string" if isinstance(default, str) else "a number"
