"""Owns the keys of `zero_optimization`, and of the files that offloading to disk goes through (`aio`)."""

from typing import Annotated, ClassVar

from onefold.deepspeed.key_support import Section, adapted, honoured, ignored, refused
from onefold.deepspeed.values import (
    Count,
    Flag,
    Integer,
    MaybeFlag,
    MaybeFree,
    MaybeText,
    Positive,
    Share,
    Texts,
    one_of,
    whole,
)

Device = Annotated[str, one_of("none", "cpu", "nvme")]

_UNITS = "a unit (a transformer block) is gathered and reduced as one buffer; there are no buckets"
_ORDER = "the order of units is recorded in the first step and replayed; they are gathered ahead up to the prefetch"
_DISK_ONLY = "concerns the disk tier only"
_QUANTIZED = "values are sent as they are, never quantized"


class Aio(Section):
    """How files are read and written."""

    aliases: ClassVar[dict[str, str]] = {"thread_count": "intra_op_parallelism"}
    default_on_auto: ClassVar[bool] = True

    block_size: Positive = ignored(1048576, _DISK_ONLY)
    queue_depth: Positive = ignored(8, _DISK_ONLY)
    intra_op_parallelism: Positive = ignored(1, _DISK_ONLY)
    single_submit: Flag = ignored(False, _DISK_ONLY)
    overlap_events: Flag = ignored(True, _DISK_ONLY)
    use_gds: Flag = ignored(False, _DISK_ONLY)


class OffloadParam(Section):
    """Where parameters rest."""

    default_on_auto: ClassVar[bool] = True

    device: Device = honoured("none", "the plan: where parameters rest; DeepSpeed reads it at stage 3 only")
    nvme_path: MaybeText = ignored(None, _DISK_ONLY)
    buffer_count: Count = ignored(5, _DISK_ONLY)
    buffer_size: Count = ignored(100_000_000, _DISK_ONLY)
    max_in_cpu: Count = ignored(1_000_000_000, _DISK_ONLY)
    pin_memory: Flag = ignored(True, "host memory is locked wherever a device copies from it")


class OffloadOptimizer(Section):
    """Where optimizer state rests, and with it the gradients."""

    default_on_auto: ClassVar[bool] = True

    device: Device = honoured("none", "the plan: where optimizer state rests, and gradients from stage 2 on")
    nvme_path: MaybeText = ignored(None, _DISK_ONLY)
    buffer_count: Count = ignored(4, _DISK_ONLY)
    pin_memory: Flag = ignored(True, "host memory is locked wherever a device copies from it")
    pipeline_read: Flag = ignored(False, _DISK_ONLY)
    pipeline_write: Flag = ignored(False, _DISK_ONLY)
    pipeline: Flag = ignored(False, _DISK_ONLY)
    fast_init: Flag = ignored(False, _DISK_ONLY)
    ratio: Share = honoured(1.0, "the plan: this share of the state off the device, the rest on it, by whole units")
    super_offload: Flag = adapted(
        False, "updates run beside the next forward pass as they always do, exactly, without speculation"
    )
    cpuadam_cores_perc: Share = ignored(0.8, "updates choose the cores that the data loaders and torch leave")


class LeafModules(Section):
    """Modules that are fetched as a whole."""

    default_on_auto: ClassVar[bool] = True

    classes: Texts = ignored([], "a unit is gathered as a whole, whatever part of it a rank uses")
    names: Texts = ignored([], "a unit is gathered as a whole, whatever part of it a rank uses")
    name_suffixes: Texts = ignored([], "a unit is gathered as a whole, whatever part of it a rank uses")


class Zero(Section):
    """The plan, and how it moves bytes."""

    aliases: ClassVar[dict[str, str]] = {
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
    }
    default_on_auto: ClassVar[bool] = True

    stage: Annotated[int, whole(0, 3)] = honoured(0, "the plan: ZERO_0, ZERO_1, ZERO_2 or ZERO_3")
    offload_optimizer: OffloadOptimizer | None = None
    offload_param: OffloadParam | None = None
    cpu_offload: MaybeFlag = honoured(None, "offload_optimizer.device cpu, as this older key means")
    cpu_offload_param: MaybeFlag = honoured(None, "offload_param.device cpu, as this older key means")
    cpu_offload_params: MaybeFlag = honoured(None, "offload_param.device cpu, as this older key means")
    cpu_offload_use_pin_memory: MaybeFlag = ignored(None, "host memory is locked wherever a device copies from it")
    stage3_prefetch_bucket_size: Count = honoured(
        50_000_000, "prefetch_bytes under ZERO_3: as many elements; not given, as many bytes as the largest unit has"
    )
    stage3_max_live_parameters: Count = adapted(
        1_000_000_000, "an upper bound of prefetch_bytes; what is in use is one unit and the next ones prefetched"
    )
    stage3_gather_16bit_weights_on_model_save: Flag = honoured(False, "whether save_16bit_model writes whole weights")
    contiguous_gradients: Flag = ignored(True, "gradients always lie in one buffer for each unit")
    reduce_scatter: Flag = ignored(True, "the plan decides how gradients are reduced; the sums are the same")
    reduce_bucket_size: Positive = ignored(500_000_000, _UNITS)
    use_multi_rank_bucket_allreduce: Flag = ignored(True, _UNITS)
    allgather_partitions: Flag = ignored(True, _UNITS)
    allgather_bucket_size: Count = ignored(500_000_000, _UNITS)
    overlap_comm: MaybeFlag = ignored(None, "reducing and gathering always overlap with the computation")
    compute_grad_norm: Flag = ignored(True, "the norm is always computed; it also finds overflows")
    load_from_fp32_weights: Flag = ignored(True, "checkpoints hold exact weights, and those are loaded")
    elastic_checkpoint: Flag = ignored(False, "a checkpoint does not depend on the number of ranks")
    sub_group_size: Count = ignored(1_000_000_000, "updates go unit by unit")
    stage3_param_persistence_threshold: Count = ignored(
        100_000, "small parameters travel with their unit and cost no gather of their own"
    )
    stage3_model_persistence_threshold: Count = ignored(
        2**63 - 1, "small parameters travel with their unit and cost no gather of their own"
    )
    stage3_max_reuse_distance: Count = ignored(1_000_000_000, _ORDER)
    stage3_module_granularity_threshold: Integer = ignored(0, _UNITS)
    stage3_use_all_reduce_for_fetch_params: Flag = ignored(False, _UNITS)
    stage3_allgather_sequential: Flag = ignored(False, _UNITS)
    ignore_unused_parameters: Flag = ignored(True, "unused parameters are left alone and are no error")
    legacy_stage1: Flag = ignored(False, "there is one way of splitting optimizer state")
    round_robin_gradients: Flag = ignored(False, "every rank takes its part of every unit")
    parameter_alignment: Flag = ignored(False, "parameters always start at a multiple of 16 elements")
    grad_hooks: Flag = ignored(True, "gradients are always reduced as backward makes them")
    memory_efficient_linear: Flag = ignored(True, "no module's forward is replaced")
    pipeline_loading_checkpoint: Flag = ignored(False, "each rank loads its own part")
    override_module_apply: Flag = ignored(True, "no method of a module is replaced")
    log_trace_cache_warnings: Flag = ignored(False, "a change of order is handled; there is no trace to invalidate")
    enable_sanity_checks: Flag = ignored(False, "ranks always check that they do the same")
    save_muon_momentum_buffer_in_memory: Flag = ignored(False, _DISK_ONLY)
    leaf_module: LeafModules | None = None
    aio: Aio | None = None
    zero_hpz_partition_size: Count = refused(
        1, "a second copy of the parameters in each node is not kept", "1, or stage 2, which keeps them whole", (0,)
    )
    zero_quantized_weights: Flag = refused(False, _QUANTIZED, "false, with bf16 parameters")
    zero_quantized_nontrainable_weights: Flag = refused(False, _QUANTIZED, "false, with bf16 parameters")
    zero_quantized_gradients: Flag = refused(False, _QUANTIZED, "false, with communication_data_type bf16")
    zeropp_loco_param: MaybeFree = refused(None, _QUANTIZED, "leave it out")
    mics_shard_size: Integer = refused(
        -1, "over which ranks state is split is said by shard's mesh", "-1, and a mesh of two axes for shard", (0,)
    )
    mics_hierarchical_params_gather: Flag = refused(False, "gathers have one level", "false")
    zenflow: MaybeFree = refused(
        None,
        "updating important gradients first changes what is computed",
        "leave it out: offload_optimizer alone overlaps updates with the next forward pass, exactly",
    )
