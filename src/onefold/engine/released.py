"""Owns what a user sees of state that is not there: parameters whose values rest in shards, gradients already reduced.

[Note: Released parameters]
A released parameter is the same object as ever, with its shape, dtype and hooks; only its Python class differs, and
that class lets nothing but metadata through. Every operation on it goes to its runtime, which gathers it on the spot
during a forward or backward, and raises otherwise; values that are whole, but still on their way, it waits for.
Nothing in C++ reads a parameter without Python seeing it first: autograd's saved tensors are replaced by `SavedView`s
(runtime.py), and gradients accumulate without reading weights. (But `torch.tensor(param)`, `new_tensor`, modules of
torch.jit and torch.func's transforms by a parameter itself do, and torch gives nobody a say in it.)
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves

from onefold.errors import ReducedGradientError, ReleasedParameterError

_T = Tensor
_GETTERS = [
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "grad",
    "is_leaf",
    "grad_fn",
    "ndim",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "is_mkldnn",
    "is_mps",
    "is_xpu",
    "is_sparse_csr",
    "itemsize",
    "nbytes",
    "output_nr",
    "retains_grad",
    "names",
    "_version",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_base",
    "_grad",
    "_grad_fn",
    "is_complex",
    "is_floating_point",
]
_METHODS = [
    "size",
    "stride",
    "dim",
    "numel",
    "nelement",
    "ndimension",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "storage_offset",
    "get_device",
    "element_size",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "is_signed",
    "has_names",
    "__hash__",
    "__len__",
    "_is_view",
    "retain_grad",
    "is_shared",
    "__dir__",
]
_TEXT = (_T.__repr__, _T.__format__)
_FUNCTIONS = (torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed)


def _metadata() -> frozenset[Any]:
    allowed: set[Any] = set(_FUNCTIONS)
    for name in _GETTERS:
        attribute = getattr(_T, name, None)
        if hasattr(attribute, "__get__"):
            allowed.add(attribute.__get__)  # type: ignore[union-attr]
        if hasattr(attribute, "__set__"):
            allowed.add(attribute.__set__)  # type: ignore[union-attr]
    allowed.update(getattr(_T, name) for name in _METHODS if hasattr(_T, name))
    allowed.add(_T.grad.__delete__)  # type: ignore[union-attr]
    return frozenset(allowed)


METADATA = _metadata()
"""Functions that need no values, so a released parameter answers them."""


metadata_only = torch._C.DisableTorchFunctionSubclass
"""Inside, metadata of released parameters is read without the detour over Python. Nothing may read values there."""


def name_of(func: Callable[..., Any]) -> str:
    """What the user called, for messages: the attribute for its getter, else the function."""
    attribute = getattr(func, "__self__", None)
    is_getter = attribute is not None and not isinstance(attribute, ModuleType)
    return str(getattr(attribute if is_getter else func, "__name__", func))


class Owner(Protocol):
    """Who can bring a released parameter back."""

    def describe(self, param: nn.Parameter) -> str:
        """Name, unit and rank, for messages."""
        ...

    def touch(self, params: Sequence[nn.Parameter], func: Callable[..., Any]) -> None:
        """Make `params` readable for `func`, or raise ReleasedParameterError."""
        ...

    def is_whole(self, param: nn.Parameter) -> bool:
        """Whether its values rest whole on every rank, so that `touch` needs no other one's help."""
        ...


class ReleasedParameter(nn.Parameter):
    """The class of a parameter while its values rest in shards. See [Note: Released parameters]."""

    _onefold_owner: "ref[Owner]"  # weak: the owner holds its parameters

    def __new__(cls, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("parameters become ReleasedParameter by being released; there is nothing to construct")

    def __deepcopy__(self, memo: Any) -> Any:
        owner = owner_of(self)
        try:
            owner.touch([self], copy.deepcopy)  # whole weights may only be on their way
        except ReleasedParameterError as error:
            raise ReleasedParameterError(
                f"{owner.describe(self)} cannot be copied while its values rest in shards. Copy the model before "
                "onefold.shard (for an average of the weights, say), or copy weights inside "
                "`with onefold.gathered(model):`"
            ) from error
        return copy.deepcopy(self, memo)

    def detach(self) -> Tensor:
        owner_of(self).touch([self], Tensor.detach)
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            # It compares the class of what this returns with ours, which is a parameter's again.
            return nn.Parameter(self, requires_grad=False)
        return Tensor.detach(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            released = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ReleasedParameter)]
            if func in _TEXT and not owner_of(released[0]).is_whole(released[0]):
                return f"<released parameter {owner_of(released[0]).describe(released[0])}>"
            for param in released:
                owner_of(param).touch([param], func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def owner_of(param: nn.Parameter) -> Owner:
    """Who answers for a parameter of a sharded model.

    Raises:
        ReleasedParameterError: the model is gone.
    """
    owner: Owner | None = param.__dict__["_onefold_owner"]()
    if owner is None:
        raise ReleasedParameterError("this parameter's model was deleted, and its values with it")
    return owner


class ReducedGradient(Tensor):
    """Stands in `.grad` for a gradient that now lies, averaged, in shards. Its values are not here.

    Setting `.grad` to None, or `zero_grad()`, discards the gradient as usual.
    """

    @staticmethod
    def of(param: nn.Parameter, name: str) -> "ReducedGradient":
        """A stand-in for the gradient of `param`: same shape and dtype, one element of memory."""
        stand_in = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        gradient = stand_in.as_subclass(ReducedGradient)
        gradient._onefold_name = name  # type: ignore[attr-defined]
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # A compiler that describes a parameter describes its .grad too; it reads no values.
        if func in _GRADIENT_METADATA or TracingContext.try_get() is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        reduced = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ReducedGradient))
        name = getattr(reduced, "_onefold_name", "a parameter")
        if func in _TEXT:
            return f"<gradient of {name}, reduced into shards>"
        raise ReducedGradientError(
            f"the gradient of {name} is already reduced into shards, so {name_of(func)} cannot read "
            "it here. To clip, pass max_grad_norm= to the onefold optimizer (its .grad_norm is the global norm); to "
            "update, use an optimizer built by onefold after onefold.shard (onefold.AdamW(model, ...), or "
            "onefold.Elementwise for torch.optim classes); to read it, use `with onefold.gathered(model):`"
        )


_GRADIENT_METADATA = frozenset(
    {
        getattr(_T, name).__get__
        for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "ndim")
    }
    | {_T.size, _T.dim, _T.numel, _T.__hash__, _T.requires_grad_, _T.detach_}
)
