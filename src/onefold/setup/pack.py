"""Owns which parameters of a unit go into one flat buffer, in what order, and their number formats.

Needs shapes and dtypes alone: a model on the meta device will do, and neither a GPU nor a process group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from onefold.memory.buffer import CopyMaster, OwnMaster, SplitMaster, exact_dtype
from onefold.plan.accounting import FlatSpec, UnitBytes
from onefold.plan.layout import Layout
from onefold.plan.precision import Precision
from onefold.setup.find_units import UnitSpec

_MASTERS: Mapping[str, type[OwnMaster | SplitMaster | CopyMaster]] = {
    "own": OwnMaster,
    "split": SplitMaster,
    "fp32": CopyMaster,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Parameters of one unit that share a flat buffer: of one dtype, all trained or all frozen."""

    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    layout: Layout
    dtype: torch.dtype
    grad_dtype: torch.dtype
    master_type: type[OwnMaster | SplitMaster | CopyMaster]
    is_trained: bool

    @property
    def spec(self) -> FlatSpec:
        """What it costs with Adam, whose state is the largest."""
        return FlatSpec(
            layout=self.layout,
            param_itemsize=self.dtype.itemsize,
            grad_itemsize=self.is_trained * self.grad_dtype.itemsize,
            optim_itemsize=self.is_trained * self.master_type.itemsize,
            twin_itemsize=self.is_trained * self.dtype.itemsize,
            state_itemsize=self.is_trained * 2 * exact_dtype(self.dtype).itemsize,
        )


@dataclass(frozen=True, slots=True)
class PackedUnit:
    """A unit with its flat buffers."""

    spec: UnitSpec
    packs: Sequence[Pack]

    @property
    def used(self) -> UnitBytes:
        """Bytes that belong to its parameters."""
        return UnitBytes.of(pack.spec.used for pack in self.packs)

    @property
    def resting(self) -> UnitBytes:
        """Bytes that it takes, padding included."""
        return UnitBytes.of(pack.spec.resting for pack in self.packs)


def pack(model: nn.Module, specs: Sequence[UnitSpec], precision: Precision, num_shards: int) -> list[PackedUnit]:
    """The units of `model`, with their parameters in the flat buffers that they will share."""
    # Batch norm's kernels take fp32 weights with 16-bit inputs: its parameters stay as they are.
    norms = {id(p) for module in model.modules() if isinstance(module, _BatchNorm) for p in module.parameters()}

    def packs(spec: UnitSpec) -> Iterator[Pack]:
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, param in sorted(spec.params, key=lambda item: item[1].dim() > 1):
            dtype = param.dtype if id(param) in norms else precision.param_dtype(param.dtype)
            kinds.setdefault((dtype, param.requires_grad), []).append((name, param))
        for (dtype, is_trained), members in kinds.items():
            yield Pack(
                names=tuple(name for name, _ in members),
                params=tuple(param for _, param in members),
                layout=Layout.pack([(name, tuple(param.shape)) for name, param in members], num_shards),
                dtype=dtype,
                grad_dtype=precision.grad_dtype(dtype),
                master_type=_MASTERS[precision.master_form(dtype)],
                is_trained=is_trained,
            )

    return [PackedUnit(spec, list(packs(spec))) for spec in specs]
