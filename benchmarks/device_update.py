"""Times the update of Adam's weights in the memory of one GPU: the fused kernel, against a copy and against torch.

    python benchmarks/device_update.py [--numel 500_000_000] [--repeats 20] [--json FILE]

Prints a table, then one line of JSON. GB/s counts the bytes that a step has to move, whatever a row does move: 26 a
parameter with the split master (two 16-bit halves and two fp32 moments in and out, a 16-bit gradient in), 30 with an
fp32 copy (the 16-bit weights are read too, to see whether the user wrote them), 28 with fp32 weights and gradients. The
ruler is a copy within the device of as many bytes as the split master moves, counted at both ends. "torch operations"
is what runs where there is no Triton. Medians over repeats, row by row: a row's memory is free before the next.
"""

import argparse
import datetime
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from onefold.memory.buffer import CopyMaster, Master, OwnMaster, SplitMaster
from onefold.optim import rules
from onefold.optim.kernels.fused import FusedKernel
from onefold.optim.kernels.host import Run, Step
from onefold.plan.precision import split
from workload import check_writable, write_whole

BYTES = {"split": 26, "fp32 copy": 30, "fp32 own": 28}
FACTORS = (0.5, 0.9)
WARM_UPS = 3
RULE = rules.AdamW(weight_decay=0.1)

Row = tuple[str, int, Callable[[], object]]
"""Its name, bytes a parameter, one step."""


def values(numel: int, device: torch.device) -> Tensor:
    return torch.randn(min(numel, 2**20), device=device).repeat(-(-numel // 2**20))[:numel].contiguous()


def run_of(form: str, numel: int, device: torch.device) -> Run:
    state = {name: torch.zeros(numel, device=device) for name in ("exp_avg", "exp_avg_sq")}
    weight, exact, grad = values(numel, device), None, values(numel, device)
    if form == "split":
        weight, exact = split(weight)
    elif form == "fp32 copy":
        weight, exact = weight.to(torch.bfloat16), weight
    return Run(weight=weight, exact=exact, grad=grad.to(weight.dtype), state=state)


def fused_row(form: str, numel: int, device: torch.device) -> Row:
    kernel, run, numbers = FusedKernel(device.type), run_of(form, numel, device), iter(range(1, 10**9))

    def step() -> None:
        kernel.update(run, Step(rule=RULE, hyper=RULE.defaults(), number=next(numbers), factors=FACTORS))

    return f"fused kernel, {form}", BYTES[form], step


def operations_row(form: str, numel: int, device: torch.device) -> Row:
    """As update.RuleUpdate goes about it."""
    run, numbers = run_of(form, numel, device), iter(range(1, 10**9))
    master: Master = OwnMaster(run.weight)
    if run.exact is not None:
        master = (SplitMaster if form == "split" else CopyMaster)(run.weight, run.exact)

    @torch.no_grad()
    def step() -> None:
        exact, grad = master.load(), run.grad.to(torch.float32, copy=True)
        for factor in FACTORS:
            grad.mul_(factor)
        RULE.update(exact, grad, run.state, RULE.defaults(), next(numbers))
        master.store(exact)

    return f"torch operations, {form}", BYTES[form], step


def torch_row(form: str, numel: int, device: torch.device) -> Row:
    param = torch.nn.Parameter(values(numel, device))
    param.grad = values(numel, device)
    return "torch.optim.AdamW(fused=True)", BYTES[form], torch.optim.AdamW([param], weight_decay=0.1, fused=True).step


def ruler_row(form: str, numel: int, device: torch.device) -> Row:
    source, target = (torch.ones(numel * BYTES[form] // 8, device=device) for _ in range(2))
    return "ruler: copy", BYTES[form], lambda: target.copy_(source)


def rows(numel: int, device: torch.device) -> Iterator[Row]:
    """One at a time: what the row before held is free again."""
    yield ruler_row("split", numel, device)
    for form in BYTES:
        yield fused_row(form, numel, device)
        yield operations_row(form, numel, device)
    yield torch_row("fp32 own", numel, device)


def measure(numel: int, repeats: int, device: torch.device) -> list[dict[str, object]]:
    result: list[dict[str, object]] = []
    for name, size, step in rows(numel, device):
        seconds = []
        for _ in range(WARM_UPS + repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        median, fastest = statistics.median(seconds[WARM_UPS:]), min(seconds[WARM_UPS:])
        result.append(
            {
                "row": name,
                "seconds": median,
                "fastest_seconds": fastest,
                "bytes_a_parameter": size,
                "gb_per_s": numel * size / median / 1e9,
            }
        )
        del step
        torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the update in device memory against a copy and against torch.")
    parser.add_argument("--numel", type=int, default=500_000_000, help="parameters; allow 40 bytes of memory each")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the JSON here too")
    args = parser.parse_args()
    if min(args.numel, args.repeats) < 1:
        parser.error("--numel and --repeats are at least 1")
    check_writable(parser, args.json)
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU: there is nothing to time")
    facts = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "numel": args.numel,
        "repeats": args.repeats,
    }
    found = measure(args.numel, args.repeats, torch.device("cuda"))
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{'':<34}{'seconds':>9}{'fastest':>9}{'bytes':>7}{'GB/s':>8}")
    for row in found:
        print(
            f"{row['row']:<34}{row['seconds']:>9.5f}{row['fastest_seconds']:>9.5f}"
            f"{row['bytes_a_parameter']:>7}{row['gb_per_s']:>8.0f}"
        )
    text = json.dumps({**facts, "rows": found})
    print(text)
    if args.json:
        write_whole(args.json, text + "\n")


if __name__ == "__main__":
    main()
