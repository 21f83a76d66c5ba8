"""The room of the facade: DeepSpeed's configuration and names, in Onefold's terms.

Owns what a script written for DeepSpeed imports and configures. Imports `interop.huggingface` and below. Needs
pydantic: `pip install onefold[deepspeed]`.
Words: a *key* of a configuration has its *support*, from honoured to refused; *auto values* fill in "auto"; a
*translation* is a configuration in Onefold's terms, a *verdict* what became of one key.

A script imports it as `deepspeed`; `install()` makes `import deepspeed` mean this package, for libraries that import it
themselves.
"""

from onefold.deepspeed import checkpointing, comm, moe, ops, pipe, runtime, utils, zero
from onefold.deepspeed.accelerator import get_accelerator
from onefold.deepspeed.arguments import add_config_arguments
from onefold.deepspeed.auto_values import Given
from onefold.deepspeed.client_optimizer import DeepSpeedOptimizer
from onefold.deepspeed.engine import DeepSpeedEngine
from onefold.deepspeed.initialize import initialize
from onefold.deepspeed.install import install
from onefold.deepspeed.loader import DeepSpeedDataLoader
from onefold.deepspeed.pipe import PipelineModule
from onefold.deepspeed.report import report
from onefold.deepspeed.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from onefold.deepspeed.spec import OptimizerSpec, SchedulerSpec, Translation
from onefold.deepspeed.translate import Outcome, Verdict, examine, translate
from onefold.deepspeed.unsupported_names import unsupported
from onefold.deepspeed.utils import OnDevice, log_dist, logger
from onefold.deepspeed.version import __version__, __version_major__, __version_minor__, __version_patch__
from onefold.deepspeed.world import init_distributed

_INFERENCE = ("there is no engine for inference", "the model itself, inside `with onefold.gathered(model):`")
init_inference = unsupported("init_inference", *_INFERENCE)
default_inference_config = unsupported("default_inference_config", *_INFERENCE)
InferenceEngine = unsupported("InferenceEngine", *_INFERENCE)
DeepSpeedHybridEngine = unsupported("DeepSpeedHybridEngine", *_INFERENCE)
PipelineEngine = unsupported(
    "PipelineEngine", "there is no pipeline parallelism", "stage 3, for a model that does not fit"
)
tp_model_init = unsupported("tp_model_init", "there is no tensor parallelism", "stage 3, for a model that does not fit")
set_autotp_mode = unsupported(
    "set_autotp_mode", "there is no tensor parallelism", "stage 3, for a model that does not fit"
)
replace_transformer_layer = unsupported(
    "replace_transformer_layer", "layers are the model's own", "compile.enabled true in the configuration"
)
DeepSpeedTransformerLayer = ops.DeepSpeedTransformerLayer
DeepSpeedTransformerConfig = ops.DeepSpeedTransformerConfig
DeepSpeedConfig = unsupported(
    "DeepSpeedConfig", "a configuration is not an object of its own", "deepspeed.translate(config)"
)

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "DeepSpeedOptimizer",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "Given",
    "InferenceEngine",
    "LRRangeTest",
    "OnDevice",
    "OneCycle",
    "OptimizerSpec",
    "Outcome",
    "PipelineEngine",
    "PipelineModule",
    "SchedulerSpec",
    "Translation",
    "Verdict",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "__version__",
    "__version_major__",
    "__version_minor__",
    "__version_patch__",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "default_inference_config",
    "examine",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "install",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "pipe",
    "replace_transformer_layer",
    "report",
    "runtime",
    "set_autotp_mode",
    "tp_model_init",
    "translate",
    "utils",
    "zero",
]
