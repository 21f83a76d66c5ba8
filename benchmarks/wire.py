"""Times how shards are gathered and gradients reduced between the GPUs of one machine, alone and beside computation.

    torchrun --nproc-per-node 4 benchmarks/wire.py [--numel 202_383_360] [--repeats 20] [--ctas 4 8] [--json FILE]

A unit has --numel bf16 elements over all ranks: a block of a 6.74B Llama unless told otherwise. Rows:

- gather, collective: NCCL's all-gather into the unit's buffer; gather, copies: what `shard(gather="copy")` does;
- reduce, collective: NCCL's reduce-scatter; reduce, pull and sum: every rank copies its part of all others' gradients
  from memory that all of them see, and sums them in rank order in fp32. It meets the others before and after;
- reduce, 4 CTAs (with --ctas 4, on GPUs): NCCL's on no more than so many blocks of threads, for slower traffic that
  leaves more of the processors to the computation.

"beside" is the time of matrix products that take about four times as long as the first row, with that traffic next to
them; "cost" is what it adds to the time of the same products without any: what training pays. Bytes a second count what
a rank receives. Medians over repeats; the slowest rank counts. `--numel 100_000` tries it on CPUs, over gloo.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from onefold.comm import Comm, start
from onefold.mesh import connect
from onefold.peers import MappedPool, PeerComm, Pool, SymmetricPool
from onefold.streams import Finish, Ticket, lanes_for
from workload import machine, synchronize

WARM_UPS = 3
SIDE = 4096
Transfer = Callable[[], Finish | None]


def pool_of(comm: Comm, device: torch.device) -> Pool:
    return SymmetricPool(comm.peer_group, device) if device.type == "cuda" else MappedPool(comm)


class PullSum:
    """The mean of everyone's gradients for this rank's part, by copies."""

    def __init__(self, comm: Comm, pool: Pool, numel: int, device: torch.device) -> None:
        self._pool = pool
        self.whole, self._everyone = pool.allocate(numel, torch.bfloat16)
        self.whole.zero_()
        self._own = slice(comm.shard * numel // comm.num_shards, (comm.shard + 1) * numel // comm.num_shards)
        self._rows = torch.empty(comm.num_shards, numel // comm.num_shards, dtype=torch.bfloat16, device=device)
        self.shard = torch.empty(numel // comm.num_shards, dtype=torch.bfloat16, device=device)

    def __call__(self) -> None:
        self._meet()
        for row, whole in zip(self._rows, self._everyone, strict=True):
            row.copy_(whole[self._own])
        self.shard.copy_(self._rows.mean(0, dtype=torch.float32))
        self._meet()

    def _meet(self) -> None:
        finish = self._pool.meet()
        if finish is not None:
            finish()


def on_few(ctas: int, shard: torch.Tensor, whole: torch.Tensor) -> Transfer:
    """NCCL's reduce-scatter on at most so many blocks of threads."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = ctas
    group = dist.new_group(backend="nccl", pg_options=options)
    return partial(dist.reduce_scatter_tensor, shard, whole, dist.ReduceOp.AVG, group)


def rows_of(numel: int, device: torch.device, ctas: Sequence[int]) -> dict[str, tuple[str, Transfer]]:
    """Each row's lane and what runs there."""
    comm = connect(device)
    copying = PeerComm(comm, pool_of(comm, device))
    rest = torch.ones(numel // comm.num_shards, dtype=torch.bfloat16, device=device)
    exposed, whole = copying.expose(rest), torch.empty(numel, dtype=torch.bfloat16, device=device)
    return {
        "gather, collective": ("gather", partial(comm.all_gather, whole, rest)),
        "gather, copies": ("gather", partial(copying.all_gather, whole, exposed)),
        "reduce, collective": ("reduce", partial(comm.reduce_scatter, rest, whole)),
        "reduce, pull and sum": ("reduce", PullSum(comm, pool_of(comm, device), numel, device)),
        **{f"reduce, {number} CTAs": ("reduce", on_few(number, rest, whole)) for number in ctas},
    }


class Bench:
    """Times work on one device, on all ranks at once."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats
        self._lanes = lanes_for(device)
        side = SIDE if device.type == "cuda" else 64
        self._factor = torch.randn(side, side, dtype=torch.bfloat16, device=device)

    def seconds(self, once: Callable[[], None]) -> float:
        """The median of the slowest rank."""
        times = []
        for _ in range(WARM_UPS + self._repeats):
            synchronize()
            dist.barrier()
            begun = time.perf_counter()
            once()
            synchronize()
            times.append(time.perf_counter() - begun)
        slowest = torch.tensor(statistics.median(times[WARM_UPS:]), dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def products(self, number: int) -> None:
        for _ in range(number):
            _ = self._factor @ self._factor

    def transfer(self, lane: str, run: Transfer) -> Ticket:
        self._lanes.order_gather()
        return getattr(self._lanes, lane).run(run, after=[self._lanes.mark()])  # type: ignore[no-any-return]

    def alone(self, lane: str, run: Transfer) -> None:
        self.transfer(lane, run).wait()

    def beside(self, number: int, lane: str, run: Transfer) -> None:
        ticket = self.transfer(lane, run)
        self.products(number)
        ticket.wait()


def measure(numel: int, repeats: int, device: torch.device, ctas: Sequence[int]) -> list[dict[str, float | str]]:
    bench, rows = Bench(device, repeats), rows_of(numel, device, ctas)
    first = bench.seconds(partial(bench.alone, *rows["gather, collective"]))
    one = bench.seconds(partial(bench.products, 10)) / 10
    number = max(1, round(4 * first / one))
    products = bench.seconds(partial(bench.products, number))
    received = 2 * numel * (dist.get_world_size() - 1) / dist.get_world_size()
    found: list[dict[str, float | str]] = []
    for name, row in rows.items():
        alone, beside = bench.seconds(partial(bench.alone, *row)), bench.seconds(partial(bench.beside, number, *row))
        found.append(
            {
                "row": name,
                "alone_s": alone,
                "bytes_per_second": received / alone,
                "beside_s": beside,
                "products_s": products,
                "cost_s": beside - products,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=202_383_360)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--ctas", nargs="*", type=int, default=[], help="also reduce on so few; needs GPUs")
    parser.add_argument("--json", help="write the rows here")
    words = parser.parse_args()
    start()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    numel = -(-words.numel // (16 * dist.get_world_size())) * 16 * dist.get_world_size()
    rows = measure(numel, words.repeats, device, words.ctas)
    if dist.get_rank() == 0:
        print(f"{'':24}{'alone ms':>10}{'GB/s':>8}{'beside ms':>11}{'cost ms':>9}")
        for row in rows:
            ms = [1e3 * float(row[key]) for key in ("alone_s", "beside_s", "cost_s")]
            rate = float(row["bytes_per_second"]) / 1e9
            print(f"{row['row']:24}{ms[0]:10.3f}{rate:8.1f}{ms[1]:11.3f}{ms[2]:9.3f}")
        told = {**machine(device.type), "num_ranks": dist.get_world_size(), "numel": numel, "rows": rows}
        print(json.dumps(told))
        if words.json:
            with open(words.json, "w") as file:
                json.dump(told, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
