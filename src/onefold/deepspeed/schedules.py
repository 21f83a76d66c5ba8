"""Owns DeepSpeed's learning-rate schedules: its formulas, on any `torch.optim.Optimizer`.

Invariant: the learning rates are a function of the number of steps alone, so a resumed schedule goes on exactly where
it was. Step -1 is before the first `step()`; the optimizer's first update runs at that rate.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from onefold.errors import ConfigError

PerGroup = float | Sequence[float]


class LearningRateSchedule:
    """Base: counts steps and writes learning rates into `optimizer.param_groups`.

    Args:
        optimizer: whose groups are set, at once and at every `step()`.
        last_batch_iteration: the last step that was made; -1 starts afresh.
    Raises:
        ConfigError: a list has not one value for each parameter group, or a length is not positive.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = [float(group["lr"]) for group in optimizer.param_groups]

    def rates(self, step: int) -> list[float]:
        """The learning rate of each group after `step` steps (-1: before the first)."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """The learning rates at this step."""
        return self.rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The learning rates that were written last."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go one step on, or to `last_batch_iteration`, and write the learning rates."""
        later = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = later
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps; all else comes from the arguments."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. The groups keep their rates, which the optimizer's state brings."""
        self.last_batch_iteration = int(state["last_batch_iteration"])

    def _start(self) -> None:
        if self.last_batch_iteration == -1:
            self._write()

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _per_group(self, name: str, value: PerGroup) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [value] * groups
        if len(value) != groups:
            raise ConfigError(f"{name}: {len(value)} values for {groups} parameter groups")
        return list(value)


class _Warmup:
    """The rise from 0 to 1: `log(step + 1) / log(length)` or `step / length`."""

    def __init__(self, steps: int, kind: str) -> None:
        if steps < 0 or kind not in ("log", "linear"):
            raise ConfigError(f"warmup_num_steps={steps}, warmup_type={kind!r}: expected 0 or more, log or linear")
        self.steps = max(2, steps)
        self.kind = kind

    def at(self, step: int) -> float | None:
        """How far it is at `step`; None once it is over."""
        if step >= self.steps:
            return None
        return math.log(step + 1) / math.log(self.steps) if self.kind == "log" else step / self.steps


class WarmupLR(LearningRateSchedule):
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` (at least 2), then constant.

    Args:
        warmup_min_lr, warmup_max_lr: one, or one for each group; `warmup_max_lr=None` takes the groups' own.
        warmup_type: "log" (`log(step + 1) / log(warmup_num_steps)`) or "linear".
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        highest = self._last_lr if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._per_group("warmup_max_lr", highest)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self._start()

    def _after(self, step: int) -> float:
        """The part of the highest rate, after the warm-up."""
        return 1.0

    def rates(self, step: int) -> list[float]:
        if step < 0:
            return list(self.min_lrs)
        rising = self.warmup.at(step)
        part = self._after(step) if rising is None else rising
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linearly down to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self, step: int) -> float:
        left = self.total_num_steps - step
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup.steps))


class WarmupCosineLR(LearningRateSchedule):
    """The groups' own rates times a ratio: from `warmup_min_ratio` up to 1, then as a cosine down to `cos_min_ratio`.

    Before the first `step()` the rates are 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.own_lrs = list(self._last_lr)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self._start()

    def ratio(self, step: int) -> float:
        """The ratio after `step` steps."""
        if step < 0:
            return 0.0
        rising = self.warmup.at(step)
        if rising is not None:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * rising
        gone = (step - self.warmup.steps + 1) / max(1, self.total_num_steps - self.warmup.steps)
        part = (1 + math.cos(math.pi * min(1.0, gone))) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * part)

    def rates(self, step: int) -> list[float]:
        return [own * self.ratio(step) for own in self.own_lrs]


class LRRangeTest(LearningRateSchedule):
    """`min_lr * (1 + rate * (step + 1) / size)`: how high a learning rate may be. With `staircase`, in whole sizes."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if lr_range_test_step_size < 1:
            raise ConfigError(f"lr_range_test_step_size={lr_range_test_step_size}: expected an integer of at least 1")
        self.min_lrs = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._start()

    def rates(self, step: int) -> list[float]:
        sizes = (step + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(sizes) if self.staircase else sizes)
        return [low * growth for low in self.min_lrs]


class OneCycle(LearningRateSchedule):
    """Up from `cycle_min_lr` to `cycle_max_lr`, down again, then decay; the first beta goes the other way.

    Args:
        cycle_min_lr, cycle_max_lr: one, or one for each group.
        decay_lr_rate, decay_step_size: after the cycle the lowest rate is divided by `1 + rate * steps / size`; 0 of
            either means no decay.
        cycle_first_step_size, cycle_second_step_size: steps up and steps down (None: as many).
        cycle_first_stair_count, cycle_second_stair_count: in so many stairs; 0 is smooth, None as the first.
        cycle_momentum, cycle_min_mom, cycle_max_mom, decay_mom_rate: the same for beta 1, if the optimizer has betas;
            the second beta is then 0.99.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        down = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size < 1 or down < 0:
            raise ConfigError(
                f"a cycle of {cycle_first_step_size} steps up and {down} down: expected at least 1 up, and none below 0"
            )
        self.up, self.down = cycle_first_step_size, down
        later = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs = (cycle_first_stair_count, later)
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.decay_step_size = decay_step_size
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.min_moms = self._per_group("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._per_group("cycle_max_mom", cycle_max_mom)
        self._start()

    def height(self, step: int) -> float:
        """How high the cycle stands after `step` steps: 0 at its ends, 1 at its peak."""
        place = (step + 1) % (self.up + self.down)
        rising = place <= self.up
        part = place / self.up if rising else (self.up + self.down - place) / self.down
        stairs = self.stairs[0 if rising else 1]
        if stairs == 0:
            return part
        # From integers: a quotient just under a stair would fall a whole stair.
        steps, length = (place, self.up) if rising else (self.up + self.down - place, self.down)
        return (steps * stairs // length) / stairs

    def _decay(self, step: int, rate: float) -> float:
        if self.decay_step_size == 0 or rate == 0:
            return 1.0
        return 1 + rate * (step - (self.up + self.down) + 1) / self.decay_step_size

    def _cycling(self, step: int) -> bool:
        return step < self.up + self.down

    def rates(self, step: int) -> list[float]:
        if not self._cycling(step):
            return [low / self._decay(step, self.decay_lr_rate) for low in self.min_lrs]
        height = self.height(step)
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def momenta(self, step: int) -> list[tuple[float, float]]:
        """The betas of each group after `step` steps."""
        if step < 0:
            return [(low, 0.99) for low in self.min_moms]
        if not self._cycling(step):
            return [(high * self._decay(step, self.decay_mom_rate), 0.99) for high in self.max_moms]
        height = self.height(step)
        return [(high - (high - low) * height, 0.99) for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group at this step; None where they do not cycle."""
        return self.momenta(self.last_batch_iteration) if self.cycle_momentum else None

    def _write(self) -> None:
        super()._write()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas


SCHEDULES: Mapping[str, type[LearningRateSchedule]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
