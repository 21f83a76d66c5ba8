"""Times how shards are gathered and gradients reduced between the GPUs of one machine, alone and beside computation.

    torchrun --nproc-per-node 4 benchmarks/wire.py [--numel 202_383_360] [--repeats 20] [--ctas 4 8] [--json FILE]

A unit has --numel bf16 elements over all ranks: a block of a 6.74B Llama unless told otherwise. Rows:

- gather, collective: NCCL's all-gather into the unit's buffer; gather, copies: what `shard(gather="copy")` does;
- reduce, collective: NCCL's reduce-scatter; reduce, copies: nine gradients as they are, as `gather="copy"` has it;
- reduce, pull and sum: every rank copies its part of all others' gradients from memory that all of them see, and sums
  them in rank order in fp32. It meets the others before and after;
- collect, one kernel; collect, copies: nine gradients into a unit's buffer on one GPU, as Onefold does it (there on the
  computation's stream, here beside it), and by a copy for each;
- reduce, direct 16 (on 2 or 4 GPUs, with Triton): one kernel on so many blocks of threads reads and sums all parts;
- with --ctas 4, on GPUs: reduce, 4 CTAs, NCCL's on no more than so many blocks of threads, for slower traffic that
  leaves more of the processors to the computation; and reduce, registered: NCCL's over memory registered with it;
- reduce, in pieces (GPUs): the nine gradients where they are, each piece to the rank that keeps it, with no collecting.

"beside" is the time of matrix products that take about four times as long as the first row, with that traffic next to
them; "cost" is what it adds to the time of the same products without any: what training pays. A GPU begins when all is
queued, so launching is no part of either. Bytes a second count what a rank receives. Medians over repeats; the slowest
rank counts. `--numel 100_000` tries it on CPUs, over gloo.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from onefold.comm.comm import Comm, start
from onefold.comm.copies.copy_collectives import PeerComm
from onefold.comm.copies.shared_memory import MappedPool, Pool, SymmetricPool
from onefold.comm.mesh import connect
from onefold.memory.streams import Ticket, lanes_for
from onefold.optim.kernels.fused import mean_on
from wire_ways import Direct, PullSum, Transfer, can_be_direct, copy_each, copy_together, in_pieces, on_few, registered
from workload import check_launched, check_writable, machine, synchronize, write_whole

WARM_UPS = 3
SIDE = 4096
DIRECT = (16, 32)
HEAD_START_CYCLES = 4_000_000
"""About 2 ms, in which the host queues everything."""


def pool_of(comm: Comm, device: torch.device) -> Pool:
    return SymmetricPool(comm.peer_group, device) if device.type == "cuda" else MappedPool(comm)


def rows_of(numel: int, device: torch.device, ctas: Sequence[int]) -> dict[str, tuple[str, Transfer]]:
    """Each row's lane and what runs there."""
    comm = connect(device)
    copying = PeerComm(comm, pool_of(comm, device), mean_on(device))
    rest = torch.ones(numel // comm.num_shards, dtype=torch.bfloat16, device=device)
    is_direct, pool = can_be_direct(comm, device), pool_of(comm, device)
    whole = torch.empty(numel, dtype=torch.bfloat16, device=device)
    gradients = [torch.ones_like(part) for part in whole.split(-(-numel // 9))]
    direct = partial(Direct, comm, pool, numel, device)
    exposed = copying.expose(rest)
    copying.expect_reductions(rest.nbytes)
    return {
        "gather, collective": ("gather", partial(comm.all_gather, whole, rest)),
        "gather, copies": ("gather", partial(copying.all_gather, whole, exposed)),
        "reduce, collective": ("reduce", partial(comm.reduce_scatter, rest, whole)),
        "reduce, copies": ("reduce", partial(copying.reduce_scatter, rest, *gradients)),
        "reduce, pull and sum": ("reduce", PullSum(comm, pool, numel, device)),
        "collect, one kernel": ("reduce", partial(copy_together, gradients, whole)),
        "collect, copies": ("reduce", partial(copy_each, gradients, whole)),
        **{f"reduce, direct {number}": ("reduce", direct(number)) for number in (DIRECT if is_direct else ())},
        **{f"reduce, {number} CTAs": ("reduce", on_few(number, rest, whole)) for number in ctas},
        **({"reduce, registered": ("reduce", registered(comm, numel, device))} if ctas else {}),
        **({"reduce, in pieces": ("reduce", in_pieces(comm, rest, gradients))} if device.type == "cuda" else {}),
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
            times.append(self._timed(once))
        slowest = torch.tensor(statistics.median(times[WARM_UPS:]), dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _timed(self, once: Callable[[], None]) -> float:
        if self._device.type != "cuda":
            begun = time.perf_counter()
            once()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        once()
        end.record()
        synchronize()
        return begin.elapsed_time(end) / 1e3

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
    is_cuda = torch.cuda.is_available()
    if min(words.numel, words.repeats, *words.ctas) < 1:
        parser.error("--numel, --repeats and --ctas are at least 1")
    if words.ctas and not is_cuda:
        parser.error("--ctas are NCCL's: they need GPUs")
    check_writable(parser, words.json)
    check_launched(parser, "cuda" if is_cuda else "cpu")
    start()
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
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
            write_whole(words.json, json.dumps(told, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
