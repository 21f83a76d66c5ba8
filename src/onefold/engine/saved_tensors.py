"""Owns what autograd keeps of a unit: addresses, and the hooks through which it keeps them.

[Note: Who keeps a model alive]
Python cannot see that a cycle through autograd's graph or a tensor's hooks is one. So whatever hangs on tensors refers
to the runtime weakly: a model that keeps a tensor of its last forward, and with it that graph, can still be freed. The
price is that a loss alone does not keep its model: a backward that needs weights which are gone says so.
"""

from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from onefold.engine.flat import Flat
from onefold.engine.unit import Unit
from onefold.errors import OnefoldError


class SavedView:
    """The address of a saved tensor inside a unit's flat buffer."""

    __slots__ = ("__weakref__", "flat", "offset", "shape", "strides", "unit", "use", "version")

    def __init__(self, unit: Unit, flat: Flat, tensor: Tensor) -> None:
        self.unit, self.flat, self.use, self.version = unit, flat, unit.use, flat.version
        self.shape, self.strides, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        # Autograd drops this in the middle of a backward. Were it counted in Python then (`__del__`), a signal that
        # came during the kernels before would be handled there, where exceptions are passed over: Ctrl-C would be lost.
        self.use.views.add(ref(self, self.use.views.discard))


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

    @property
    def is_stale(self) -> bool:
        """Whether their model is gone. They are still there if its last forward was interrupted (Ctrl-C)."""
        return self._saver() is None

    def push(self) -> None:
        """From here on autograd asks the saver.

        Raises:
            OnefoldError: autograd has no place for hooks here.
        """
        try:
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
        except RuntimeError as error:
            raise OnefoldError(
                f"the model runs where autograd lets no hook see what it saves, such as inside torch.func.grad "
                f"({error}); differentiate with torch.autograd, or use a plan that keeps parameters whole (ZERO_2)"
            ) from error

    def pop(self) -> None:
        """Undo the latest `push`."""
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def pack(self, tensor: Tensor) -> Any:
        saver = self._saver()
        return tensor if saver is None else saver.pack(tensor)

    def unpack(self, saved: Any) -> Tensor:
        saver = self._saver()
        if saver is not None:
            return saver.unpack(saved)
        if isinstance(saved, Tensor):
            return saved
        raise OnefoldError(
            "this backward pass needs the weights of a sharded model that is gone; keep the model, or what its "
            "forward returned, until backward has run"
        )


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than its storage and strides: torch's own, or a parameter whose class adds no
    behaviour to operations."""
    cls: Any = type(tensor)
    is_param = issubclass(cls, nn.Parameter) and cls.__torch_function__ is nn.Parameter.__torch_function__
    return cls is Tensor or is_param


def others_save() -> bool:
    """Whether hooks are active that take care of what autograd saves. Those that models left which are gone are taken
    away."""
    top: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # its stub forgets None
    while (active := top(True)) is not None:
        owner = getattr(active[0], "__self__", None)
        if not isinstance(owner, SavingHooks) or not owner.is_stale:
            return True
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return False
