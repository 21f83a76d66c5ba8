"""DeepSpeed's package `ops`: optimizers under its names. Kernels are Onefold's own, chosen by where state rests."""

from onefold.deepspeed.ops import adagrad, adam, lamb, lion
from onefold.deepspeed.unsupported_names import unsupported

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer", "adagrad", "adam", "lamb", "lion"]

_LAYER = ("layers are the model's own", "torch.nn.TransformerEncoderLayer, with compile.enabled true")
DeepSpeedTransformerLayer = unsupported("ops.DeepSpeedTransformerLayer", *_LAYER)
DeepSpeedTransformerConfig = unsupported("ops.DeepSpeedTransformerConfig", *_LAYER)
