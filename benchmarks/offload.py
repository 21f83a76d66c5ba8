"""Times a training step whose state rests in host memory against the computation alone, on one GPU.

    python benchmarks/offload.py [--params 3.82] [--plans offload offload_3] [--steps 4] [--json FILE]

A Llama-shaped model in bf16, 4 x 2048 tokens, full activation checkpointing, gradients clipped to 1. The limit is
forward and backward of the plain model, without an optimizer, timed in the same run; practicality is limit / step.
Steps include everything from one forward to the next; the first two are not counted. Prints a table, then one line of
JSON with the machine's description. Needs transformers.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import onefold
from onefold.native import host_kernel
from onefold.plan import NAMED_PLANS

SIZES = {0.4: (1024, 24, 16), 3.82: (3072, 32, 24), 6.74: (4096, 32, 32), 13.0: (5120, 40, 40)}
"""Billions of parameters: width, layers, heads."""
BATCH, CONTEXT, VOCABULARY = 4, 2048, 32000
WARM_UP = 2


def make_model(size: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads = SIZES[size]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=int(width * 8 / 3 / 256 + 0.999) * 256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def batch(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(step)).cuda()


def timed(steps: int, once: Callable[[int], float]) -> tuple[float, list[float]]:
    """Median seconds of a step, and the losses."""
    seconds, losses = [], []
    for step in range(WARM_UP + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(once(step))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP:]), losses


def limit(size: float, steps: int) -> float:
    with torch.device("cuda"):
        model = make_model(size)

    def once(step: int) -> float:
        tokens = batch(step % 2)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.zero_grad()
        torch.cuda.synchronize()
        return float(loss.detach())

    return timed(steps, once)[0]


def offloaded(size: float, plan: str, steps: int) -> dict[str, Any]:
    start = time.perf_counter()
    with torch.device("meta"):
        model = make_model(size)
    with torch.device("cuda"):
        model = onefold.shard(model, NAMED_PLANS[plan], precision=onefold.Precision(params="bf16"))
    optimizer = onefold.AdamW(model, lr=1e-4, max_grad_norm=1.0)
    ready = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()

    def once(step: int) -> float:
        tokens = batch(step % 2)  # two batches, over and over: the loss has to fall
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    seconds, losses = timed(steps, once)
    budget = onefold.predicted(model, optimizer)
    return {
        "plan": plan,
        "seconds": seconds,
        "ready_seconds": ready,
        "losses": losses,
        "device_bytes": budget.device_bytes,
        "host_bytes": budget.tier_bytes[onefold.Tier.HOST],
        "link_bytes": budget.link_bytes,
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=3.82, choices=SIZES, help="billions of parameters")
    parser.add_argument("--plans", nargs="+", default=["offload"], choices=["offload", "offload_3", "zero_3"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", help="write the JSON here too")
    words = parser.parse_args()
    compute = limit(words.params, words.steps)
    print(f"forward and backward alone: {compute:.3f} s", flush=True)
    rows = []
    for plan in words.plans:
        gc.collect()
        torch.cuda.empty_cache()
        row = offloaded(words.params, plan, words.steps)
        row["practicality"] = compute / row["seconds"]
        rows.append(row)
        device, host = row["peak_device_bytes"] / 2**30, row["host_bytes"] / 2**30
        print(f"{plan:10} step {row['seconds']:.3f} s  practicality {row['practicality']:.3f}", flush=True)
        print(f"{'':10} loss {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}, ready in {row['ready_seconds']:.0f} s")
        print(f"{'':10} device peak {device:.1f} GiB, host {host:.1f} GiB", flush=True)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "host_bytes": psutil.virtual_memory().total,
        "kernel": host_kernel().name,
        "params": words.params,
        "limit_seconds": compute,
        "rows": rows,
    }
    print(json.dumps(result))
    if words.json:
        with open(words.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
