"""Times what the host does in a step of training, of a model so small that its arithmetic is next to nothing: Onefold's
plans beside DDP and FSDP2, on ranks that are processes of this machine's CPU and talk over gloo.

    python -m benchmarks.host_step [--ranks 2] [--blocks 24] [--steps 50] [--only ddp zero_0 ...] [--json FILE]

- ddp: DistributedDataParallel and torch.optim.AdamW, as both are by default;
- fsdp2: `fully_shard` on every block and the root, and the same AdamW;
- alone: the model and the same AdamW, and no word to another rank;
- ddp:fused, fsdp2:fused, alone:fused: with AdamW(fused=True), which a script on CPUs has to ask for;
- zero_0 to zero_3, offload, offload_3: `onefold.shard` and `onefold.AdamW`.

Each rank is a process with one thread, and trains all of them in turns: one step of each, in an order drawn anew for
each round, so that what disturbs the machine disturbs all alike. A step is forward, backward, update and zero_grad, and
ends when no update is under way any more; ranks meet before it, untimed, and the slowest one's time counts. "busy" is
the processor's time of the thread that trains: the rest of the step it waits, for the other ranks, for gloo's threads,
or for a core, where there are fewer than ranks. Gradients are not clipped.

Beside other work, and with fewer cores than ranks, times double and more; compare within a run. All of it takes a
minute or two; `--only zero_2 ddp --blocks 2 --steps 5` tries the program in seconds.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.comm.comm import join
from onefold.engine.session import session_of
from onefold.plan.table import NAMED_PLANS
from onefold.testing import RankPool
from workload import check_writable, machine, write_whole

PLANS = ("zero_0", "zero_1", "zero_2", "zero_3", "offload", "offload_3")
TORCHS_OWN = ("alone", "ddp", "fsdp2")
CONTENDERS = (*TORCHS_OWN, *(f"{name}:fused" for name in TORCHS_OWN), *PLANS)
PEERS = ("ddp", "ddp:fused", "fsdp2", "fsdp2:fused")
"""What all are compared with."""
WIDTH, VOCABULARY, TOKENS = 32, 64, 16
WARM_UP = 5
"""Steps of each that do not count: the first ones allocate, and agree on orders."""
_PATIENCE_S = 3600.0


class Block(nn.Module):
    """A feed-forward block: six parameters, four of them with less than a hundred elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Network(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [tokens, vocabulary] of `tokens` [tokens]."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to train that is ready to."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    settle: Callable[[], None] = lambda: None
    """Comes back when no update is under way."""

    def step(self, tokens: Tensor) -> Tensor:
        """A step; returns its loss (0-dim)."""
        loss = nn.functional.cross_entropy(self.model(tokens), tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.settle()
        return loss.detach()


def ready(name: str, num_blocks: int) -> Contender:
    """The contender of that name, on every rank."""
    torch.manual_seed(0)
    model: nn.Module = Network(num_blocks)
    if name in PLANS:
        model = onefold.shard(model, NAMED_PLANS[name])
        settle = session_of(model, "the benchmark").runtime.finish_updates
        return Contender(model=model, optimizer=onefold.AdamW(model), settle=settle)
    system, _, choice = name.partition(":")
    if system == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if system == "fsdp2":
        fully_sharded(model)
    return Contender(model=model, optimizer=torch.optim.AdamW(model.parameters(), fused=choice == "fused" or None))


def fully_sharded(model: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def measure(rank: int, num_ranks: int, names: Sequence[str], num_blocks: int, steps: int) -> dict[str, Any]:
    """Seconds of each contender's steps on this rank, and the processor's of its thread; losses of the last ones."""
    if num_ranks == 1:
        join("gloo", is_alone=True)  # DDP and FSDP2 want a group
    contenders = {name: ready(name, num_blocks) for name in names}
    found: dict[str, Any] = {name: {"seconds": [], "busy_s": []} for name in names}
    generator, turns = torch.Generator().manual_seed(rank), random.Random(0)  # the same turns on every rank
    for step in range(WARM_UP + steps):
        tokens = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        for name in turns.sample(list(names), len(names)):
            dist.barrier()
            begun, busy = time.perf_counter(), time.thread_time()
            loss = contenders[name].step(tokens)
            took, busy = time.perf_counter() - begun, time.thread_time() - busy
            if step >= WARM_UP:
                found[name]["seconds"].append(took)
                found[name]["busy_s"].append(busy)
                found[name]["loss"] = float(loss)
    return found


def row_of(name: str, every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What came of one contender; seconds."""
    steps = [max(each) for each in zip(*(rank[name]["seconds"] for rank in every), strict=True)]
    busy = [max(each) for each in zip(*(rank[name]["busy_s"] for rank in every), strict=True)]
    tenths = statistics.quantiles(steps, n=10, method="inclusive")
    return {
        "contender": name,
        "median_s": statistics.median(steps),
        "p10_s": tenths[0],
        "p90_s": tenths[-1],
        "busy_s": statistics.median(busy),
        "losses": [rank[name]["loss"] for rank in every],
        "repetitions": steps,
    }


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Say in each row how many times a peer's median its own is; None where that one did not run."""
    medians = {row["contender"]: row["median_s"] for row in rows}
    for row in rows:
        row["of"] = {peer: row["median_s"] / medians[peer] if peer in medians else None for peer in PEERS}


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table."""
    heads = ("median", "p10", "p90", "busy", *(f"/ {peer}" for peer in PEERS))
    told = [f"{'ms':<12}" + "".join(f"{head:>13}" if head[0] == "/" else f"{head:>9}" for head in heads)]
    for row in rows:
        times = "".join(f"{1e3 * row[key]:>9.2f}" for key in ("median_s", "p10_s", "p90_s", "busy_s"))
        ratios = "".join(f"{'-' if ratio is None else format(ratio, '.2f'):>13}" for ratio in row["of"].values())
        told.append(f"{row['contender']:<12}{times}{ratios}")
    return told


def waiting(rows: Sequence[dict[str, Any]]) -> str:
    """Who waits for more than half of a step: there the ranks' traffic was timed, more than the host's work."""
    shares = {row["contender"]: 1 - row["busy_s"] / row["median_s"] for row in rows}
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share > 0.5)
    return f"More waiting than work: {told}" if told else "Nobody waits for more than half of a step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--steps", type=int, default=50, help="of each that count, at least 2")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="NAME", help="not all")
    parser.add_argument("--json", help="write every repetition here, and what the numbers depend on")
    words = parser.parse_args()
    check_writable(parser, words.json)
    if min(words.ranks, words.blocks, words.steps - 1) < 1:
        parser.error("--ranks and --blocks are at least 1, --steps at least 2")
    os.environ["OMP_NUM_THREADS"] = "1"  # the ranks inherit it
    names = list(dict.fromkeys(words.only))
    with RankPool(words.ranks) as pool:
        run = partial(pool.run, measure, names, words.blocks, words.steps)
        every = run(timeout_s=_PATIENCE_S)
    rows = [row_of(name, every) for name in names]
    compare(rows)
    facts = machine("cpu")
    settings = {"num_ranks": words.ranks, "num_blocks": words.blocks, "steps": words.steps}
    print(f"{words.blocks} blocks, {words.ranks} ranks, {words.steps} steps; {facts['cpu']}, torch {torch.__version__}")
    print("\n".join([*lines(rows), waiting(rows)]))
    if words.json:
        write_whole(words.json, json.dumps({**facts, **settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
