"""Times the host update of Adam's weights against this machine's memory, against torch and against DeepSpeed.

    python benchmarks/host_update.py [--numel 100_000_000] [--threads 2] [--repeats 7] [--json FILE]

Prints a table, then one line of JSON. GB/s counts the bytes that a step has to move: 26 a parameter with the split
master (two 16-bit halves and two fp32 moments in and out, a 16-bit gradient in), 28 with an fp32 master (and 16-bit
weights out). torch's optimizers and DeepSpeedCPUAdam read fp32 gradients and write no 16-bit weights: 28 too. DeepSpeed
compiles its kernel at first use; where it is not installed its row is missing, and the table says so. The rulers are a
copy of the same number of bytes by the same threads, counted at both ends, and a multiplication in place: it reads each
line before it writes it, as an update does, and so spares the reading that a plain store causes. One run of everything
per repeat, medians over repeats: what disturbs the machine disturbs all rows.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from onefold.optim import rules
from onefold.optim.kernels.host import NativeKernel, Run, Step, TorchKernel, find_library, levels, load_library
from onefold.plan.precision import split
from workload import check_writable, find_compilers, processor, write_whole

SPLIT_BYTES, COPY_BYTES = 26, 28
FACTORS = (0.5, 0.9)


def moments(numel: int) -> dict[str, Tensor]:
    return {"exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}


def weights(numel: int) -> Tensor:
    return torch.randn(min(numel, 2**20)).repeat(-(-numel // 2**20))[:numel].contiguous()


def our_rows(numel: int, threads: int) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, bytes a parameter, one step) of each kernel of ours."""
    path = find_library()
    if path is None:
        raise SystemExit("the package was installed without its library: there is nothing to time")
    library, rule = load_library(path), rules.AdamW(weight_decay=0.1)
    grad = weights(numel).to(torch.bfloat16)
    weight, low = split(weights(numel))
    split_run = Run(weight=weight, exact=low, grad=grad, state=moments(numel))
    copy_run = Run(weight=weight.clone(), exact=weights(numel), grad=grad, state=moments(numel))
    numbers = iter(range(1, 10**9))

    def stepper(kernel: NativeKernel | TorchKernel, run: Run) -> Callable[[], None]:
        return lambda: kernel.update(run, Step(rule=rule, hyper=rule.defaults(), number=next(numbers), factors=FACTORS))

    for level in reversed(levels(library)):
        kernel = NativeKernel(library, num_threads=threads, level=level)
        yield f"onefold split, {level}", SPLIT_BYTES, stepper(kernel, split_run)
        yield f"onefold fp32 master, {level}", COPY_BYTES, stepper(kernel, copy_run)
    yield "onefold without a library, split", SPLIT_BYTES, stepper(TorchKernel(), split_run)
    kernel = NativeKernel(library, num_threads=threads)
    yield "finite check, bf16", 2, lambda: void(kernel.count_nonfinite(grad))
    yield "sum of squares, bf16", 2, lambda: void(kernel.sum_of_squares(grad))


def void(_: object) -> None:
    """Drop a result."""


def torch_rows(numel: int) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """torch's own AdamW: the fused kernel, and the loop over operations."""
    for name, choice in (("torch fused AdamW", {"fused": True}), ("torch for-loop AdamW", {"foreach": False})):
        param = torch.nn.Parameter(weights(numel))
        param.grad = weights(numel)
        optimizer = torch.optim.AdamW([param], weight_decay=0.1, **choice)
        yield name, COPY_BYTES, lambda optimizer=optimizer: void(optimizer.step())


def deepspeed_rows(numel: int) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """DeepSpeed's kernel for the same work, if it is installed."""
    if importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed is not installed: no row of DeepSpeedCPUAdam")
        return
    find_compilers("cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    param = torch.nn.Parameter(weights(numel))
    param.grad = weights(numel)
    optimizer = DeepSpeedCPUAdam([param], weight_decay=0.1, adamw_mode=True)
    yield f"DeepSpeedCPUAdam {deepspeed.__version__}", COPY_BYTES, lambda: void(optimizer.step())


def ruler_rows(numel: int) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """As many bytes, half of them read and half written."""
    source, target = (torch.ones(numel * SPLIT_BYTES // 8) for _ in range(2))
    yield "ruler: copy", SPLIT_BYTES, lambda: void(target.copy_(source))
    yield "ruler: in place", SPLIT_BYTES, lambda: void(target.mul_(1.0))


def measure(numel: int, threads: int, repeats: int) -> list[dict[str, object]]:
    torch.set_num_threads(threads)
    rows = [*ruler_rows(numel), *our_rows(numel, threads), *torch_rows(numel), *deepspeed_rows(numel)]
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in rows}
    for repeat in range(repeats + 1):  # the first one warms up: pages, threads, optimizer state
        for name, _, step in rows:
            start = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    result = []
    for name, size, _ in rows:
        median = statistics.median(seconds[name])
        result.append(
            {
                "row": name,
                "seconds": median,
                "fastest_seconds": min(seconds[name]),
                "bytes_a_parameter": size,
                "gb_per_s": numel * size / median / 1e9,
            }
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the host update against memory and against torch.")
    parser.add_argument("--numel", type=int, default=100_000_000, help="parameters; about 80 bytes of memory each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the JSON here too")
    args = parser.parse_args()
    check_writable(parser, args.json)
    rows = measure(args.numel, args.threads, args.repeats)
    print(f"{args.numel:,} parameters, {args.threads} threads, median of {args.repeats}, torch {torch.__version__}")
    print(f"{'':<34}{'seconds':>9}{'fastest':>9}{'bytes':>7}{'GB/s':>8}")
    for row in rows:
        print(
            f"{row['row']:<34}{row['seconds']:>9.4f}{row['fastest_seconds']:>9.4f}"
            f"{row['bytes_a_parameter']:>7}{row['gb_per_s']:>8.1f}"
        )
    machine = {"date": datetime.now(UTC).date().isoformat(), "cpu": processor(), "torch": torch.__version__}
    settings = {"numel": args.numel, "threads": args.threads, "repeats": args.repeats}
    text = json.dumps({**machine, **settings, "rows": rows})
    print(text)
    if args.json:
        write_whole(args.json, text + "\n")


if __name__ == "__main__":
    main()
