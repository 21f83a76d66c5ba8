"""DeepSpeed's module `ops.lamb`, refused."""

from onefold.deepspeed.optim import NO_OPTIMIZERS
from onefold.deepspeed.refused import refused

FusedLamb = refused("ops.lamb.FusedLamb", *NO_OPTIMIZERS["lamb"])
