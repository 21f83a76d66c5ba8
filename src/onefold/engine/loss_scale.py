"""Owns the loss scale of fp16 training: the factor that keeps small gradients above fp16's smallest number.

Invariant: the scale is a function of the configuration and the sequence of overflow flags alone. Every rank is given
the same flags, so every rank holds the same scale without talking about it.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from onefold.errors import LossScaleError
from onefold.plan.precision import DynamicLossScale


@runtime_checkable
class Scaler(Protocol):
    """What a training step needs of a loss scale, fixed or dynamic."""

    @property
    def scale(self) -> float:
        """The factor that the loss of the next step is multiplied by."""
        ...

    def update(self, overflow: bool) -> None:
        """Take note of one step: did any gradient on any rank come out infinite or NaN?"""
        ...

    def state_dict(self) -> dict[str, float | int]:
        """Everything that changes, as plain numbers."""
        ...

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Continue where `state_dict` was taken."""
        ...


class StaticScaler:
    """A loss scale that stays as it was configured, also across a resume."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = float(scale)

    @property
    def scale(self) -> float:
        return self._scale

    def update(self, overflow: bool) -> None:
        """Nothing to learn: a fixed scale stays, whatever the gradients did."""

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self._scale}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Nothing to take over: the configuration decides a fixed scale, not the checkpoint."""


class LossScaler:
    """DeepSpeed's dynamic loss scale (`DynamicLossScaler.update_scale`), rule for rule.

    An overflow halves the scale, once `hysteresis - 1` overflows have been let pass. The scale doubles when
    `window + 1` good steps have followed the start or the last overflow, and after every `window` more. The allowance
    of overflows is refilled when the scale doubles, or on every good step with `consecutive_hysteresis`.
    """

    def __init__(self, config: DynamicLossScale) -> None:
        self.config = config
        self._scale = float(config.initial)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.cur_hysteresis = config.hysteresis

    @property
    def scale(self) -> float:
        return self._scale

    def update(self, overflow: bool) -> None:
        """Apply the rule for one step.

        Args:
            overflow: did any gradient on any rank come out infinite or NaN? The same on every rank.
        Raises:
            LossScaleError: the scale has to fall, is at `minimum`, and `raise_at_minimum` is set. The scaler is left
                as it was.
        """
        if overflow:
            self._overflowed()
        else:
            self._went_well()
        self.cur_iter += 1

    def _overflowed(self) -> None:
        config = self.config
        if config.hysteresis == 1 or self.cur_hysteresis == 1:
            if self._scale == config.minimum and config.raise_at_minimum:
                raise LossScaleError(
                    f"the gradients of step {self.cur_iter} (counted from 0) overflow and the loss scale is already at "
                    f"its minimum of {config.minimum:g}: most likely the model has diverged. Lower the learning rate, "
                    "clip the gradients (max_grad_norm), train in bf16, or set DynamicLossScale(minimum=...) lower; "
                    "raise_at_minimum=False keeps on skipping steps instead"
                )
            self._scale = max(self._scale / 2, config.minimum)
        else:
            self.cur_hysteresis -= 1
        self.last_overflow_iter = self.cur_iter

    def _went_well(self) -> None:
        config = self.config
        if config.consecutive_hysteresis:
            self.cur_hysteresis = config.hysteresis
        stable = self.cur_iter - self.last_overflow_iter - 1
        if stable > 0 and stable % config.window == 0:
            self.cur_hysteresis = config.hysteresis
            self._scale *= 2

    def state_dict(self) -> dict[str, float | int]:
        return {
            "scale": self._scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "cur_hysteresis": self.cur_hysteresis,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Continue where `state_dict` was taken; the rule itself stays as configured here.

        Raises:
            LossScaleError: `state` is not from a dynamic loss scale.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise LossScaleError(
                f"a dynamic loss scale cannot continue from {dict(state)}: {', '.join(missing)} missing, as when the "
                "run was saved with a fixed loss scale; keep that scale, or start afresh by not loading this state"
            )
        self._scale = float(state["scale"])
        self.cur_iter = int(state["cur_iter"])
        self.last_overflow_iter = int(state["last_overflow_iter"])
        self.cur_hysteresis = int(state["cur_hysteresis"])


def make_scaler(loss_scale: "float | DynamicLossScale | None") -> Scaler:
    """The scaler for `Precision.loss_scale`: dynamic for a `DynamicLossScale`, else fixed (None is 1)."""
    if isinstance(loss_scale, DynamicLossScale):
        return LossScaler(loss_scale)
    return StaticScaler(1.0 if loss_scale is None else loss_scale)
