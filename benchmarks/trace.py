"""Traces one training step of a row of `train_rows.py`, and tells what it waited for.

    torchrun --nproc-per-node 4 benchmarks/trace.py zero_3 [--params 6.74] [--batch 2] [--context 4096]
                                                     [--no-checkpointing] [--trace FILE] [--json FILE] [--plot FILE]

Rank 0 profiles the step after --warm-up + --steps others, and prints what `trace_report.py` reads in it. A profiler
slows a host down: where the host is what bounds a step, look at the gaps, not at the step's time. Needs a GPU.
"""

import argparse
import json
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from rows import Row, add_work, check_rows, check_work
from trace_report import STEP, plot, read, summary, table
from train_rows import builder
from workload import Work, check_launched, check_writable, machine, write_whole


def record(words: argparse.Namespace, path: Path) -> None:
    """Write the trace of a step; all ranks call it."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    work = Work.of(words)
    row = Row.parse(words.row)
    ready = builder(row.system)(work, row, "cuda")
    batches = [work.tokens(2 * rank + index, "cuda") for index in range(2)]
    for index in range(words.warm_up + words.steps):
        ready.step(batches[index % 2])
    torch.cuda.synchronize()
    dist.barrier()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) if rank == 0 else nullcontext() as profiler:
        for index in range(3):  # the first ones pay for the profiler
            with record_function(STEP):
                ready.step(batches[index % 2])
        torch.cuda.synchronize()
    if profiler is not None:
        profiler.export_chrome_trace(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", help="a system and its options, such as zero_3:eager+copy")
    add_work(parser)
    parser.add_argument("--trace", help="keep the Chrome trace here")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--plot", help="draw the step here")
    words = parser.parse_args()
    check_rows(parser, [words.row])
    check_work(parser, words)
    if words.device == "cpu":
        parser.error("there is no trace of a step without a GPU")
    check_writable(parser, words.json, words.trace, words.plot)
    check_launched(parser, words.device)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(words.trace or f"{folder}/trace.json")
        record(words, path)
        if dist.get_rank() == 0:
            step = read(json.loads(path.read_text()))
            figures = summary(step)
            print(
                f"{words.row} on {dist.get_world_size()} {torch.cuda.get_device_name()}:\n{table(figures)}", flush=True
            )
            if words.json:
                told = {**machine("cuda"), "row": words.row, "num_ranks": dist.get_world_size(), **figures}
                write_whole(words.json, json.dumps(told, indent=1))
            if words.plot:
                plot(step, words.plot)
    dist.destroy_process_group()
    os._exit(0)  # threads that libraries leave behind can abort a process that ends in good order


if __name__ == "__main__":
    main()
