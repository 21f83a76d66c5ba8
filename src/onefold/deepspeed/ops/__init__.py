"""DeepSpeed's package `ops`: optimizers under its names. Kernels are Onefold's own, chosen by where state rests."""

from onefold.deepspeed.ops import adagrad, adam, lamb, lion
from onefold.deepspeed.refused import refused

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer", "adagrad", "adam", "lamb", "lion"]

_LAYER = ("layers are the model's own", "torch.nn.TransformerEncoderLayer, with compile.enabled true")
DeepSpeedTransformerLayer = refused("ops.DeepSpeedTransformerLayer", *_LAYER)
DeepSpeedTransformerConfig = refused("ops.DeepSpeedTransformerConfig", *_LAYER)
