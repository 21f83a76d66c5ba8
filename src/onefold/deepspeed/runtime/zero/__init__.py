"""`deepspeed.zero` under its long name."""

from onefold.deepspeed.ds_attributes import ZeroParamStatus
from onefold.deepspeed.zero import (
    GatheredParameters,
    Init,
    TiledLinear,
    TiledLinearReturnBias,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
