"""Times a training step whose state rests in host memory against the computation alone, on one GPU.

    python benchmarks/offload.py [--params 3.82] [--plans offload offload_3] [--peers deepspeed fsdp2] [--steps 4]
                                 [--peer-limit-s 240] [--device cuda] [--json FILE]

A Llama-shaped model in bf16, 4 x 2048 tokens, full activation checkpointing, gradients clipped to 1. The limit is
forward and backward of the plain model, without an optimizer, timed in the same run; practicality is limit / step.
Steps include everything from one forward to the next; the first two are not counted. Peers run in processes of their
own (`offload_peers.py`), before Onefold takes host memory; one that is missing, killed or late gets a row that says so.
Prints a table, then one line of JSON with the machine's description and every repetition. Needs transformers.
Under torchrun every rank does the same work on a GPU of its own, the limit included, and rank 0 tells.
`--device cpu --params 0.004` tries the program where no GPU is; its times mean nothing.
"""

import argparse
import contextlib
import gc
import io
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.comm.comm import start
from onefold.plan.table import NAMED_PLANS
from rows import seconds
from workload import SIZES, Work, apart, check_writable, machine, peak_bytes, timed, write_whole

BATCH, CONTEXT = 4, 2048
WARM_UP = 2
PEERS = ("deepspeed", "deepspeed_3", "fsdp2")


def work(size: float) -> Work:
    return Work(params=size, batch=BATCH, context=CONTEXT)


def limit(size: float, steps: int, device: str) -> list[float]:
    with torch.device(device):
        model = work(size).model()
    if dist.is_initialized():
        dist.barrier()  # all GPUs are busy at once, as they are in training

    def once(step: int) -> float:
        tokens = work(size).tokens(step % 2, device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    return timed(steps, WARM_UP, once)[0]


def parsed(setting: str) -> tuple[str, Any, bool]:
    """The plan's name, the fraction on the device, and whether updates are late: a plan, and after a colon "delayed" or
    the fraction.

    Raises:
        ValueError: it is none of that.
    """
    name, _, option = setting.partition(":")
    fraction: Any = None if option in ("", "delayed") else "auto" if option == "auto" else float(option)
    if name not in NAMED_PLANS or (isinstance(fraction, float) and not 0 <= fraction <= 1):
        raise ValueError(f"{setting!r} is no plan ({', '.join(NAMED_PLANS)}) with a part in [0, 1], auto or delayed")
    return name, fraction, option == "delayed"


def sharded(size: float, setting: str, device: str) -> tuple[nn.Module, onefold.AdamW]:
    """A model and its optimizer under `setting`."""
    name, fraction, is_delayed = parsed(setting)
    with torch.device("meta"):
        model = work(size).model()
    with torch.device(device):
        model = onefold.shard(model, NAMED_PLANS[name], fraction=fraction, precision=onefold.Precision(params="bf16"))
    return model, onefold.AdamW(model, lr=1e-4, max_grad_norm=1.0, delayed=is_delayed, delay_after=0)


def offloaded(size: float, setting: str, steps: int, device: str) -> dict[str, Any]:
    start = time.perf_counter()
    model, optimizer = sharded(size, setting, device)
    ready = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def once(step: int) -> float:
        tokens = work(size).tokens(step % 2, device)  # two batches, over and over: the loss has to fall
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    seconds, losses = timed(steps, WARM_UP, once)
    budget = onefold.predicted(model, optimizer)
    return {
        "system": "onefold",
        "setting": setting,
        "seconds": statistics.median(seconds),
        "repetitions": seconds,
        "ready_seconds": ready,
        "losses": losses,
        "device_bytes": budget.device_bytes,
        "host_bytes": budget.tier_bytes[onefold.Tier.HOST],
        "link_bytes": budget.link_bytes,
        "peak_device_bytes": peak_bytes(device)[0],
    }


def peer(name: str, words: argparse.Namespace) -> dict[str, Any]:
    """The row of a peer. It runs in a process of its own: what it holds is given back, and if it dies it dies alone."""
    script = Path(__file__).with_name("offload_peers.py")
    options = ["--params", str(words.params), "--steps", str(words.steps), "--device", words.device]
    return apart(name, [sys.executable, "-u", str(script), name, *options], words.peer_limit_s)


def show(row: dict[str, Any]) -> None:
    name = row.get("setting", row["system"])
    if "error" in row:
        print(f"{name:12} no time: {row['error']}", flush=True)
        return
    device = row["peak_device_bytes"] / 2**30
    # Onefold's host bytes are those of its budget; a peer's are what its process has resident after the steps.
    host = row.get("host_bytes", row.get("host_rss_bytes", 0)) / 2**30
    print(f"{name:12} step {row['seconds']:.3f} s  practicality {row['practicality']:.3f}", flush=True)
    print(f"{'':12} loss {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}, ready in {row['ready_seconds']:.0f} s")
    print(f"{'':12} device peak {device:.1f} GiB, host {host:.1f} GiB", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=3.82, choices=SIZES, help="billions of parameters")
    parser.add_argument("--plans", nargs="*", default=["offload"], help="such as offload:0.5")
    parser.add_argument("--peers", nargs="*", default=[], choices=PEERS, help="timed beside it, in the same run")
    parser.add_argument(
        "--peer-limit-s", type=seconds, default=240, help="seconds a peer may take, compilation included"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", help="write the JSON here too")
    words = parser.parse_args()
    try:
        for setting in words.plans:
            parsed(setting)
    except ValueError as error:
        parser.error(str(error))
    check_writable(parser, words.json)
    return words


def measure(words: argparse.Namespace) -> dict[str, Any]:
    print("the limit runs", flush=True)
    repetitions = limit(words.params, words.steps, words.device)
    compute = statistics.median(repetitions)
    print(f"forward and backward alone: {compute:.3f} s", flush=True)
    rows = []
    for name in (*words.peers, *words.plans):
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name} runs", flush=True)
        row = peer(name, words) if name in PEERS else offloaded(words.params, name, words.steps, words.device)
        if "seconds" in row:
            row["practicality"] = compute / row["seconds"]
        rows.append(row)
        show(row)
    return {
        **machine(words.device),
        "params": words.params,
        "num_ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "limit_seconds": compute,
        "limit_repetitions": repetitions,
        "rows": rows,
    }


def main() -> None:
    words = parse()
    start()
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with contextlib.nullcontext() if is_first else contextlib.redirect_stdout(io.StringIO()):
        result = measure(words)
        print(json.dumps(result))
    if words.json and is_first:
        write_whole(words.json, json.dumps(result, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
