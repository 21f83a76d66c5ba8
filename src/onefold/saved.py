"""Owns what autograd keeps of a unit: addresses, and the hooks through which it keeps them.

[Note: Who keeps a model alive]
Python cannot see that a cycle through autograd's graph or a tensor's hooks is one. So whatever hangs on tensors refers
to the runtime weakly: a model that keeps a tensor of its last forward, and with it that graph, can still be freed. The
price is that a loss alone does not keep its model: a backward that needs weights which are gone says so.
"""

from typing import Any, Protocol
from weakref import ref

from torch import Tensor

from onefold.errors import OnefoldError
from onefold.flat import Flat
from onefold.unit import Unit


class SavedView:
    """The address of a saved tensor inside a unit's flat buffer."""

    __slots__ = ("flat", "offset", "shape", "strides", "unit", "use", "version")

    def __init__(self, unit: Unit, flat: Flat, tensor: Tensor) -> None:
        self.unit, self.flat, self.use, self.version = unit, flat, unit.use, flat.version
        self.shape, self.strides, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.use.outstanding += 1

    def __del__(self) -> None:
        self.use.outstanding -= 1


class Saver(Protocol):
    """Decides what is saved of a tensor, and finds it again."""

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        """What to save."""
        ...

    def unpack(self, saved: Tensor | SavedView) -> Tensor:
        """The tensor that was saved."""
        ...


class SavingHooks:
    """The pair of hooks that a graph holds for a `Saver`. See [Note: Who keeps a model alive]."""

    __slots__ = ("_saver",)

    def __init__(self, saver: Saver) -> None:
        self._saver = ref(saver)

    def pack(self, tensor: Tensor) -> Any:
        return self._found().pack(tensor)

    def unpack(self, saved: Any) -> Tensor:
        return self._found().unpack(saved)

    def _found(self) -> Saver:
        saver = self._saver()
        if saver is None:
            raise OnefoldError(
                "this backward pass needs the weights of a sharded model that is gone; keep the model, or what its "
                "forward returned, until backward has run"
            )
        return saver
