"""Ways to collect and reduce gradients that Onefold does not use, for `wire.py` to time beside those it does."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from onefold.comm.comm import Comm
from onefold.comm.copies.shared_memory import Pool

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs come without it
    triton = None

Transfer = Callable[[], Any]
_BLOCK, _WARPS, _MOST_GPUS = 8192, 32, 4


class PullSum:
    """The mean of everyone's gradients for this rank's part: copied here, then summed by one kernel where there is
    Triton, by torch's operations elsewhere."""

    def __init__(self, comm: Comm, pool: Pool, numel: int, device: torch.device) -> None:
        self._pool = pool
        self._is_fused = can_be_direct(comm, device)
        self.whole, everyone = pool.allocate(numel, torch.bfloat16)
        self.whole.fill_(comm.rank)
        self.parts = [each.chunk(comm.num_shards)[comm.shard] for each in everyone]
        self.shard = torch.empty_like(self.parts[comm.shard], device=device)
        self._own = comm.shard
        self._rows = [torch.empty_like(self.shard) for _ in self.parts]
        self._rows[self._own] = self.parts[self._own]

    def __call__(self) -> None:
        self._meet()
        self._sum()
        self._meet()

    def _sum(self) -> None:
        for shift in range(1, len(self.parts)):
            index = (self._own + shift) % len(self.parts)
            self._rows[index].copy_(self.parts[index])
        if self._is_fused:
            self._mean(self._rows, -(-self.shard.numel() // _BLOCK))
        else:
            self.shard.copy_(torch.stack(self._rows).mean(0, dtype=torch.float32))

    def _mean(self, parts: Sequence[torch.Tensor], num_programs: int) -> None:
        padded = [*parts, *[None] * (_MOST_GPUS - len(parts))]
        _mean[(num_programs,)](self.shard, *padded, self.shard.numel(), BLOCK=_BLOCK, num_warps=_WARPS)

    def _meet(self) -> None:
        finish = self._pool.meet()
        if finish is not None:
            finish()


class Direct(PullSum):
    """The same by one kernel of `num_programs` blocks of threads, which reads the other GPUs' memory as it sums. For 2
    and 4 GPUs, with Triton."""

    def __init__(self, comm: Comm, pool: Pool, numel: int, device: torch.device, num_programs: int) -> None:
        super().__init__(comm, pool, numel, device)
        self._num_programs = num_programs

    def _sum(self) -> None:
        self._mean(self.parts, self._num_programs)


def can_be_direct(comm: Comm, device: torch.device) -> bool:
    return triton is not None and device.type == "cuda" and comm.num_shards in (2, 4)


if triton is not None:

    @triton.jit
    def _mean(shard, first, second, third, fourth, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        for start in tl.range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            is_inside = at < numel
            one = tl.load(first + at, mask=is_inside)
            two = tl.load(second + at, mask=is_inside)
            if third is None:
                mean = (one.to(tl.float32) + two.to(tl.float32)) / 2
            else:
                three = tl.load(third + at, mask=is_inside)
                four = tl.load(fourth + at, mask=is_inside)
                mean = (one.to(tl.float32) + two.to(tl.float32) + three.to(tl.float32) + four.to(tl.float32)) / 4
            tl.store(shard + at, mean.to(shard.dtype.element_ty), mask=is_inside)


def copy_together(gradients: Sequence[torch.Tensor], whole: torch.Tensor) -> None:
    """Put all gradients into `whole` by one kernel."""
    torch.cat(list(gradients), out=whole)


def copy_each(gradients: Sequence[torch.Tensor], whole: torch.Tensor) -> None:
    """Put all gradients into `whole`, one after another."""
    for gradient, place in zip(gradients, whole.split([len(each) for each in gradients]), strict=True):
        place.copy_(gradient)


def on_few(ctas: int, shard: torch.Tensor, whole: torch.Tensor) -> Transfer:
    """NCCL's reduce-scatter on at most so many blocks of threads."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = ctas
    group = dist.new_group(backend="nccl", pg_options=options)
    return partial(dist.reduce_scatter_tensor, shard, whole, dist.ReduceOp.AVG, group)


def in_pieces(comm: Comm, shard: torch.Tensor, gradients: Sequence[torch.Tensor]) -> Transfer:
    """Gradients reduced where they are by one group of NCCL's calls, each piece to the rank whose shard has
    its place; this rank's pieces then go into `shard`. Nothing has to be collected beforehand."""
    device, group = shard.device, dist.new_group(backend="nccl")
    pieces: list[list[torch.Tensor]] = [[] for _ in range(comm.num_shards)]
    at, numel = 0, shard.numel()
    for gradient in gradients:
        while len(gradient):
            rank, room = at // numel, numel - at % numel
            pieces[rank].append(gradient[:room])
            at, gradient = at + len(pieces[rank][-1]), gradient[room:]

    def transfer() -> None:
        with dist._coalescing_manager(group=group, device=device):
            for rank, parts in enumerate(pieces):
                for part in parts:
                    dist.reduce(part, op=dist.ReduceOp.AVG, group=group, group_dst=rank)
        copy_together(pieces[comm.shard], shard)

    return transfer


def registered(comm: Comm, numel: int, device: torch.device) -> Transfer:
    """NCCL's reduce-scatter of sums over memory that it knows all ranks' addresses of (symmetric windows)."""
    group: Any = dist.new_group(backend="nccl")
    dist.all_reduce(torch.ones(1, device=device), group=group)  # its communicator is made by the first use
    backend = group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        whole = torch.ones(numel, dtype=torch.bfloat16, device=device)
        shard = torch.ones(numel // comm.num_shards, dtype=torch.bfloat16, device=device)
    backend.register_mem_pool(pool, symm=True)
    reduce = partial(dist.reduce_scatter_tensor, shard, whole, dist.ReduceOp.SUM, group)

    def transfer(pool: Any = pool) -> None:  # the pool has to live as long as its memory is in use
        reduce()

    return transfer
