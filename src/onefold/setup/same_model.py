"""Owns the proof that all ranks shard the same model in the same way. Each rank describes what it was given in lines;
ranks exchange them once."""

from collections.abc import Sequence

from torch import nn

from onefold.comm.comm import Comm
from onefold.errors import ShardError
from onefold.plan.precision import Precision
from onefold.setup.find_units import UnitSpec


def check_same_model(comm: Comm, model: nn.Module, specs: Sequence[UnitSpec], plan: str, precision: Precision) -> None:
    """Raise on every rank if any rank's plan (in words), precision, units, parameters or buffers differ.

    Raises:
        ShardError: naming the first difference and the ranks.
    """
    mine = [plan, str(precision), *(f"a unit {spec.name or '(root)'!r}" for spec in specs)]
    for spec in specs:
        for name, param in spec.params:
            mine.append(
                f"{name} {tuple(param.shape)} {param.dtype} {'trained' if param.requires_grad else 'frozen'}"
                f"{' on meta' if param.is_meta else ''}"
            )
    for name, buffer in model.named_buffers():
        mine.append(f"a buffer {name} {tuple(buffer.shape)} {buffer.dtype}{' on meta' if buffer.is_meta else ''}")
    for rank, theirs in enumerate(comm.exchange_objects(mine)):
        for ours, other in zip(mine, theirs, strict=False):
            if ours != other:
                raise ShardError(
                    f"models or settings differ between ranks: rank {comm.rank} has {ours}, rank {rank} has {other}"
                )
        if len(mine) != len(theirs):
            longer, rest = (comm.rank, mine) if len(mine) > len(theirs) else (rank, theirs)
            extra = rest[min(len(mine), len(theirs))]
            shorter = rank if longer == comm.rank else comm.rank
            raise ShardError(
                f"models differ between ranks: rank {longer} has {extra}, where the parameters of rank {shorter} end"
            )
