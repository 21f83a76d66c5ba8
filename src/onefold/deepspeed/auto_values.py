"""Owns what fills in "auto": what is known beside the configuration - ranks, model, the Trainer's arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from onefold.deepspeed.values import as_number
from onefold.errors import ConfigError

PrecisionName = Literal["fp32", "fp16", "bf16"]
_FORMATS: Mapping[torch.dtype, PrecisionName] = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What fills in "auto". None is not known.

    A value in the configuration that contradicts one that is known is refused, except for `model_dtype` and
    `hidden_size`, which only fill in.

    Args:
        num_ranks: data-parallel ranks; not known, as many as the batch sizes say, or one.
        micro_batch: samples of one backward on one rank.
        accumulation: backward passes a step.
        max_grad_norm: norm to clip to; 0 does not clip.
        lr, betas, eps, weight_decay: of the optimizer.
        warmup_steps, total_steps: of the schedule, in optimizer steps.
        precision: what to compute in.
        model_dtype: dtype of the model's parameters, where `precision` is not known.
        hidden_size: width of the model.
    """

    num_ranks: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    max_grad_norm: float | None = None
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None
    precision: PrecisionName | None = None
    model_dtype: torch.dtype | None = None
    hidden_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_ranks", "micro_batch", "accumulation", "hidden_size"):
            value = getattr(self, name)
            if value is not None and (as_number(value) != value or value < 1 or value != int(value)):
                raise ConfigError(f"Given({name}={value!r}): expected an integer of at least 1")

    def with_model(self, model: nn.Module) -> "Given":
        """With the width of `model`, from its Hugging Face `config`, and the dtype of its parameters."""
        config: Any = getattr(model, "config", None)
        widths = [getattr(part, "hidden_size", None) for part in (config, getattr(config, "text_config", None))]
        widths += list(getattr(config, "hidden_sizes", None) or ())
        known = [width for width in widths if isinstance(width, int) and width > 0]
        floats = (param.dtype for param in model.parameters() if param.dtype.is_floating_point)
        return replace(self, hidden_size=max(known, default=None), model_dtype=next(floats, None))

    @classmethod
    def from_arguments(cls, arguments: Any, *, num_ranks: int | None = None, total_steps: int | None = None) -> "Given":
        """What `transformers.TrainingArguments`, or an object with such attributes, says.

        Args:
            arguments: attributes that are not there are not known.
            num_ranks: data-parallel ranks.
            total_steps: optimizer steps of the run; None takes `max_steps` where it is positive.
        """

        def said(name: str) -> Any:
            return getattr(arguments, name, None)

        longest = said("max_steps")
        if total_steps is None and isinstance(longest, int) and longest > 0:
            total_steps = longest
        half, brain = said("fp16"), said("bf16")
        precision: PrecisionName | None = (
            "fp16" if half else "bf16" if brain else None if half is None and brain is None else "fp32"
        )
        first, second = said("adam_beta1"), said("adam_beta2")
        return cls(
            num_ranks=num_ranks,
            micro_batch=said("per_device_train_batch_size"),
            accumulation=said("gradient_accumulation_steps"),
            max_grad_norm=said("max_grad_norm"),
            lr=said("learning_rate"),
            betas=None if first is None or second is None else (float(first), float(second)),
            eps=said("adam_epsilon"),
            weight_decay=said("weight_decay"),
            warmup_steps=_warmup(arguments, total_steps),
            total_steps=total_steps,
            precision=precision,
        )

    @property
    def format(self) -> PrecisionName | None:
        """What to compute in where the configuration leaves it open."""
        if self.precision is not None or self.model_dtype is None:
            return self.precision
        return _FORMATS.get(self.model_dtype, "fp32")


def _warmup(arguments: Any, total_steps: int | None) -> int | None:
    """Steps of warm-up; a fraction below 1 is one of all steps."""
    if total_steps is not None and callable(getattr(arguments, "get_warmup_steps", None)):
        return int(arguments.get_warmup_steps(total_steps))
    steps = getattr(arguments, "warmup_steps", None)
    return int(steps) if isinstance(steps, int | float) and (steps >= 1 or steps == 0) else None


@dataclass(frozen=True, slots=True)
class Filled:
    """What "auto" became: a value, the default where `value` is None, or nothing yet, and then what to give."""

    value: Any = None
    source: str = ""
    missing: str = ""


def fill(path: str, given: Given, written: Mapping[str, Any]) -> Filled | None:
    """What "auto" stands for at `path`; None where "auto" has no meaning of its own.

    Args:
        written: the configuration, in which a learning rate may stand that others follow.
    """
    rule = _RULES.get(path)
    return None if rule is None else rule(given, written)


def _from(name: str) -> Callable[[Given, Mapping[str, Any]], Filled]:
    def rule(given: Given, written: Mapping[str, Any]) -> Filled:
        value = getattr(given, name)
        return Filled(missing=name) if value is None else Filled(value, f"from {name}")

    return rule


def _enabled(name: PrecisionName) -> Callable[[Given, Mapping[str, Any]], Filled]:
    def rule(given: Given, written: Mapping[str, Any]) -> Filled:
        source = "from precision" if given.precision is not None else "as the model's parameters are"
        return Filled(missing="precision") if given.format is None else Filled(given.format == name, source)

    return rule


def _top_lr(given: Given, written: Mapping[str, Any]) -> Filled:
    optimizer = written.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    lr = as_number(params.get("lr")) if isinstance(params, Mapping) else None
    if lr is not None:
        return Filled(lr, "the optimizer's lr")
    return Filled(missing="lr") if given.lr is None else Filled(given.lr, "from lr")


def _size(name: str) -> Callable[[Given, Mapping[str, Any]], Filled]:
    def rule(given: Given, written: Mapping[str, Any]) -> Filled:
        known = name and getattr(given, name) is not None
        return Filled(None, f"from {name}" if known else "worked out with the other two")

    return rule


def _prefetch(given: Given, written: Mapping[str, Any]) -> Filled:
    if given.hidden_size is None:
        return Filled(None, "as many bytes as the largest unit has")
    return Filled(int(0.9 * given.hidden_size**2), "0.9 hidden_size^2")


_RULES: Mapping[str, Callable[[Given, Mapping[str, Any]], Filled]] = {
    "train_batch_size": _size(""),
    "train_micro_batch_size_per_gpu": _size("micro_batch"),
    "gradient_accumulation_steps": _size("accumulation"),
    "gradient_clipping": _from("max_grad_norm"),
    "fp16.enabled": _enabled("fp16"),
    "bf16.enabled": _enabled("bf16"),
    "zero_optimization.stage3_prefetch_bucket_size": _prefetch,
    "optimizer.params.lr": _from("lr"),
    "optimizer.params.betas": _from("betas"),
    "optimizer.params.eps": _from("eps"),
    "optimizer.params.weight_decay": _from("weight_decay"),
    "scheduler.params.warmup_min_lr": lambda given, written: Filled(0.0, "0"),
    "scheduler.params.warmup_max_lr": _top_lr,
    "scheduler.params.warmup_num_steps": _from("warmup_steps"),
    "scheduler.params.total_num_steps": _from("total_steps"),
}
