"""Times one way to train on several GPUs: one row of `train.py`, on as many processes as it has ranks.

    python benchmarks/train_rows.py SYSTEM[:OPTION[+OPTION]] [--ranks 4] [--params 6.74] [--batch 2] [--context 4096]
                                    [--no-checkpointing] [--steps 8] [--warm-up 3] [--card-gib 80] [--device cuda]

- limit: forward and backward of the model with bf16 weights on every GPU at once: no optimizer, no communication;
- zero_0 to zero_3: Onefold; bf16 weights with a split master;
- ddp: DistributedDataParallel; fp32 weights, computing under autocast to bf16, torch's fused AdamW;
- fsdp2: `fully_shard` on every block and the root; fp32 shards, computing and reducing in bf16, the same AdamW;
- deepspeed_1, _2, _3: ZeRO; bf16 weights with an fp32 master, its fused Adam.

Blocks are compiled; `eager` leaves that out. `keep` gives Onefold's `keep_bytes="auto"`, `keep=4` 4 GiB; `collective`
and `copy` its `gather=`. All clip to a norm of 1. Every rank trains on two batches of its own, over and over.
`train.py` runs it; by itself it is for finding out why a row fails, and it works under torchrun too. It says how far it
is, and prints one line of JSON, last: the row, or the error of the rank that failed.
"""

import argparse
import importlib
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.comm.copies.copy_collectives import PeerComm
from onefold.engine.session import session_of
from onefold.plan.table import NAMED_PLANS
from rows import PLANS, Row, add_work, check_rows, check_work
from workload import Work, deepspeed_config, find_compilers, free_port, limit_card, peak_bytes, tell, timed, used_bytes

CLIP = 1.0
ADAM: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A system that is ready to train."""

    step: Callable[[torch.Tensor], torch.Tensor]
    """Does a step on tokens [batch, context]; returns its loss (0-dim)."""
    num_params: int
    facts: dict[str, Any]
    """What the row should say about the system."""


def count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def compile_blocks(model: Any, row: Row) -> None:
    for block in model.model.layers if row.is_compiled else ():
        block.compile()


def limit(work: Work, row: Row, device: str) -> Ready:
    with torch.device(device):
        model = work.model()
    compile_blocks(model, row)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.zero_grad()
        return loss

    return Ready(step=step, num_params=count(model), facts={})


def sharded(work: Work, row: Row, device: str) -> Ready:
    with torch.device("meta"):
        model = work.model()
    num_params = count(model)
    with torch.device(device):
        model = onefold.shard(
            model,
            NAMED_PLANS[row.system],
            precision=onefold.Precision(params="bf16"),
            compile=row.is_compiled,
            keep_bytes=row.keep,
            gather=row.gather,
        )
    optimizer = onefold.AdamW(model, **ADAM, max_grad_norm=CLIP)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    budget, comm = onefold.predicted(model, optimizer), session_of(model, "the benchmark").comm
    facts = {
        "device_bytes": budget.device_bytes,
        "kept_bytes": budget.kept_bytes,
        "wire_numel": budget.wire_numel,
        "symmetric_bytes": comm.shared_bytes if isinstance(comm, PeerComm) else 0,
    }
    return Ready(step=step, num_params=num_params, facts=facts)


def torchs_own(model: nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A step with torch's clipping and fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def ddp(work: Work, row: Row, device: str) -> Ready:
    with torch.device(device):
        model = work.model(torch.float32)
    compile_blocks(model, row)
    place = [torch.cuda.current_device()] if device == "cuda" else None
    network = nn.parallel.DistributedDataParallel(model, device_ids=place, gradient_as_bucket_view=True)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss: torch.Tensor = network(input_ids=tokens, labels=tokens).loss
        return loss

    return Ready(step=torchs_own(model, loss_of), num_params=count(model), facts={})


def fsdp2(work: Work, row: Row, device: str) -> Ready:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        model: Any = work.model(torch.float32)
    num_params = count(model)
    compile_blocks(model, row)
    policies: dict[str, Any] = {
        "mesh": init_device_mesh(device, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    }
    for block in model.model.layers:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    model.to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():
            nn.init.normal_(param, std=0.02) if param.dim() > 1 else nn.init.ones_(param)
    with torch.device(device):  # its buffers are computed, not initialized
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    return Ready(step=torchs_own(model, loss_of), num_params=num_params, facts={})


def deepspeed(work: Work, row: Row, device: str) -> Ready:
    find_compilers(device)
    import deepspeed

    level = int(row.system[-1])
    config = deepspeed_config(work.batch, CLIP, ADAM, {"stage": level})
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", auto_mpi_discovery=False)
    importlib.import_module("transformers.models.llama.modeling_llama")  # fails while zero.Init has torch patched
    born_apart = deepspeed.zero.Init(config_dict_or_path=config, enabled=level == 3, dtype=torch.bfloat16)
    with born_apart, torch.device(device):
        model = work.model()
    num_params = sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())
    compile_blocks(model, row)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss

    return Ready(step=step, num_params=num_params, facts={"version": deepspeed.__version__})


def builder(system: str) -> Callable[[Work, Row, str], Ready]:
    if system in PLANS:
        return sharded
    return deepspeed if system.startswith("deepspeed") else {"limit": limit, "ddp": ddp, "fsdp2": fsdp2}[system]


def measure(words: argparse.Namespace, note: Callable[[str], None]) -> dict[str, Any]:
    begin = time.perf_counter()
    row, device, rank = Row.parse(words.row), words.device, dist.get_rank()
    work = Work.of(words)
    torch.manual_seed(0)
    card = None if words.card_gib is None else int(words.card_gib * 2**30)
    limit_card(card)
    ready = builder(row.system)(work, row, device)
    limit_card(card)
    built = time.perf_counter() - begin
    note(f"ready in {built:.0f} s")

    def once(step: int) -> float:
        loss = float(ready.step(work.tokens(2 * rank + step % 2, device)).detach())
        note(f"step {step + 1} of {words.warm_up + words.steps}, loss {loss:.3f}")
        return loss

    def warmed() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what building and compiling took does not count
            torch.cuda.reset_peak_memory_stats()
            limit_card(card)  # NCCL has taken its part by now
        dist.barrier()  # all GPUs are busy at once, where nothing else holds them together

    seconds, losses = timed(words.steps, words.warm_up, once, warmed)
    if card is not None and used_bytes() > card:
        raise torch.OutOfMemoryError(f"{used_bytes():,} bytes of the GPU are in use, more than a card of {card:,} has")
    every: list[Any] = [None] * dist.get_world_size()
    beside = ready.facts.get("symmetric_bytes", 0)  # the driver's, which torch does not count
    dist.all_gather_object(every, (seconds, *(nbytes + beside for nbytes in peak_bytes(device))))
    step_s = max(statistics.median(each[0]) for each in every)  # no synchronous step is faster than the slowest rank
    return {
        "system": words.row,
        "num_ranks": len(every),
        "seconds": step_s,
        "tokens_per_second": work.batch * work.context / step_s,
        "flops_per_second": work.flops(ready.num_params) / step_s,
        "peak_allocated_bytes": max(each[1] for each in every),
        "peak_reserved_bytes": max(each[2] for each in every),
        "num_params": ready.num_params,
        "ready_seconds": built,
        "losses": losses,
        "repetitions": [each[0] for each in every],
        **ready.facts,
    }


def extensions() -> Path:
    """Where DeepSpeed puts what it compiles. A row that is killed while it compiles leaves a lock, for which every
    later one would wait. The folder is these rows' own, and they run one after another: a lock found here is stale."""
    folder = Path(tempfile.gettempdir()) / f"onefold-benchmark-extensions-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for lock in folder.glob("*/lock"):
        lock.unlink()
    return folder


def launch(num_ranks: int, needs_compiler: bool) -> int:
    """Run this program once for each rank; returns the exit code of one that failed, else 0. None outlives this."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    world = {
        "OMP_NUM_THREADS": threads,
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as `onefold run` has it; for every system
        **os.environ,
        **({"TORCH_EXTENSIONS_DIR": str(extensions())} if needs_compiler else {}),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    words = [sys.executable, "-u", *sys.argv]
    ranks = [
        subprocess.Popen(words, env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(num_ranks)
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while all(rank.poll() in (None, 0) for rank in ranks):
            if all(rank.poll() == 0 for rank in ranks):
                return 0
            time.sleep(0.2)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
            time.sleep(0.2)
        return next(rank.returncode for rank in ranks if rank.poll() not in (None, 0))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row")
    parser.add_argument("--ranks", type=int, default=1)
    add_work(parser)
    words = parser.parse_args()
    check_rows(parser, [words.row])
    check_work(parser, words, words.ranks)
    if words.row.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        tell({"system": words.row, "error": "not installed: pip install deepspeed"})
        sys.exit(1)
    if "RANK" not in os.environ:
        sys.exit(launch(words.ranks, words.row.startswith("deepspeed")))
    rank = int(os.environ["RANK"])

    def note(text: str) -> None:
        if rank == 0:
            print(f"{words.row}: {text}", flush=True)

    try:
        if words.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if words.device == "cuda" else "gloo")
        found = measure(words, note)
    except Exception as error:
        traceback.print_exc()
        told = {"system": words.row, "error": f"rank {rank}: {type(error).__name__}: {str(error)[:400]}"}
        tell(told)
        os._exit(1)  # not past the other ranks, which wait in a collective
    if rank == 0:
        tell(found)
    dist.destroy_process_group()
    os._exit(0)  # threads that libraries leave behind can abort a process that ends in good order


if __name__ == "__main__":
    main()
