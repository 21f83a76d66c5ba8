"""Owns what a model's tensors are called in files of weights.

The names are those of `state_dict`. A tied parameter has several; one of them is written, and any of them is read. The
conventions of Hugging Face models (which of several names is kept, which prefix may be missing) are read from the
attributes that such models have; a model without them is as good.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from onefold.errors import WeightsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A parameter or persistent buffer, and all its names, in the order the model registers them."""

    tensor: Tensor
    names: tuple[str, ...]
    is_param: bool


def named_tensors(model: nn.Module) -> list[Named]:
    """Every parameter and persistent buffer of a model of which nothing else has to be kept.

    Raises:
        WeightsError: a module keeps state that is no tensor.
    """
    for prefix, module in modules_with_more(model).items():
        raise WeightsError(
            f"module {prefix!r} ({type(module).__name__}) has extra state (get_extra_state), which files of "
            "weights cannot hold; make it a buffer"
        )
    return all_tensors(model)


def modules_with_more(model: nn.Module) -> dict[str, nn.Module]:
    """Modules, by name, that keep state beside tensors: those with a `get_extra_state` of their own."""
    return {
        clean(prefix): module
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def clean(name: str) -> str:
    """A name without what `torch.compile` adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def all_tensors(model: nn.Module) -> list[Named]:
    """Every parameter and persistent buffer of `model` once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, tuple[Tensor, bool]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor, is_param in _own(module):
            tensors.setdefault(id(tensor), (tensor, is_param))
            names.setdefault(id(tensor), []).append(clean(f"{prefix}.{key}".lstrip(".")))
    return [
        Named(tensor=tensor, names=tuple(names[key]), is_param=is_param) for key, (tensor, is_param) in tensors.items()
    ]


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for key, param in module._parameters.items():
        if param is not None:
            yield key, param, True
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield key, buffer, False


def written_names(model: nn.Module, named: Named) -> tuple[str, ...]:
    """The names under which a tensor is written: one, or none if the model does not want it saved.

    A Hugging Face model says which names it ties to others itself, by its configuration; those are left out. Names that
    were tied behind its back are all written, since `from_pretrained` would not find them.
    """
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    tied: Mapping[str, str] | None = getattr(model, "all_tied_weights_keys", None)
    names = [name for name in named.names if name not in ignored]
    if tied is None:
        return tuple(names[:1])
    return tuple(name for name in names if name not in tied) or tuple(names[:1])


class Matching:
    """Which stored tensor is which tensor of the model.

    A name is looked for as it is, and without and with the model's `base_model_prefix`, as transformers does: so a
    model with a head takes what was saved without one, and the other way round. Old names of layer norms are known too.

    Attributes:
        pairs: each tensor of the model that is there, with its name in the files.
        missing: names of tensors of the model that are not.
        unexpected: names in the files that the model has no place for.
    """

    def __init__(self, model: nn.Module, tensors: Collection[Named], stored: Collection[str]) -> None:
        self._prefix = str(getattr(model, "base_model_prefix", "") or "")
        known = {name: tensor for tensor in tensors for name in tensor.names}
        here: dict[int, list[tuple[int, str]]] = {}
        self.unexpected: list[str] = []
        ignored = _patterns(model, "_keys_to_ignore_on_load_unexpected")
        for name in sorted(stored):
            tensor, own_name = next(
                ((known[each], each) for each in self._spellings(name) if each in known), (None, "")
            )
            if tensor is not None:
                rank = 0 if own_name in written_names(model, tensor) else 1  # copies that were tied count less
                here.setdefault(id(tensor), []).append((rank, name))
            elif not any(pattern.search(name) for pattern in ignored):
                self.unexpected.append(name)
        self._conversion = _CONVERSION if hasattr(model, "all_tied_weights_keys") else ""
        self.pairs = [(tensor, min(here[id(tensor)])[1]) for tensor in tensors if id(tensor) in here]
        may_lack = _patterns(model, "_keys_to_ignore_on_load_missing")
        self.missing = [
            tensor.names[0]
            for tensor in tensors
            if id(tensor) not in here and not any(p.search(name) for p in may_lack for name in tensor.names)
        ]

    def _spellings(self, name: str) -> list[str]:
        prefix = f"{self._prefix}."
        for old, new in _OLD_NAMES.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        return [name] if prefix == "." else [name, name.removeprefix(prefix), prefix + name]

    def advice(self) -> str:
        """What the names that did not match may have been meant for; "" if nothing is near."""
        for missing in self.missing:
            for other in self.unexpected:
                longer, shorter = (missing, other) if len(missing) > len(other) else (other, missing)
                if longer.endswith(f".{shorter}"):
                    where = "the model's names" if longer is missing else "the files' names"
                    return f"; {where} begin with {longer.removesuffix(shorter)!r} and the others do not: {_WAY_OUT}"
            near = get_close_matches(missing, self.unexpected, n=1)
            if near:
                return f"; for {missing!r}, did you mean {near[0]!r}?{self._conversion}"
        return self._conversion if self.missing and self.unexpected else ""


_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_WAY_OUT = "load into the module that has the others, or rename the tensors in the files"

_CONVERSION = (
    " (transformers renames or merges the tensors of some models as it loads them: write the files once more with "
    "model.save_pretrained(directory, save_original_format=False))"
)


def _patterns(model: nn.Module, attribute: str) -> list[re.Pattern[str]]:
    found: Any = getattr(model, attribute, None)
    return [re.compile(pattern) for pattern in found or ()]
