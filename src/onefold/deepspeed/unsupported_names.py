"""Owns the names of DeepSpeed's that Onefold does not support: why, and what is nearest.

Classes and functions among them can be imported and asked about with isinstance; using one raises. An attribute of
DeepSpeed's engine that this one lacks raises, with its reason, when a script reads it.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from onefold.errors import ConfigError

_REDUCES = "gradients are reduced by the backward itself, and averaged over the ranks; look at them inside "
_REDUCES += "`with onefold.gathered(engine.module):`"
_PARALLEL = "there is data parallelism only, over all ranks"
_MOE = "there is no expert parallelism"
_COMPILE = 'blocks are compiled by `"compile": {"enabled": true}` in the configuration, or by engine.compile()'
_PROFILE = "nothing is profiled; use torch.profiler, whose traces name what each part of a step does"
_TUNER = "there is no autotuner"
_DATA = "the order of the data is the script's"
_SECTION = "the key steers nothing here; engine.config holds the configuration as it was given"
_STATE = "state rests where the configuration says, for the whole run"
_FILES = "how checkpoints are written is not configured"
_MONITOR = "nothing is written to monitors; log engine.get_lr() and engine.get_global_grad_norm() in the script"
_INNER = "it is a detail of DeepSpeed's"

_NAMES: Mapping[str, str] = {
    "coalesce_grad_reduction": "write `with engine.no_sync():` around all micro-batches but the last",
    "clip_fp32_gradients": "engine.step() clips to gradient_clipping",
    "offload_states": _STATE,
    "reload_states": _STATE,
    "swap_tensor_config": _STATE,
    "tput_timer": "nothing is timed; measure around the loop",
    "timers": "nothing is timed; measure around the loop",
    "engine_timers": "nothing is timed; measure around the loop",
    "engine_timers_cache": "nothing is timed; measure around the loop",
    "get_wall_clock_timers": "nothing is timed; measure around the loop",
    "fwd_duration": "nothing is timed; measure around the loop",
    "monitor": _MONITOR,
    "summary_events": _MONITOR,
    "checkpoint_engine": _FILES,
    "save_non_zero_checkpoint": _FILES,
    "save_zero_checkpoint": _FILES,
    "use_node_local_storage": "a checkpoint is one directory that all ranks can reach",
    "load_universal_checkpoint": "every checkpoint loads at any number of ranks",
    "train_batch": "there is no pipeline parallelism; call the engine, engine.backward and engine.step",
    "eval_batch": "there is no pipeline parallelism; call the engine under torch.no_grad()",
    "generate": "the model has no method generate",
    "get_sequence_parallel_group": _PARALLEL,
    "get_data_parallel_rank": "engine.global_rank is it",
    "get_model_parallel_rank": _PARALLEL,
    "get_tensor_parallel_rank": _PARALLEL,
    "data_parallel_group": "collectives go over all ranks: torch.distributed's default group",
    "seq_data_parallel_group": "collectives go over all ranks: torch.distributed's default group",
    "seq_parallel_group": _PARALLEL,
    "sequence_parallel_size": _PARALLEL,
    "seq_dp_world_size": "engine.dp_world_size is it",
    "mesh_device": _PARALLEL,
    "tensor_parallel_config": _PARALLEL,
    "pipeline_parallelism": _PARALLEL,
    "checkpoint_mp_rank": _PARALLEL,
    "optimized_linear_base_weight_sharding": _PARALLEL,
    "optimized_linear_lora_enabled": "use peft, whose adapters run as they are",
    "collect_python_gc": "Python collects its garbage as it does anywhere",
    "sparse_gradients_enabled": "gradients are dense",
    "torch_autocast_z0_gradscaler": "the loss scale is applied inside of the model; engine.optimizer.loss_scale is it",
    "dist_backend": "torch.distributed.get_backend() tells",
    "gradient_average": "gradients are averaged over the ranks",
    "enable_backward_allreduce": _REDUCES,
    "inside_no_sync_ctxt": _REDUCES,
    "client_lr_scheduler": "engine.lr_scheduler is the schedule",
    "training_data": "engine.training_dataloader.dataset is it",
}

_FAMILIES: Mapping[str, str] = {
    "allreduce": _REDUCES,
    "buffered_allreduce": _REDUCES,
    "sparse_all": _REDUCES,
    "all_gather_scalar": "use torch.distributed",
    "autotuning": _TUNER,
    "autotp": _PARALLEL,
    "expert_": _MOE,
    "moe_": _MOE,
    "num_experts": _MOE,
    "gate_modules": _MOE,
    "has_moe": _MOE,
    "all_to_all": _MOE,
    "local_all_to_all": _MOE,
    "load_moe": _MOE,
    "print_forward_breakdown": _MOE,
    "curriculum": _DATA,
    "data_efficiency": _DATA,
    "data_sampling": _DATA,
    "random_ltd": "tokens are not dropped during training",
    "set_custom_curriculum": _DATA,
    "set_data_post": _DATA,
    "compile_": _COMPILE,
    "get_autosp": _COMPILE,
    "get_autotp": _COMPILE,
    "get_deep": _COMPILE,
    "get_compile": _COMPILE,
    "register_compile": _COMPILE,
    "is_deepcompile": _COMPILE,
    "uses_parallelization": _COMPILE,
    "flops": _PROFILE,
    "checkpoint_": _FILES,
    "zero_nvme": "state does not rest on disks in this version",
    "zero_quantized": "values are never quantized",
    "zenflow": "updates are exact, and run beside the next forward",
    "super_offload": "updates are exact, and run beside the next forward",
    "zero_": _SECTION,
}

_DETAILS = frozenset(
    {
        "aio_config",
        "bf16_master_weights_and_gradients",
        "bf16_optimizer_states",
        "cpuadam_cores_perc",
        "dump_state",
        "fp16_master_weights_and_gradients",
        "get_optimizer_configuration",
        "is_first_weights_partition_group",
        "is_iterable_style_dataset",
        "is_map_style_dataset",
        "is_sanity_checks_enabled",
        "log_level",
        "optimizer_legacy_fusion",
        "torch_autocast_lower_precision_safe_modules",
        "dont_change_device",
        "first_dataloader_check",
        "flatten",
        "unflatten",
        "loaded_checkpoint_dp_world_size",
        "loaded_checkpoint_mp_world_size",
        "losses",
        "module_forward_post_hook",
        "module_forward_pre_hook",
        "param_names",
        "scale_wrt_gas",
        "use_ds_comm",
        "warn_unscaled_loss",
    }
)


def unsupported(name: str, why: str, nearest: str) -> Any:
    """A class that raises ConfigError when it is called.

    Args:
        name: dotted, without `deepspeed.`.
        why: what Onefold does not do.
        nearest: what to use instead.
    """

    def refuse(cls: type, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"deepspeed.{name}: {why}; nearest: {nearest}")

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__doc__": f"Refused: {why}.", "__module__": __name__})


def way_out(name: str) -> str | None:
    """What to do without `name`; None where DeepSpeed's engine has no such name, as far as is known here."""
    if name in _NAMES:
        return _NAMES[name]
    if name in _DETAILS:
        return _INNER
    return next((text for start, text in _FAMILIES.items() if name.startswith(start)), None)


def missing_attribute(name: str) -> str:
    """The message for an attribute that neither engine nor model has."""
    reason = way_out(name)
    if reason is None:
        return f"neither the engine nor its model has an attribute {name!r}"
    return f"engine.{name} is of DeepSpeed's engine and was not carried over: {reason}"
