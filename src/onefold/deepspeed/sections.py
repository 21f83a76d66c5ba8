"""Owns the sections beside `zero_optimization`: number formats, and the features that are only listed or refused."""

from typing import Annotated, ClassVar, Literal

from onefold.deepspeed.key_support import Section, Support, Switched, adapted, honoured, ignored, refused
from onefold.deepspeed.values import (
    Anything,
    Count,
    Flag,
    Free,
    Integer,
    LossScale,
    MaybeCount,
    MaybeFlag,
    MaybeFree,
    MaybeText,
    MaybeTexts,
    NonNegative,
    Number,
    Positive,
    Text,
    Texts,
    one_of,
    real,
    whole,
)

DType = Annotated[str | None, one_of("fp32", "fp16", "bf16", or_null=True)]
_LOG = "prints only; nothing that is computed depends on it"
_PART = "part of a section that is off"


class FP16(Section):
    """Half precision."""

    default_on_auto: ClassVar[bool] = True

    enabled: Flag = honoured(False, 'Precision(params="fp16"), with a loss scale')
    auto_cast: Flag = honoured(False, "Precision(cast_inputs=...)")
    loss_scale: LossScale = honoured(0.0, "Precision(loss_scale=...): 0 is dynamic, anything else fixed")
    initial_scale_power: Annotated[int, whole(0, 100)] = honoured(16, "DynamicLossScale(initial=2**power)")
    loss_scale_window: Positive = honoured(1000, "DynamicLossScale(window=...)")
    hysteresis: Positive = honoured(2, "DynamicLossScale(hysteresis=...)")
    consecutive_hysteresis: Flag = honoured(False, "DynamicLossScale(consecutive_hysteresis=...)")
    min_loss_scale: Annotated[float, real(above=0)] = honoured(1.0, "DynamicLossScale(minimum=...)")
    fp16_master_weights_and_grads: Flag = adapted(False, "exact fp32 weights are kept all the same: more memory")


class BF16(Section):
    """bfloat16."""

    default_on_auto: ClassVar[bool] = True

    enabled: Flag = honoured(False, 'Precision(params="bf16"): exact weights as 16 bits beside the bf16 ones')
    immediate_grad_update: Flag = ignored(False, "gradients are always reduced as backward makes them")
    check_grad_overflow: Flag = adapted(True, "a step whose gradients are not finite is always skipped")
    bf16_master_weights_and_grads: Flag = adapted(
        False, "gradients are bf16; exact weights are kept all the same, in 2 bytes beside the bf16 ones"
    )
    bf16_optimizer_states: Flag = adapted(False, "optimizer state stays fp32: more memory, exact moments")


class Autocast(Section):
    """`torch.autocast` around the forward pass."""

    default_on_auto: ClassVar[bool] = True

    enabled: Flag = honoured(False, "torch.autocast around the model's forward")
    dtype: Annotated[str, one_of("bfloat16", "float16", "torch.bfloat16", "torch.float16", "bf16", "fp16", "half")] = (
        honoured("bfloat16", "its dtype; with float16, a dynamic loss scale as torch.amp.GradScaler has it")
    )
    lower_precision_safe_modules: MaybeTexts = ignored(None, "gradients are reduced in the parameters' dtype")


class DataTypes(Section):
    """`data_types`."""

    grad_accum_dtype: DType = honoured(None, "Precision(reduce=...)")
    param_dtype: DType = refused(None, "bf16 and fp16 say it", "bf16.enabled or fp16.enabled")
    buffer_dtype: DType = refused(None, "buffers are never touched", "leave it out and convert them in the model")
    keep_in_fp32_modules: Anything = refused("auto", "all parameters compute in one format", "leave it out", ([], None))


class ActivationCheckpointing(Section):
    """What `deepspeed.checkpointing` does with activations."""

    partition_activations: Flag = ignored(False, "takes effect with a model-parallel group only, and Onefold has none")
    number_checkpoints: MaybeCount = ignored(None, "nothing is allocated ahead")
    contiguous_memory_optimization: Flag = ignored(
        False, "takes effect with a model-parallel group only, and Onefold has none"
    )
    synchronize_checkpoint_boundary: Flag = ignored(False, _LOG)
    profile: Flag = ignored(False, _LOG)
    cpu_checkpointing: Flag = refused(
        False, "activations are not moved to the host", "false, with torch.autograd.graph.save_on_cpu in the model"
    )


class FlopsProfiler(Section):
    """`flops_profiler`."""

    enabled: Flag = ignored(False, _LOG)
    recompute_fwd_factor: NonNegative = ignored(0.0, _LOG)
    profile_step: Count = ignored(1, _LOG)
    module_depth: Integer = ignored(-1, _LOG)
    top_modules: Count = ignored(1, _LOG)
    detailed: Flag = ignored(True, _LOG)
    output_file: MaybeText = ignored(None, _LOG)


class CommsLogger(Section):
    """`comms_logger`."""

    enabled: Flag = ignored(False, _LOG)
    prof_all: Flag = ignored(True, _LOG)
    prof_ops: Texts = ignored([], _LOG)
    verbose: Flag = ignored(False, _LOG)
    debug: Flag = ignored(False, _LOG)


_FILES = "how files are written is not configured here"


class ParallelWrite(Section):
    """`checkpoint.parallel_write`."""

    pipeline_stage: Flag = ignored(False, "every rank writes its own part")


class CheckpointWriter(Section):
    """`checkpoint.writer`."""

    type: Text = ignored("FAST", _FILES)
    io_buffer_size: Count = ignored(64 * 2**20, _FILES)
    io_buffer_double: Flag = ignored(True, _FILES)
    io_multiplier: Positive = ignored(1, _FILES)
    show_statistics: Flag = ignored(False, _FILES)
    data_parallel: MaybeText = ignored(None, _FILES)


class Checkpoint(Section):
    """`checkpoint`."""

    tag_validation: Annotated[str, one_of("Ignore", "Warn", "Fail")] = ignored(
        "Warn", "all ranks write one checkpoint together"
    )
    load_universal: Flag = ignored(False, "every checkpoint loads at any number of ranks")
    use_node_local_storage: Flag = refused(False, "a checkpoint is one folder that all ranks can reach", "false")
    parallel_write: ParallelWrite | None = None
    writer: CheckpointWriter | None = None
    checkpoint_serialization: Flag = ignored(True, _FILES)


class Compile(Section):
    """`compile`."""

    enabled: Flag = honoured(False, "shard(compile=True): the forward of every block is compiled")
    disable: Flag = honoured(True, "shard(compile=...): compiled where this is false")
    deepcompile: Flag = adapted(False, "shard(compile=True): blocks are compiled; gathering stays outside of them")
    backend: MaybeText = refused(None, "blocks are compiled by inductor", "inductor", ("inductor",))
    kwargs: Free = refused({}, "blocks are compiled with torch's defaults", "leave it out")
    autoep_non_moe: Flag = refused(False, "there is no expert parallelism", "false")
    free_activation: Flag = ignored(False, "activations are freed by autograd as soon as it can")
    free_activation_threshold: Count = ignored(10485760, "activations are freed by autograd as soon as it can")
    offload_activation: Flag = refused(False, "activations are not moved to the host", "false")
    offload_activation_pin_memory: Flag = ignored(True, _PART)
    offload_opt_states: Flag = refused(False, "the plan says where state rests", "offload_optimizer.device cpu")
    offload_parameters: Flag = refused(False, "the plan says where state rests", "offload_param.device cpu")
    double_buffer: Flag = ignored(True, "how much is gathered ahead is prefetch_bytes")
    symmetric_memory: Flag = ignored(False, "collectives are those of the process group")
    debug_log: Flag = ignored(False, _LOG)
    sync_before_reduce: Flag = ignored(False, "a stream that reads a value waits for it; no other stream does")
    sync_after_reduce: Flag = ignored(False, "a stream that reads a value waits for it; no other stream does")
    sync_before_allgather: Flag = ignored(False, "a stream that reads a value waits for it; no other stream does")
    sync_after_allgather: Flag = ignored(False, "a stream that reads a value waits for it; no other stream does")
    keep_int_input_tensors: Flag = ignored(True, "torch.compile sees the inputs themselves")
    keep_all_input_tensors: Flag = ignored(False, "torch.compile sees the inputs themselves")
    passes: MaybeTexts = refused(None, "blocks are compiled without passes of their own", "leave it out", ([],))


def _off(why: str, nearest: str) -> Support:
    return Support("refused", why, nearest)


_MONITOR = _off("nothing is written to monitors", "false, and log the loss and optimizer.grad_norm in the script")


class TensorBoard(Switched):
    """`tensorboard`."""

    support: ClassVar[Support] = _MONITOR
    enabled: Flag = False
    output_path: MaybeText = None
    job_name: MaybeText = None


class CSVMonitor(TensorBoard):
    """`csv_monitor`."""


class Wandb(Switched):
    """`wandb`."""

    support: ClassVar[Support] = _MONITOR
    enabled: Flag = False
    group: MaybeText = None
    team: MaybeText = None
    project: MaybeText = None


class Comet(Switched):
    """`comet`."""

    support: ClassVar[Support] = _MONITOR
    enabled: Flag = False
    samples_log_interval: Positive = 100
    project: MaybeText = None
    workspace: MaybeText = None
    api_key: MaybeText = None
    experiment_name: MaybeText = None
    experiment_key: MaybeText = None
    online: MaybeFlag = None
    mode: MaybeText = None


class Elasticity(Switched):
    """`elasticity`."""

    support: ClassVar[Support] = _off(
        "batch sizes are not chosen anew when ranks come or go", "false, with batch sizes given"
    )
    enabled: Flag = False
    max_train_batch_size: Positive = 2000
    micro_batch_sizes: Anything = None
    min_gpus: Positive = 1
    max_gpus: Positive = 10000
    min_time: Count = 0
    prefer_larger_batch: Flag = True
    prefer_large_batch: Flag = True
    ignore_non_elastic_batch_info: Flag = False
    version: Number = 0.2
    model_parallel_size: Positive = 1
    num_gpus_per_node: Positive = 1


class Autotuning(Switched):
    """`autotuning`."""

    support: ClassVar[Support] = _off("there is no autotuner", "false, and plan_for to choose a plan")
    enabled: Flag = False
    fast: Flag = True
    results_dir: MaybeText = None
    exps_dir: MaybeText = None
    overwrite: Flag = True
    start_profile_step: Count = 3
    end_profile_step: Count = 5
    metric: Text = "throughput"
    metric_path: MaybeText = None
    tuner_type: Text = "gridsearch"
    tuner_early_stopping: Count = 5
    tuner_num_trials: Integer = 50
    arg_mappings: Anything = None
    model_info: Anything = None
    model_info_path: MaybeText = None
    mp_size: Positive = 1
    max_train_batch_size: MaybeCount = None
    min_train_batch_size: MaybeCount = None
    max_train_micro_batch_size_per_gpu: MaybeCount = None
    min_train_micro_batch_size_per_gpu: MaybeCount = None
    num_tuning_micro_batch_sizes: MaybeCount = None


class Amp(Switched):
    """`amp`."""

    default_on_auto: ClassVar[bool] = True
    support: ClassVar[Support] = _off("Apex is not used", "fp16.enabled or bf16.enabled")
    enabled: Flag = False
    opt_level: Text = "O1"
    loss_scale: Anything = None
    keep_batchnorm_fp32: Anything = None
    master_weights: Anything = None
    cast_model_type: Anything = None


class HybridEngine(Switched):
    """`hybrid_engine`."""

    support: ClassVar[Support] = _off(
        "there is no second engine for generating", "false, with onefold.gathered around it"
    )
    enabled: Flag = False
    max_out_tokens: Positive = 512
    inference_tp_size: Positive = 1
    release_inference_cache: Flag = False
    pin_parameters: Flag = True
    tp_gather_partition_size: Positive = 8
    enable_cuda_graph: Flag = False


class LayerDrop(Switched):
    """`progressive_layer_drop`."""

    support: ClassVar[Support] = _off("layers are not dropped during training", "false")
    enabled: Flag = False
    theta: Number = 0.5
    gamma: Number = 0.001


class DataEfficiency(Switched):
    """`data_efficiency`."""

    support: ClassVar[Support] = _off("data sampling and token dropping are the script's", "false")
    enabled: Flag = False
    seed: Count = 1234
    data_sampling: MaybeFree = None
    data_routing: MaybeFree = None


class Curriculum(Switched):
    """`curriculum_learning`."""

    support: ClassVar[Support] = _off("the order of the data is the script's", "false")
    enabled: Flag = False
    curriculum_type: MaybeText = None
    min_difficulty: MaybeCount = None
    max_difficulty: MaybeCount = None
    schedule_type: MaybeText = None
    schedule_config: MaybeFree = None


class Eigenvalue(Switched):
    """`eigenvalue`."""

    support: ClassVar[Support] = _off("quantized training is not supported", "false")
    enabled: Flag = False
    verbose: Flag = False
    max_iter: Positive = 100
    tol: Number = 1e-2
    stability: Number = 1e-6
    gas_boundary_resolution: Positive = 1
    layer_name: MaybeText = None
    layer_num: Count = 0


class Nebula(Switched):
    """`nebula`."""

    support: ClassVar[Support] = _off("checkpoints go to a folder", "false")
    enabled: Flag = False
    persistent_storage_path: MaybeText = None
    persistent_time_interval: Count = 100
    num_of_version_in_retention: Count = 2
    enable_nebula_load: Flag = True
    load_path: MaybeText = None


class Throughput(Section):
    """`timers.throughput`."""

    enabled: Flag = ignored(True, _LOG)
    synchronized: Flag = ignored(True, _LOG)


class Timers(Section):
    """`timers`."""

    throughput: Throughput | None = None


class TensorParallel(Section):
    """`tensor_parallel`."""

    autotp_size: Count = refused(0, "there is no tensor parallelism", "0, with stage 3 for what does not fit", (1,))
    tp_size: Count = refused(1, "there is no tensor parallelism", "1, with stage 3 for what does not fit", (0,))
    tp_grain_size: Positive = ignored(1, _PART)
    tp_overlap_comm: Flag = ignored(False, _PART)
    preset_model: MaybeText = ignored(None, _PART)
    tp: Anything = ignored(None, _PART)
    tensor_parallel: Anything = ignored(None, _PART)
    partition_config: Anything = ignored(None, _PART)
    injection_policy_tuple: Anything = ignored(None, _PART)
    vocab_parallel_lm_head: MaybeFlag = ignored(None, _PART)
    vocab_parallel_ce_backend: Text = ignored("torch", _PART)
    keep_module_on_host: Flag = ignored(False, _PART)
    replace_with_kernel_inject: Flag = ignored(False, _PART)


class Pipeline(Section):
    """`pipeline`."""

    stages: Anything = refused("auto", "there is no pipeline parallelism", "1", (1, None))
    partition: Text = ignored("best", _PART)
    seed_layers: Flag = ignored(False, _PART)
    activation_checkpoint_interval: Count = ignored(0, _PART)
    pipe_partitioned: Flag = ignored(True, _PART)
    grad_partitioned: Flag = ignored(True, _PART)


AllReduce = Annotated[Literal["mean", "sum"], one_of("mean", "sum")]
