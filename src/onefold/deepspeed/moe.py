"""DeepSpeed's package `moe`, refused."""

from onefold.deepspeed.refused import refused

MoE = refused("moe.MoE", "there is no expert parallelism", "a mixture of experts of plain modules, under stage 3")
