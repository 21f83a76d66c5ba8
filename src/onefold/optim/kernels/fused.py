"""Owns the fused update of flat shards in device memory: one Triton kernel, one pass, where torch makes ten; and the
mean over ranks, likewise.

Invariant: an element's new values depend on that element alone, bit for bit: not on where the run starts, how long it
is, or which other runs are updated. They are the rule's to fp32 rounding: the operations of `rules.py` in the order in
which csrc/rules.h has them, each rounded as IEEE 754 says.

Triton comes with torch's builds for GPUs, not with those for CPUs. It is imported, and tried, when a kernel is first
asked for.
"""

import importlib.util
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onefold.comm.reductions import Mean, mean_of_rows
from onefold.optim.kernels.host import Run, Step
from onefold.optim.kernels.kernel_args import RULES, factors_of, form_of, format_of, plan_of, state_of

_BLOCK, _WARPS = 1024, 8
"""Four elements a thread: 16 bytes of fp32, the widest access there is, so that all tensors share one layout."""
_MEAN_BLOCK = 2048
"""Eight elements a thread: 16 bytes of bf16."""
_SCALARS, _STATES = 7, 3


class FusedKernel:
    """The fused update on one type of device. Triton must be installed; a CPU needs its interpreter."""

    name = "fused"

    def __init__(self, device_type: str = "cuda") -> None:
        from onefold.optim.kernels import triton_kernels

        self._device_type = device_type
        self._launch: Any = triton_kernels.update
        self._launch_mean: Any = triton_kernels.mean

    def supports(self, rule: str, exact: torch.dtype) -> bool:
        """Whether `update` takes rules of this name and exact weights of this dtype."""
        return rule in RULES and exact == torch.float32

    def update(self, run: Run, step: Step) -> None:
        """Update `run`, whose tensors are on one device, in place by one step; its gradient is only read.

        A 16-bit weight that is not the rounding of its fp32 copy was written by the user, and is started from.

        Raises:
            OptimizerError: a tensor is not on such a device, 1-D and contiguous, or has the wrong dtype or length; a
                state tensor is missing; the rule or the number of factors is not supported.
        """
        numel, kind = run.weight.numel(), self._device_type
        plan, factors = plan_of(step.rule.name, step.hyper, step.number), factors_of(step.factors, step.hyper)
        form = form_of(run.weight, run.exact, device=kind)
        format_of(run.grad, "grad", numel, kind)
        state = state_of(step.rule.name, plan.state, run.state, numel, kind)
        if numel:
            with torch.cuda.device_of(run.weight):
                self._launch[(-(-numel // _BLOCK),)](
                    *(run.weight, run.exact, run.grad, *state, *[None] * (_STATES - len(state))),
                    *(numel, *factors, *plan.scalars, *[0.0] * (_SCALARS - len(plan.scalars))),
                    RULE=plan.number,
                    FORM=form,
                    BLOCK=_BLOCK,
                    num_warps=_WARPS,
                    enable_fp_fusion=False,
                )
        changed = [run.weight, *state] if run.exact is None else [run.weight, run.exact, *state]
        torch.autograd.graph.increment_version(changed)  # as torch does after an operation in place

    def mean(self, target: Tensor, rows: Tensor) -> None:
        """As `sums.mean_of_rows`, bit for bit; rows are contiguous, but may lie apart."""
        numel, (num_rows, _) = target.numel(), rows.shape
        if target.dtype == torch.float64:
            mean_of_rows(target, rows)
        elif numel:
            with torch.cuda.device_of(target):
                self._launch_mean[(-(-numel // _MEAN_BLOCK),)](
                    *(target, rows, rows.stride(0), numel), NUM_ROWS=num_rows, BLOCK=_MEAN_BLOCK, num_warps=_WARPS
                )


def mean_on(device: torch.device) -> Mean:
    """What takes means of rows on `device`, fastest."""
    kernel = fused_kernel(device)
    return mean_of_rows if kernel is None else kernel.mean


def fused_kernel(device: torch.device) -> FusedKernel | None:
    """The fused kernel for `device`; None where torch's operations have to do: on a CPU, and where Triton fails."""
    return _kernel(device) if device.type == "cuda" else None


@cache
def _kernel(device: torch.device) -> FusedKernel | None:
    """Tried once a process, so that a fallback is announced once."""
    reason = "Triton is not installed"
    if importlib.util.find_spec("triton") is not None:
        try:
            kernel, one = FusedKernel(), torch.zeros(1, device=device)
            kernel.mean(one, one.view(1, 1))
            return kernel
        except Exception as error:  # of many types: an old GPU, no C compiler for Triton's launcher, no room for it
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    logging.getLogger("onefold").warning(
        "no fused kernel (%s): updates on the GPU run as torch's operations, several times slower. Triton has to be "
        "the one that torch %s came with, and needs a C compiler.",
        reason,
        torch.__version__,
    )
    return None
