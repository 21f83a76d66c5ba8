"""DeepSpeed's package `moe`, refused."""

from onefold.deepspeed.unsupported_names import unsupported

MoE = unsupported("moe.MoE", "there is no expert parallelism", "a mixture of experts of plain modules, under stage 3")
