"""Times what others offer for the work of `offload.py`: one peer in one process, on one GPU.

    python benchmarks/offload_peers.py {deepspeed,deepspeed_3,fsdp2} [--params 3.82] [--steps 4] [--device cuda]

`offload.py --peers` runs it; by itself it is for finding out why a peer fails. Model, tokens, clipping and clock are
those of `offload.py`, hyper-parameters those of torch's AdamW at a learning rate of 1e-4:

- deepspeed: ZeRO-2, optimizer and gradients in pinned host memory, DeepSpeedCPUAdam;
- deepspeed_3: ZeRO-3, parameters there too;
- fsdp2: `fully_shard` on every block and the root, fp32 parameters in pinned host memory, computing and reducing in
  bf16, torch's fused AdamW on the CPU.

Says on stderr how far it is, and on stdout, last, one line of JSON: a row with times, or with the error. DeepSpeed
compiles its Adam at first use, which needs a C++ compiler and counts as getting ready.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from offload import BATCH, PEERS, WARM_UP, work
from workload import SIZES, deepspeed_config, find_compilers, free_port, peak_bytes, timed

LEARNING_RATE, CLIP = 1e-4, 1.0
ADAM: dict[str, Any] = {"lr": LEARNING_RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}

Ready = tuple[Callable[[int], float], dict[str, Any]]
"""A step that gives back its loss, and what its row should say about the peer."""


def settings(stage: int) -> dict[str, Any]:
    pinned = {"device": "cpu", "pin_memory": True}
    params = {"offload_param": pinned} if stage == 3 else {}
    return deepspeed_config(BATCH, CLIP, ADAM, {"stage": stage, "offload_optimizer": pinned, **params})


def deepspeed_zero(stage: int, size: float, device: str, note: Callable[[str], None]) -> Ready:
    find_compilers(device)
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", auto_mpi_discovery=False)
    with torch.device(device):
        model = work(size).model()
    note("model built; DeepSpeed compiles and initializes")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(stage))
    inner = engine.optimizer.optimizer
    if not isinstance(inner, DeepSpeedCPUAdam):
        raise RuntimeError(f"the optimizer is {type(inner).__name__}, not the DeepSpeedCPUAdam that was to be timed")

    def once(step: int) -> float:
        tokens = work(size).tokens(step % 2, device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    # Without vector instructions its Adam is several times slower: the row says how it was compiled.
    return once, {"version": deepspeed.__version__, "compiled": CPUAdamBuilder().simd_width()}


def fsdp2(size: float, device: str, note: Callable[[str], None]) -> Ready:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    # Norms are of host tensors, so gloo has to be there beside NCCL.
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    with torch.device(device):
        model = work(size).model(torch.float32)
    note("model built; FSDP2 moves it to the host")
    policies: dict[str, Any] = {
        "mesh": init_device_mesh(device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda"),
    }
    for block in model.model.layers:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    if elsewhere := {str(parameter.device) for parameter in model.parameters()} - {"cpu"}:
        raise RuntimeError(f"parameters rest on {elsewhere}, not in host memory")
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)

    def once(step: int) -> float:
        tokens = work(size).tokens(step % 2, device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return once, {"version": torch.__version__}


def alone() -> None:
    """Makes this process a world of one, and the first to be ended where host memory runs out."""
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    world["MASTER_PORT"] = str(free_port())
    os.environ.update(world)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def measure(system: str, size: float, steps: int, device: str) -> dict[str, Any]:
    begin = time.perf_counter()
    free = psutil.virtual_memory().available

    def note(text: str) -> None:
        print(f"{system}: {text} ({time.perf_counter() - begin:.0f} s)", file=sys.stderr, flush=True)

    note("starts")
    alone()
    torch.manual_seed(0)
    if system == "fsdp2":
        step_once, facts = fsdp2(size, device, note)
    else:
        step_once, facts = deepspeed_zero(3 if system.endswith("_3") else 2, size, device, note)
    ready = time.perf_counter() - begin
    note("ready")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def once(step: int) -> float:
        loss = step_once(step)
        note(f"step {step + 1} of {WARM_UP + steps}, loss {loss:.3f}")
        return loss

    seconds, losses = timed(steps, WARM_UP, once)
    return {
        "system": system,
        **facts,
        "seconds": statistics.median(seconds),
        "repetitions": seconds,
        "losses": losses,
        "ready_seconds": ready,
        "peak_device_bytes": peak_bytes(device)[0],
        # Memory that the driver locks is not always counted as resident: the second figure is what the machine lost.
        "host_rss_bytes": psutil.Process().memory_info().rss,
        "host_taken_bytes": free - psutil.virtual_memory().available,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=PEERS)
    parser.add_argument("--params", type=float, default=3.82, choices=SIZES, help="billions of parameters")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    words = parser.parse_args()
    if words.system.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        row = {"system": words.system, "error": "not installed: pip install deepspeed"}
    else:
        try:
            row = measure(words.system, words.params, words.steps, words.device)
        except Exception as error:
            traceback.print_exc()
            row = {"system": words.system, "error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(row), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit("error" in row)


if __name__ == "__main__":
    main()
