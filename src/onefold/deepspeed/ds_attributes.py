"""Owns the attributes that scripts look for on parameters under stage 3: `ds_id`, `ds_status`, `ds_numel`, `ds_shape`.

Invariant: `ds_status` says whether a parameter's values are there. While they are, its class is `ZeroParameter`, whose
property answers; while they are not, its class is another (`engine/released.py`), and the attribute on the parameter
itself answers.
"""

from enum import Enum

from torch import nn


class ZeroParamStatus(Enum):
    """Whether a parameter's values are there. No script sees INFLIGHT: an operation that reads a parameter waits."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParameter(nn.Parameter):
    """The class of a parameter with these attributes while its values are there."""

    @property
    def ds_status(self) -> ZeroParamStatus:
        return ZeroParamStatus.AVAILABLE


def add_ds_attributes(param: nn.Parameter, number: int) -> None:
    """Give a parameter that is about to rest in parts its attributes, with `number` as `ds_id`.

    A parameter of a class of its own keeps that class while it is whole, and answers `ds_status` as if it were not."""
    attributes = {
        "ds_id": number,
        "ds_status": ZeroParamStatus.NOT_AVAILABLE,
        "ds_numel": param.numel(),
        "ds_shape": param.shape,
    }
    vars(param).update(attributes)
    if type(param) is nn.Parameter:
        param.__class__ = ZeroParameter
