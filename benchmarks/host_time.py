"""Times the host's part of a training step, and tells where it goes, for rows of `train_rows.py` on the same machine.

    torchrun --nproc-per-node 2 benchmarks/host_time.py zero_2 ddp limit [--params 0.125] [--batch 2] [--context 1024]
                                                        [--steps 30] [--functions 25] [--json FILE]

The step is timed with a wait for the GPU after each, and the host until it has launched everything: where both are
equal, the host is what bounds the step. Then rank 0 profiles 20 steps of Onefold's rows with Python's profiler, which
sees autograd's threads too from Python 3.12 on, and shows the functions of this package by the time spent below them.
The profiler slows Python down by a fifth or more: read shares in it. `--device cpu --params 0.004` tries the program.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onefold
from rows import PLANS, Row, add_work, check_rows, check_work
from train_rows import Ready, builder
from workload import Work, check_launched, check_writable, machine, synchronize, write_whole

PROFILED = 20


def times(ready: Ready, batches: list[torch.Tensor], words: argparse.Namespace) -> dict[str, float]:
    """Medians, in seconds."""
    steps, hosts = [], []
    for index in range(words.warm_up + words.steps):
        synchronize()
        begun = time.perf_counter()
        ready.step(batches[index % 2])
        launched = time.perf_counter()
        synchronize()
        if index >= words.warm_up:
            steps.append(time.perf_counter() - begun)
            hosts.append(launched - begun)
    return {"step_s": statistics.median(steps), "host_s": statistics.median(hosts)}


def functions(ready: Ready, batches: list[torch.Tensor], most: int) -> list[dict[str, Any]]:
    """This package's functions, those with the most time below them first; milliseconds and calls a step."""
    profile, is_mine = cProfile.Profile(), dist.get_rank() == 0
    if is_mine:
        profile.enable()
    for index in range(PROFILED):
        ready.step(batches[index % 2])
    synchronize()
    if not is_mine:
        return []
    profile.disable()
    package, found = Path(onefold.__file__).parent, []
    for (file, line, name), (_, calls, own, below, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if Path(file).is_relative_to(package):
            place = f"{Path(file).relative_to(package)}:{line} {name}"
            per_step = {"below_ms": 1e3 * below, "own_ms": 1e3 * own, "calls": calls}
            found.append({"function": place, **{key: value / PROFILED for key, value in per_step.items()}})
    return sorted(found, key=lambda each: -each["below_ms"])[:most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="systems and their options, such as zero_2:eager")
    add_work(parser)
    parser.add_argument("--functions", type=int, default=25, help="how many to show")
    parser.add_argument("--json", help="write the figures here")
    parser.set_defaults(params=0.125, batch=2, context=1024, steps=30, warm_up=8, checkpointing=False)
    words = parser.parse_args()
    check_rows(parser, words.rows)
    check_work(parser, words)
    check_writable(parser, words.json)
    check_launched(parser, words.device)
    if words.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if words.device == "cuda" else "gloo")
    work, rank = Work.of(words), dist.get_rank()
    told: dict[str, Any] = {**machine(words.device), "num_ranks": dist.get_world_size(), "rows": []}
    for name in words.rows:
        torch.manual_seed(0)
        row = Row.parse(name)
        ready = builder(row.system)(work, row, words.device)
        batches = [work.tokens(2 * rank + index, words.device) for index in range(2)]
        found: dict[str, Any] = {"system": name, **times(ready, batches, words)}
        if row.system in PLANS:
            found["functions"] = functions(ready, batches, words.functions)
        told["rows"].append(found)
        if rank == 0:
            print(f"{name:16} step {found['step_s'] * 1e3:.2f} ms, host {found['host_s'] * 1e3:.2f} ms", flush=True)
            for each in found.get("functions", ()):
                figures = f"{each['below_ms']:8.2f} ms below, {each['own_ms']:6.2f} own, {each['calls']:7.1f} calls"
                print(f"  {figures}  {each['function']}", flush=True)
        del ready
        dist.barrier()
    if rank == 0 and words.json:
        write_whole(words.json, json.dumps(told, indent=1))
    dist.destroy_process_group()
    os._exit(0)  # threads that libraries leave behind can abort a process that ends in good order


if __name__ == "__main__":
    main()
