"""Times saving and loading a checkpoint against the machine's link and disk.

    python benchmarks/checkpoint.py [--params 3.82] [--plan zero_3] [--directory DIR] [--stops-only] [--device cuda]
                                    [--json FILE]
    torchrun --nproc-per-node 4 benchmarks/checkpoint.py --params 6.74

A Llama-shaped model in bf16 with AdamW, a few steps old. In one run: how long the bytes of a rank take to host memory
alone (locked memory, one copy, all ranks at once), and how long the system takes to find that memory and to lock it;
for how long an asynchronous save stops training, the first one, which also does that, and the second; how fast a plain
file of the same size comes to the disk, all ranks at once; how fast a save and a load are. DIR needs twice the
checkpoint's size.

For how long training stops is told twice. "waiting": `stall_s` after the next step, the seconds that the loop stood
still in `save` and in `optimizer.step`. "longer": how much longer save, forward, backward and step took together than a
step without a save (median of 3), synchronized with the device at both ends; it also has what copying beside the
computation slows down. Both are those of the slowest rank.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onefold
from offload import sharded, work
from onefold.checkpoint.entries import own_entries
from onefold.checkpoint.storage import Reader
from onefold.comm.comm import start
from onefold.engine.session import session_of
from onefold.memory.pinned import Pages, pinned
from workload import SIZES, check_writable, machine, synchronize, write_whole

PIECE = 2**26
PLAIN_STEPS = 3


def together(work: Callable[[], Any]) -> float:
    """Seconds that the slowest rank needs, all of them starting at once."""
    synchronize()
    if dist.is_initialized():
        dist.barrier()
    begun = time.perf_counter()
    work()
    synchronize()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - begun


def link_seconds(nbytes: int, device: str) -> float:
    """A copy of so many bytes from the device to the host."""
    source = torch.ones(min(nbytes, 2**30), dtype=torch.uint8, device=device)
    cuda = device == "cuda"
    target = pinned(len(source), torch.uint8, 4) if cuda else torch.empty(len(source), dtype=torch.uint8)
    target.copy_(source)
    return together(lambda: target.copy_(source, non_blocking=True)) * nbytes / len(source)


def memory_seconds(nbytes: int, num_threads: int, device: str) -> dict[str, float]:
    """To get so much host memory, and to lock it."""
    pages = Pages(nbytes)
    found = together(lambda: [each.result() for each in pages.find(num_threads)])
    locked = together(lambda: pages.lock(0, nbytes)) if device == "cuda" else 0.0
    return {"find_seconds": found, "lock_seconds": locked}


def disk_seconds(nbytes: int, directory: Path, rank: int) -> float:
    """A plain file of so many bytes, on the disk."""
    data = os.urandom(PIECE)
    path = directory / f"plain-{rank}"

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for start in range(0, nbytes, PIECE):
                file.write(memoryview(data)[: nbytes - start])
            os.fsync(file.fileno())

    seconds = together(write)
    path.unlink()
    return seconds


def step(model: Any, optimizer: Any, words: argparse.Namespace, number: int) -> None:
    tokens = work(words.params).tokens(number, words.device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def stops(model: Any, optimizer: Any, words: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Seconds that a first and a second asynchronous save stop training."""
    plain = statistics.median(
        together(partial(step, model, optimizer, words, number)) for number in range(2, 2 + PLAIN_STEPS)
    )
    savings: list[Any] = []

    def save_and_step() -> None:
        savings.append(onefold.save(directory, model, optimizer, asynchronous=True, progress=False))
        step(model, optimizer, words, 0)

    longer, waiting = [], []
    for _ in range(2):
        longer.append(together(save_and_step) - plain)
        told = session_of(model, "the benchmark").comm.exchange_objects(savings[-1].stall_s)
        waiting.append(max(told))
        savings[-1].wait()
    return {"step_seconds": plain, "waiting_seconds": waiting, "longer_seconds": longer}


def measure(words: argparse.Namespace) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    directory = Path(words.directory)
    directory.mkdir(parents=True, exist_ok=True)
    model, optimizer = sharded(words.params, words.plan, words.device)
    for number in range(2):
        step(model, optimizer, words, number)
    session = session_of(model, "the benchmark")
    session.runtime.catch_up()
    own = sum(entry.nbytes for entry in own_entries(session, optimizer, None))
    link = link_seconds(own, words.device)
    memory = memory_seconds(own, -(-session.num_threads // 2), words.device)
    stopped = stops(model, optimizer, words, directory / "beside")
    shutil.rmtree(directory / "beside", ignore_errors=True)
    return {
        **machine(words.device),
        "params": words.params,
        "plan": words.plan,
        "num_ranks": session.comm.num_ranks,
        "rank_bytes": own,
        "link_seconds": link,
        **memory,
        **stopped,
        **({} if words.stops_only else at_disk(model, optimizer, directory, own, rank)),
    }


def at_disk(model: Any, optimizer: Any, directory: Path, own: int, rank: int) -> dict[str, Any]:
    """Seconds of a plain file, a save and a load, and what lies on the disk then."""
    disk = disk_seconds(own, directory, rank)
    save = together(lambda: onefold.save(directory / "now", model, optimizer, progress=False))
    load = together(lambda: onefold.load(directory / "now", model, optimizer, progress=False))
    return {
        "disk_seconds": disk,
        "save_seconds": save,
        "load_seconds": load,
        "disk_bytes": sum(path.stat().st_size for path in (directory / "now").iterdir()),
        "tensor_bytes": sum(reader_bytes(Reader(directory / "now")).values()),
    }


def reader_bytes(reader: Reader) -> dict[str, int]:
    """Bytes of each tensor in a checkpoint."""
    return {key: saved.shape.numel() * saved.dtype.itemsize for key, saved in reader.tensors.items()}


def show(row: dict[str, Any]) -> None:
    gb, link = row["rank_bytes"] / 1e9, row["link_seconds"]
    total = gb * row["num_ranks"]
    print(f"{row['num_ranks']} ranks, {gb:.2f} GB each, {row['plan']}, {row['params']}e9 parameters")
    print(f"over the link alone    {link:8.3f} s  {gb / link:.2f} GB/s a rank")
    print(f"its memory found       {row['find_seconds']:8.3f} s, locked {row['lock_seconds']:.3f} s")
    print(f"a step without a save  {row['step_seconds']:8.3f} s")
    for which, waiting, longer in zip(("first", "second"), row["waiting_seconds"], row["longer_seconds"], strict=True):
        print(f"{which + ' save, waiting':23}{waiting:8.3f} s  {waiting / link:.2f} of the link's")
        print(f"{which + ' save, longer':23}{longer:8.3f} s  {longer / link:.2f} of the link's")
    if "disk_seconds" not in row:
        return
    print(f"a plain file           {row['disk_seconds']:8.3f} s  {total / row['disk_seconds']:.2f} GB/s")
    print(f"save                   {row['save_seconds']:8.3f} s  {total / row['save_seconds']:.2f} GB/s")
    print(f"load                   {row['load_seconds']:8.3f} s  {total / row['load_seconds']:.2f} GB/s")
    print(f"on disk {row['disk_bytes']:,} bytes for {row['tensor_bytes']:,} of tensors", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=3.82, choices=SIZES, help="billions of parameters")
    parser.add_argument("--plan", default="zero_3")
    parser.add_argument("--directory", default="out/checkpoint-benchmark")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--stops-only", action="store_true", help="leave out the plain file, the save and the load")
    parser.add_argument("--json", type=Path, help="write the JSON here too")
    words = parser.parse_args()
    check_writable(parser, words.json)
    start()
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with contextlib.nullcontext() if is_first else contextlib.redirect_stdout(io.StringIO()):
        row = measure(words)
        show(row)
        print(json.dumps(row))
    if words.json and is_first:
        write_whole(words.json, json.dumps(row, indent=1) + "\n")
    if is_first:
        shutil.rmtree(words.directory, ignore_errors=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
