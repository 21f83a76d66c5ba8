"""Owns the marks that scripts look for on parameters under stage 3: `ds_id`, `ds_status`, `ds_numel`, `ds_shape`.

Invariant: `ds_status` says whether a parameter's values are there. While they are, its class is `ZeroParameter`, whose
property answers; while they are not, it is another (released.py), and what was put on the parameter itself answers.
"""

from enum import Enum

from torch import nn


class ZeroParamStatus(Enum):
    """Whether a parameter's values are there. INFLIGHT is never seen: whoever reads waits."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParameter(nn.Parameter):
    """The class of a marked parameter while its values are there."""

    @property
    def ds_status(self) -> ZeroParamStatus:
        return ZeroParamStatus.AVAILABLE


def mark(param: nn.Parameter, number: int) -> None:
    """Mark a parameter that is about to rest in parts; parameters of a class of their own keep that while they are
    whole, and answer `ds_status` as if they were not."""
    marks = {
        "ds_id": number,
        "ds_status": ZeroParamStatus.NOT_AVAILABLE,
        "ds_numel": param.numel(),
        "ds_shape": param.shape,
    }
    vars(param).update(marks)
    if type(param) is nn.Parameter:
        param.__class__ = ZeroParameter
