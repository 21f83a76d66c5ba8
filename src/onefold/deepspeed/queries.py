"""Owns what an engine answers about its configuration, by the names of DeepSpeed's engine.

Invariant: an answer is what the configuration asked for and the engine carries out. Names that would ask for what does
not exist here are in `unsupported_names.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from onefold.deepspeed.config import Config
from onefold.deepspeed.optimizer_sections import OPTIMIZERS
from onefold.deepspeed.spec import Translation
from onefold.plan.precision import DynamicLossScale
from onefold.plan.table import Tier

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Queries:
    """Answers from the configuration. `_settings` is as it was written, `_translation` what it became."""

    _settings: Config
    _translation: Translation

    def train_batch_size(self) -> int:
        raise NotImplementedError

    def train_micro_batch_size_per_gpu(self) -> int:
        raise NotImplementedError

    def gradient_accumulation_steps(self) -> int:
        raise NotImplementedError

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples a step on all ranks; samples of one backward on one rank; backwards a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    # --- the plan

    def zero_optimization_stage(self) -> int:
        """0 to 3, as configured."""
        zero = self._settings.zero_optimization
        return 0 if zero is None else zero.stage

    def zero_optimization(self) -> bool:
        """Whether anything is split over the ranks."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are split over the ranks."""
        return self._translation.plan.grads.partitioned

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are split over the ranks."""
        return self._translation.plan.params.partitioned

    def zero_offload_optimizer(self) -> Any:
        """The section `offload_optimizer` as written; None if there is none."""
        zero = self._settings.zero_optimization
        return None if zero is None else zero.offload_optimizer

    def zero_offload_param(self) -> Any:
        """The section `offload_param` as written; None if there is none."""
        zero = self._settings.zero_optimization
        return None if zero is None else zero.offload_param

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether updates are made on the host."""
        return self._translation.plan.optim.farthest > Tier.DEVICE

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer state rests on the host."""
        return self._translation.plan.optim.farthest == Tier.HOST

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` writes whole weights where parameters are split."""
        return self._translation.save_16bit

    def zero_prefetch_bucket_size(self) -> int | None:
        """Elements to gather ahead, as written; None where nothing is."""
        zero = self._settings.zero_optimization
        return None if zero is None else zero.stage3_prefetch_bucket_size

    def zero_max_live_parameters(self) -> int | None:
        """The upper bound of elements that are gathered ahead, as written."""
        zero = self._settings.zero_optimization
        return None if zero is None else zero.stage3_max_live_parameters

    # --- number formats

    def fp16_enabled(self) -> bool:
        """Whether parameters compute in fp16."""
        return self._translation.precision.params == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether parameters compute in bf16."""
        return self._translation.precision.params == torch.bfloat16

    def fp16_auto_cast(self) -> bool:
        """Whether inputs of the model are cast to fp16."""
        return self._translation.precision.cast_inputs

    def torch_autocast_enabled(self) -> bool:
        """Whether forward runs under `torch.autocast`."""
        return self._translation.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Its dtype; None where it is off."""
        return self._translation.autocast

    def amp_enabled(self) -> bool:
        """False: Apex is not used."""
        return False

    def loss_scale(self) -> float:
        """The loss scale as configured: 0 is dynamic. `optimizer.loss_scale` is the one in use."""
        scale = self._translation.precision.loss_scale
        return 0.0 if isinstance(scale, DynamicLossScale) else float(scale or 0.0)

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes by itself."""
        return isinstance(self._translation.precision.loss_scale, DynamicLossScale)

    def initial_dynamic_scale(self) -> float | None:
        """What it starts from; None where it is fixed, or there is none."""
        scale = self._translation.precision.loss_scale
        return scale.initial if isinstance(scale, DynamicLossScale) else None

    def dynamic_loss_scale_args(self) -> dict[str, Any] | None:
        """Its settings by DeepSpeed's names; None where it is fixed, or there is none."""
        scale = self._translation.precision.loss_scale
        if not isinstance(scale, DynamicLossScale):
            return None
        return {
            "init_scale": scale.initial,
            "scale_window": scale.window,
            "min_scale": scale.minimum,
            "delayed_shift": scale.hysteresis,
            "consecutive_hysteresis": scale.consecutive_hysteresis,
        }

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype that gradients are summed in over the ranks."""
        precision = self._translation.precision
        known = precision.reduce or precision.params
        return known if isinstance(known, torch.dtype) else torch.float32

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of the model, and that of its gradients while they are summed."""
        params = self._translation.precision.params
        return (params if isinstance(params, torch.dtype) else torch.float32), self.communication_data_type

    # --- optimizer and schedule

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0 does not clip."""
        return self._translation.max_grad_norm or 0.0

    def optimizer_name(self) -> str | None:
        """The type in the configuration, in lower case where DeepSpeed knows it; None where the script brings one."""
        section = self._settings.optimizer
        if section is None:
            return None
        return section.type.lower() if section.type.lower() in OPTIMIZERS else section.type

    def optimizer_params(self) -> Mapping[str, Any] | None:
        """Its `params`, as written."""
        section = self._settings.optimizer
        return None if section is None else section.params

    def scheduler_name(self) -> str | None:
        """The type in the configuration; None where the script brings one."""
        section = self._settings.scheduler
        return None if section is None else section.type

    def scheduler_params(self) -> Mapping[str, Any] | None:
        """Its `params`, as written."""
        section = self._settings.scheduler
        return None if section is None else section.params

    # --- the rest

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts the backwards of a step; else every `step()` updates."""
        return self._translation.managed

    def dataloader_drop_last(self) -> bool:
        """Whether loaders leave out a last batch that is not full."""
        return self._translation.drop_last

    def steps_per_print(self) -> float | None:
        """As written; nothing is printed."""
        return self._settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """As written; nothing is printed."""
        return self._settings.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """As written; nothing is printed."""
        return self._settings.memory_breakdown

    def postscale_gradients(self) -> bool:
        """As written: the mean is the same either way."""
        return not self._settings.prescale_gradients

    def gradient_predivide_factor(self) -> float:
        """As written: the mean is the same whatever it is."""
        return self._settings.gradient_predivide_factor
