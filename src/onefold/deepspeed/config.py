"""Owns the top level of a configuration, and the names that are known to belong to something else."""

from typing import Annotated, ClassVar

from onefold.deepspeed import sections as s
from onefold.deepspeed.key_support import Section, honoured, ignored, refused
from onefold.deepspeed.optimizer_sections import OptimizerSection, SchedulerSection
from onefold.deepspeed.values import (
    Anything,
    Count,
    Flag,
    Interval,
    MaybeCount,
    MaybeFree,
    MaybePositive,
    MaybeText,
    NonNegative,
    Positive,
    real,
)
from onefold.deepspeed.zero_section import Aio, Zero

_LOG = "prints only; nothing that is computed depends on it"
_SAME_MEAN = "the mean over the ranks is the same"
_NO_KEY = "no key of DeepSpeed's, which passes over it"
_QUANTIZED_TRAINING = "quantized and compressed training is not supported"


class Config(Section):
    """A whole configuration."""

    aliases: ClassVar[dict[str, str]] = {"bfloat16": "bf16", "allreduce_always_fp32": "fp32_allreduce"}

    train_batch_size: MaybePositive = honoured(None, "samples a step on all ranks; from the other two where not given")
    train_micro_batch_size_per_gpu: MaybePositive = honoured(None, "samples of one backward on one rank")
    gradient_accumulation_steps: MaybePositive = honoured(
        None, "backward passes a step; gradients that rest whole are reduced by the last of them"
    )
    gradient_clipping: NonNegative = honoured(1.0, "max_grad_norm of the optimizer; 0 does not clip")

    zero_optimization: Zero | None = None
    fp16: s.FP16 | None = None
    bf16: s.BF16 | None = None
    torch_autocast: s.Autocast | None = None
    data_types: s.DataTypes | None = None
    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    communication_data_type: s.DType = honoured(None, "Precision(reduce=...)")
    fp32_allreduce: Flag = honoured(False, 'Precision(reduce="fp32")')
    dataloader_drop_last: Flag = honoured(False, "drop_last of the loader that initialize(training_data=) makes")
    prescale_gradients: Flag = ignored(False, _SAME_MEAN)
    gradient_predivide_factor: Annotated[float, real(above=0)] = ignored(1.0, _SAME_MEAN)
    gradient_allreduce_op: s.AllReduce = refused(
        "mean", "gradients are averaged over the ranks", "mean, with the loss times the number of ranks"
    )
    managed_gradient_accumulation: Flag = honoured(
        True, "false: every step() of the engine updates, however many backwards came before it"
    )
    compile: s.Compile | None = None
    activation_checkpointing: s.ActivationCheckpointing | None = None
    checkpoint: s.Checkpoint | None = None
    aio: Aio | None = None

    steps_per_print: Interval = ignored(None, _LOG)
    wall_clock_breakdown: Flag = ignored(False, _LOG)
    memory_breakdown: Flag = ignored(False, _LOG)
    dump_state: Flag = ignored(False, _LOG)
    log_level: MaybeText = ignored(None, _LOG)
    timers: s.Timers | None = None
    flops_profiler: s.FlopsProfiler | None = None
    comms_logger: s.CommsLogger | None = None
    disable_python_gc: Flag = ignored(False, "Python collects its garbage as it does anywhere")
    vocabulary_size: MaybeCount = ignored(None, "no kernel depends on it")
    disable_allgather: Flag = ignored(False, "the plan decides how weights come back to every rank")
    allgather_size: Count = ignored(500_000_000, "a unit is gathered as one buffer; there are no buckets")
    seq_parallel_communication_data_type: s.DType = ignored(None, "there is no sequence parallelism")
    zero_allow_untested_optimizer: Flag = ignored(
        False, "an optimizer that cannot run on parts is refused with a reason"
    )
    zero_force_ds_cpu_optimizer: Flag = ignored(True, "updates of host state run as Onefold's own kernels, bit for bit")
    use_data_before_expert_parallelism: Flag = ignored(False, "there is no expert parallelism")

    tensorboard: s.TensorBoard | None = None
    wandb: s.Wandb | None = None
    csv_monitor: s.CSVMonitor | None = None
    comet: s.Comet | None = None
    elasticity: s.Elasticity | None = None
    autotuning: s.Autotuning | None = None
    amp: s.Amp | None = None
    hybrid_engine: s.HybridEngine | None = None
    progressive_layer_drop: s.LayerDrop | None = None
    data_efficiency: s.DataEfficiency | None = None
    curriculum_learning: s.Curriculum | None = None
    eigenvalue: s.Eigenvalue | None = None
    nebula: s.Nebula | None = None
    tensor_parallel: s.TensorParallel | None = None
    pipeline: s.Pipeline | None = None
    sequence_parallel_size: Positive = refused(1, "there is no sequence parallelism", "1")
    sparse_gradients: Flag = refused(False, "gradients are dense", "false, with nn.Embedding(sparse=False)")
    graph_harvesting: Flag = refused(False, "CUDA graphs are not captured", "false, with compile.enabled true")
    expert_parallel: MaybeFree = refused(None, "there is no expert parallelism", "leave it out")
    sparse_attention: MaybeFree = refused(None, "attention is the model's own", "leave it out", ({},))
    compression_training: MaybeFree = refused(None, _QUANTIZED_TRAINING, "leave it out", ({},))
    quantize_training: MaybeFree = refused(None, _QUANTIZED_TRAINING, "leave it out", ({}, {"enabled": False}))
    weight_quantization: MaybeFree = refused(None, "values are never quantized", "leave it out", ({},))

    comms_config: MaybeFree = ignored(None, f"{_NO_KEY}; comms_logger is what it reads")
    monitor_config: MaybeFree = ignored(None, f"{_NO_KEY}; csv_monitor and the others are what it reads")
    cuda_visible_devices: Anything = ignored(None, f"{_NO_KEY}; the launcher's --include chooses devices")


FOREIGN = {
    name: "GPT-NeoX's own settings (its model, data, launcher), not DeepSpeed's"
    for name in [
        "pipe-parallel-size",
        "model-parallel-size",
        "num-layers",
        "hidden-size",
        "num-attention-heads",
        "seq-length",
        "norm",
        "pos-emb",
        "split",
        "max-position-embeddings",
        "no-weight-tying",
        "scaled-upper-triang-masked-softmax-fusion",
        "bias-gelu-fusion",
        "data-impl",
        "checkpoint-activations",
        "checkpoint-num-layers",
        "partition-activations",
        "synchronize-each-layer",
        "weight-decay",
        "warmup",
        "hidden-dropout",
        "attention-dropout",
        "train-iters",
        "lr-decay-iters",
        "distributed-backend",
        "lr-decay-style",
        "eval-interval",
        "checkpoint-factor",
        "eval-iters",
        "log-interval",
        "save-interval",
        "keep-last-n-checkpoints",
        "launcher",
        "deepspeed_slurm",
        "no_ssh_check",
        "comment",
        "train-data-paths",
        "valid-data-paths",
        "test-data-paths",
    ]
}
"""Keys that files of other programs carry beside DeepSpeed's, and whose they are."""
