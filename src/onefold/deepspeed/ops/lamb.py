"""DeepSpeed's module `ops.lamb`, refused."""

from onefold.deepspeed.optimizer_sections import NO_OPTIMIZERS
from onefold.deepspeed.unsupported_names import unsupported

FusedLamb = unsupported("ops.lamb.FusedLamb", *NO_OPTIMIZERS["lamb"])
