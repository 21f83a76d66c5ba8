"""Owns the proof that a sharded model's parameters are still those that were sharded, and where they were put.

A parameter that was moved, cast or replaced since has no place in the flat buffers: training would go on without it,
and what is saved would be old, silently. So every outermost forward, every step, and whoever reads or writes weights
looks first. One that was thawed, or added, has no place for gradients: forwards that record a graph refuse it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NoReturn

from torch import nn

from onefold.engine.flat import Flat
from onefold.engine.released import metadata_only
from onefold.engine.unit import Unit
from onefold.errors import ShardError

_MOVED = (
    "was moved or cast after onefold.shard (model.to, .half, .cuda, or an assignment to .data); do that before "
    "sharding, or choose dtypes with precision="
)
_REPLACED = (
    "was replaced after onefold.shard (load_state_dict(assign=True), or an assignment to the module's attribute); copy "
    "values into it inside `with onefold.gathered(model, write=True):`, or change the model before sharding"
)
_THAWED = (
    "was frozen when onefold.shard was called and requires a gradient now, but has no place for gradients and "
    "optimizer state. To train it later, let it require gradients when the model is sharded and freeze it afterwards "
    "with requires_grad_(False)"
)


class Bound:
    """What must stay true of a sharded model's parameters."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], describe: Callable[[nn.Parameter], str]) -> None:
        self._model = model
        self._describe = describe
        self._flats: list[Flat] = [flat for unit in units for flat in unit.flats]
        self._tree = _Tree(model)
        self._frozen = [param for flat in self._flats if flat.trained is None for param in flat.params]
        self._managed = managed = {id(param) for flat in self._flats for param in flat.params}
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = [
            (module._parameters, key, param)
            for module in model.modules()
            for key, param in module._parameters.items()
            if id(param) in managed and param is not None
        ]

    def check(self, is_recorded: bool = False) -> None:
        """Raise if a parameter is not where `shard` put it, or, where a forward `is_recorded`, would not be trained.

        Raises:
            ShardError: naming the parameter, what happened to it, and the way out.
        """
        is_changed = not self._tree.is_unchanged()
        if is_changed:
            self._check_replaced()
        with metadata_only():
            moved = next(
                (
                    param
                    for flat in self._flats
                    for param in flat.params
                    if param.untyped_storage()._cdata != flat.buffer.storage_id
                ),
                None,
            )
            thawed = next((param for param in self._frozen if param.requires_grad), None) if is_recorded else None
        if moved is not None:
            self._refuse(moved, _MOVED)
        if thawed is not None:
            self._refuse(thawed, _THAWED)
        if is_changed and is_recorded:
            self._check_added()

    def _check_replaced(self) -> None:
        for parameters, key, param in self._places:
            if parameters.get(key) is not param:
                self._refuse(param, _REPLACED)

    def _check_added(self) -> None:
        added = next(self._added(), None)
        if added is not None:
            name = next(name for name, param in self._model.named_parameters() if param is added)
            raise ShardError(
                f"{name!r} came into the model after onefold.shard (a new module, an adapter, a replaced head) and "
                "would be trained by nobody; change the model first, then shard it, or freeze what was added"
            )

    def _added(self) -> Iterator[nn.Parameter]:
        seen, left = {id(self._model)}, [self._model]
        while left:
            module = left.pop()
            for param in module._parameters.values():
                if param is not None and id(param) not in self._managed and param.requires_grad:
                    yield param
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    left.append(child)

    def _refuse(self, param: nn.Parameter, why: str) -> NoReturn:
        raise ShardError(f"{self._describe(param)} {why}")


class _Tree:
    """What every module of a model holds as it is now. To compare with that takes a fraction of the time of looking
    through it, and is done before every forward; so it is done without a line of Python for each module."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [vars(module) for module in model.modules()]
        self._dicts = list(self._find_dicts())
        self._lengths = list(map(len, self._dicts))
        self._filled = list(filter(None, self._dicts))
        self._held = list(self._find_held())

    def is_unchanged(self) -> bool:
        return (
            all(map(is_, self._find_dicts(), self._dicts))
            and list(map(len, self._dicts)) == self._lengths
            and all(map(is_, self._find_held(), self._held))
        )

    def _find_dicts(self) -> Iterator[dict[str, Any]]:
        return chain(map(_PARAMETERS, self._attributes), map(_CHILDREN, self._attributes))

    def _find_held(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._filled))


_PARAMETERS, _CHILDREN = itemgetter("_parameters"), itemgetter("_modules")
