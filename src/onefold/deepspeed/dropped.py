"""Owns noticing what a script writes into gathered parameters that is not kept, as it is not by DeepSpeed either.

Invariant: a parameter is spoken of once, and reading it is not taken for writing.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onefold.engine.flat import checksum
from onefold.engine.session import owner_session
from onefold.setup.deferred_init import deferred_by

_log = logging.getLogger("onefold")
_TOLD = "_onefold_told_dropped"


class Watch:
    """What parameters were like when they were gathered, to be read only.

    Args:
        params: whole now. Those that rest whole are passed over: they keep what is written.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._before = [(param, _checksum(param)) for param in params if _rests_in_parts(param)]

    def end(self) -> None:
        """While they are still whole: say which were written, on the ranks that wrote, and let that be lost."""
        if not self._before:
            return
        is_written = torch.stack([_checksum(param) != before for param, before in self._before]).tolist()
        written = [param for (param, _), changed in zip(self._before, is_written, strict=True) if changed]
        fresh = [param for param in written if _TOLD not in vars(param)]
        for param in fresh:
            vars(param)[_TOLD] = True
        if fresh:
            others = f" and {len(fresh) - 1} more" if len(fresh) > 1 else ""
            _log.warning(
                "%s%s: what was written inside of GatheredParameters is dropped, as DeepSpeed does. To keep it, say "
                "whose: GatheredParameters(params, modifier_rank=0) makes rank 0's values everyone's",
                _described(fresh[0]),
                others,
            )
        _forget(written)


def _rests_in_parts(param: nn.Parameter) -> bool:
    session = owner_session(param)
    return deferred_by(param) is not None or (session is not None and session.plan.params.partitioned)


def _described(param: nn.Parameter) -> str:
    deferred, session = deferred_by(param), owner_session(param)
    return deferred.describe(param) if deferred is not None else session.describe(param) if session is not None else ""


def _forget(params: Sequence[nn.Parameter]) -> None:
    """Units that hold `params` are released without another word on what was written."""
    wanted = {id(param) for param in params}
    sessions = {id(session): session for session in map(owner_session, params) if session is not None}
    for session in sessions.values():
        for unit in session.runtime.units:
            if any(id(param) in wanted for flat in unit.flats for param in flat.params):
                unit.keep_written()


def _checksum(param: nn.Parameter) -> Tensor:
    """A number that changes when any bits do, but for unlikely coincidences; on their device."""
    value = param.detach().contiguous().flatten().view(torch.uint8)  # at an address that is a multiple of 8
    words = value.numel() // 8 * 8
    rest = value.new_zeros(8)
    rest[: value.numel() - words] = value[words:]
    return checksum(value[:words]) + checksum(rest)
