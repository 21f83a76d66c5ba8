"""Owns the choice of units: which module's parameters are gathered together.

Rules, in this order:
1. What `units=` names: classes, modules, or names (fnmatch patterns).
2. Else every element of an outermost homogeneous list (ModuleList or Sequential whose elements are of one class): the
   repeated blocks of a model.
3. Outside those, every large leaf module (embedding, output head); in a model without blocks, subtrees of a fair size.
4. A large parameter shared by several units is a unit of its own, gathered for each of the modules that hold it.
5. The rest is the root unit, gathered while the model runs.
Small neighbours are one unit then: fewer, larger gathers and reductions cost less.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise

import torch
from torch import nn

from onefold.engine.released import ReleasedParameter
from onefold.errors import ShardError

LARGE_NUMEL = 2**20
"""Below this a module is not worth a gather of its own."""
_FAIR_SHARE = 8
"""A model without blocks is cut into subtrees of at most one part in this many; small units are joined up to that."""
_ENOUGH_NUMEL = 2**24
"""With so many elements a reduction takes as long as its bytes do, not as its launch."""

UnitChoice = Iterable["type[nn.Module] | nn.Module | str"]


@dataclass(slots=True, kw_only=True)
class UnitSpec:
    """One unit to be: its name, the modules whose forward needs it, and its parameters by name."""

    name: str
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    parts: "list[UnitSpec]" = field(default_factory=list)
    """The units it was joined of, if it was."""

    @property
    def init_units(self) -> "list[UnitSpec]":
        """The units that its tensors are initialized as, if they are on the meta device: the same under every plan."""
        return self.parts or [self]


def discover(model: nn.Module, units: UnitChoice | None) -> list[UnitSpec]:
    """The units of `model`, root first, then in the order the model registers them.

    Raises:
        ShardError: `units` names nothing in the model, or a parameter cannot lie in a flat buffer.
    """
    for name, param in model.named_parameters():
        _check_param(name, param)
    for name, module in model.named_modules():
        _check_module(name, module)
    _check_apart(model)
    if units is not None and (isinstance(units, (str, nn.Module)) or not isinstance(units, Iterable)):
        units = [units]
    if units is None:
        blocks = list(_blocks("", model))
        chosen = blocks + list(_large(model, blocks))
    else:
        chosen = _named(model, list(units))
    order = {id(module): place for place, (_, module) in enumerate(model.named_modules())}
    chosen.sort(key=lambda item: order[id(item[1])])
    specs = [UnitSpec(name="", modules=[("", model)])]
    specs += [UnitSpec(name=name, modules=[(name, module)]) for name, module in chosen if module is not model]
    _assign(model, specs)
    return [spec for place, spec in enumerate(specs) if place == 0 or spec.params]


def join_small(specs: Sequence[UnitSpec]) -> list[UnitSpec]:
    """Units with small neighbours joined until they have enough elements.

    The same under every plan, so that plans sum the squares of the same ranges in the same order. At most an eighth of
    the model: little of it is gathered at once, and the first reductions begin well before backward ends.
    """
    least = min(_ENOUGH_NUMEL, _numel_of(specs) // _FAIR_SHARE)
    root, *others = specs
    joined: list[list[UnitSpec]] = []
    for spec in others:
        if joined and _numel_of(joined[-1]) < least and _numel_of([spec]) < least:
            joined[-1].append(spec)
        else:
            joined.append([spec])
    return [root, *(parts[0] if len(parts) == 1 else _joined(parts) for parts in joined)]


def _joined(parts: list[UnitSpec]) -> UnitSpec:
    return UnitSpec(
        name=f"{parts[0].name} to {parts[-1].name}",
        modules=[module for part in parts for module in part.modules],
        params=[param for part in parts for param in part.params],
        parts=parts,
    )


def _numel_of(specs: Sequence[UnitSpec]) -> int:
    return sum(param.numel() for spec in specs for _, param in spec.params)


def outside(model: nn.Module, specs: Sequence[UnitSpec]) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside the model and outside of every other unit that hold parameters, or modules that do."""
    borders = {module for spec in specs for _, module in spec.modules} - {model}
    for name, module in model.named_modules(borders):
        if module is not model and next(module.parameters(), None) is not None:
            yield name, module


def _assign(model: nn.Module, specs: list[UnitSpec]) -> None:
    """Give every parameter to the innermost unit around its module; shared ones by rule 4."""
    unit_at = {id(spec.modules[0][1]): spec for spec in specs}
    owners: dict[int, list[tuple[str, nn.Module, UnitSpec]]] = {}
    params: dict[int, tuple[str, nn.Parameter]] = {}

    def visit(name: str, module: nn.Module, spec: UnitSpec, seen: frozenset[int]) -> None:
        spec = unit_at.get(id(module), spec)
        for key, param in module._parameters.items():
            if param is not None:
                params.setdefault(id(param), (f"{name}.{key}".lstrip("."), param))
                owners.setdefault(id(param), []).append((name, module, spec))
        for key, child in module._modules.items():
            if child is not None and id(child) not in seen:
                visit(f"{name}.{key}".lstrip("."), child, spec, seen | {id(child)})

    visit("", model, specs[0], frozenset({id(model)}))
    for key, held in owners.items():
        name, param = params[key]
        home = held[0][2]
        if any(spec is not home for _, _, spec in held):
            home = specs[0]
            if param.numel() >= LARGE_NUMEL:
                modules = {id(module): (owner, module) for owner, module, _ in held}
                home = UnitSpec(name=" = ".join(owner for owner, _ in modules.values()), modules=list(modules.values()))
                specs.append(home)
        home.params.append((name, param))


def _named(model: nn.Module, units: Sequence["type[nn.Module] | nn.Module | str"]) -> list[tuple[str, nn.Module]]:
    found: dict[int, tuple[str, nn.Module]] = {}
    for choice in units:
        if not isinstance(choice, (str, nn.Module)) and not (
            isinstance(choice, type) and issubclass(choice, nn.Module)
        ):
            raise ShardError(f"units={choice!r}: choose by module class, module, or name pattern")
        matches = [(name, module) for name, module in model.named_modules() if _matches(choice, name, module)]
        if not matches:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise ShardError(f"units={choice!r} names no module of the model; its classes are {classes}")
        found.update({id(module): (name, module) for name, module in matches})
    return list(found.values())


def _matches(choice: "type[nn.Module] | nn.Module | str", name: str, module: nn.Module) -> bool:
    if isinstance(choice, str):
        return bool(name) and fnmatchcase(name, choice)
    return module is choice if isinstance(choice, nn.Module) else isinstance(module, choice)


def _blocks(name: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
    classes = {type(child) for _, child in children}
    has_params = all(next(child.parameters(), None) is not None for _, child in children)
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1 and len(classes) == 1 and has_params:
        yield from children
        return
    for child_name, child in children:
        yield from _blocks(child_name, child)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _large(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> Iterable[tuple[str, nn.Module]]:
    inside = {id(module) for _, block in blocks for module in block.modules()}
    if blocks:
        least = max(LARGE_NUMEL, max(_numel(block) for _, block in blocks) // 2)
        for name, module in model.named_modules():
            is_leaf = next(module.children(), None) is None
            if is_leaf and module is not model and id(module) not in inside and _numel(module) >= least:
                yield name, module
        return
    yield from _subtrees("", model, max(LARGE_NUMEL, _numel(model) // _FAIR_SHARE))


def _subtrees(name: str, module: nn.Module, most: int) -> Iterable[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        child_name, numel = f"{name}.{key}".lstrip("."), _numel(child)
        is_leaf = next(child.children(), None) is None
        if numel >= LARGE_NUMEL and (numel <= most or is_leaf):
            yield child_name, child
        elif numel > most:
            yield from _subtrees(child_name, child, most)


def _check_param(name: str, param: nn.Parameter) -> None:
    """Refuse parameters that cannot lie in a flat buffer.

    Raises:
        ShardError: naming the parameter and the way out.
    """
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ShardError(f"{name!r} has no shape yet (a lazy module): run one forward before onefold.shard")
    if param.layout != torch.strided or param.is_quantized:
        raise ShardError(
            f"{name!r} is not a plain dense tensor ({param.layout}, {param.dtype}); convert it before onefold.shard"
        )
    if param.is_complex() and param.requires_grad:
        raise ShardError(
            f"{name!r} is complex; hold its real and imaginary parts as real parameters (torch.view_as_real)"
        )
    if param.is_floating_point() and param.dtype.itemsize < 2 and param.requires_grad:
        raise ShardError(
            f"{name!r} is {param.dtype}, which is too coarse to be trained; freeze it (requires_grad_(False)), or hold "
            "it in bf16 or wider and let its module quantize it"
        )
    if hasattr(param, "placements"):
        raise ShardError(
            f"{name!r} is a DTensor: this version shards plain tensors only; call onefold.shard before it is "
            "distributed"
        )


def _check_module(name: str, module: nn.Module) -> None:
    """Refuse modules whose forward reads parameters where Python does not see it.

    Raises:
        ShardError: naming the module and the way out.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ShardError(
            f"{name or 'the model'!r} is a TorchScript module (torch.jit), which reads its parameters where they "
            "cannot be gathered; shard the module that it was scripted or traced from, and use torch.compile for speed"
        )


def _check_apart(model: nn.Module) -> None:
    """Refuse different parameters at one place in memory, and buffers that lie in a trained one: units would give each
    a place of its own, and they would part.

    Raises:
        ShardError: naming both.
    """
    params = sorted(_ranges(model.named_parameters()))
    for (_, end, other), (start, _, name) in pairwise(params):
        if start < end:
            raise ShardError(
                f"{other!r} and {name!r} are different parameters that share memory; to tie them, let both modules "
                "hold the same Parameter object (module.weight = other.weight)"
            )
    trained = sorted(_ranges((name, param) for name, param in model.named_parameters() if param.requires_grad))
    starts = [start for start, _, _ in trained]
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if not isinstance(buffer, nn.Parameter))
    for start, end, name in _ranges(buffers):
        nearest = bisect_left(starts, end) - 1
        if nearest >= 0 and start < trained[nearest][1]:
            raise ShardError(
                f"buffer {name!r} lies in the memory of parameter {trained[nearest][2]!r}, which moves when it is "
                "sharded: the buffer would stay as it is now. Let the forward read the parameter itself, or clone it "
                "into the buffer if it is to stay"
            )


def _ranges(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[int, int, str]]:
    """Where in memory tensors lie that fill a range of it: first byte, the one behind the last, name."""
    for name, tensor in named:
        if tensor.is_meta or isinstance(tensor, ReleasedParameter) or tensor.layout != torch.strided:
            continue
        if tensor.numel() and _is_dense(tensor):
            start = tensor.data_ptr()
            yield start, start + tensor.numel() * tensor.element_size(), name


def _is_dense(param: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory, in whatever order of dims."""
    numel = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size != 1 and stride != numel:
            return False
        numel *= size
    return True
