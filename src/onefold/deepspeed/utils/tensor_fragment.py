"""DeepSpeed's module `utils.tensor_fragment`: owns `safe_get_*` and `safe_set_*`, for gradients, exact weights and
optimizer state of single parameters.

Those that say `full` are collectives: every rank calls them, with the same values. Those that say `local` see the
elements that this rank keeps: 1-D, of any number, none included. All are called between backward and the next step, or
between steps.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from onefold.checkpoint.entries import Entry, param_entries
from onefold.engine.flat import Flat
from onefold.engine.session import Session, owner_session
from onefold.engine.unit import Unit
from onefold.errors import OnefoldError
from onefold.setup.gathered import gathered


class _Fragment:
    """A parameter of a sharded model, and what this rank keeps of it."""

    def __init__(self, param: nn.Parameter, session: Session, what: str) -> None:
        session.come_to_rest(what)
        self.param = param
        self.session = session
        self.unit, self.flat, self.slot = self._find()

    def _find(self) -> tuple[Unit, Flat, int]:
        for unit in self.session.runtime.units:
            for flat in unit.flats:
                for slot, each in enumerate(flat.params):
                    if each is self.param:
                        return unit, flat, slot
        raise OnefoldError(f"a parameter {list(self.param.shape)} is not of the model that it was sharded with")

    def entries(self, state: str | None) -> list[Entry]:
        """What this rank keeps of the exact weights (None), or of one optimizer state."""
        name = self.flat.names[self.slot]
        key = f"model.{name}" if state is None else f"optimizer.{state}.{name}"
        optimizer = self.session.optimizer()
        return [each for each in param_entries(self.flat, self.slot, optimizer) if each.key == key]

    def own(self, state: str | None) -> Iterator[tuple[int, Tensor]]:
        """Where in the parameter this rank's shard begins, and its values (1-D)."""
        slot = self.flat.layout.slots[self.slot]
        low, high = (edge - slot.start for edge in self.flat.layout.shard_range(self.session.comm.shard))
        for entry in self.entries(state):
            start, stop = max(entry.start, low), min(entry.stop, high)
            if start < stop:
                yield start, entry.read(start, stop)

    def whole(self, pieces: Sequence[tuple[int, Tensor]]) -> Tensor | None:
        """Every rank's pieces put together; None if no rank has any."""
        mine = [(start, values.detach().to("cpu", copy=True)) for start, values in pieces]
        found = [piece for theirs in self.session.comm.exchange_objects(mine) for piece in theirs]
        if not found:
            return None
        flat = torch.empty(self.param.numel(), dtype=found[0][1].dtype)
        for start, values in found:
            flat[start : start + len(values)] = values
        return flat.view(self.param.shape).to(self.session.device)

    def write(self, state: str | None, write: Callable[[Entry], None]) -> None:
        """Change what this rank keeps, and what is computed with."""
        self.session.wait_for_readers()
        entries = self.entries(state)
        if not any(self.session.comm.exchange_objects(bool(entries))):
            raise OnefoldError(f"{self.flat.names[self.slot]} has no {'weights' if state is None else state!r} to set")
        self.flat.arrival.wait_on_host()
        for entry in entries:
            write(entry)
        if state is None:
            self.unit.show_stored([self.flat])


def _fragment(param: nn.Parameter, what: str) -> _Fragment | None:
    """The fragment of a parameter; None where it is not sharded."""
    session = owner_session(param)
    return None if session is None else _Fragment(param, session, what)


def _sharded(param: nn.Parameter, what: str) -> _Fragment:
    fragment = _fragment(param, what)
    if fragment is None:
        raise OnefoldError(f"{what} needs a parameter of a model that deepspeed.initialize returned")
    return fragment


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The exact weights of a parameter, whole; None if its model is not sharded."""
    fragment = _fragment(param, "safe_get_full_fp32_param")
    found = None if fragment is None else fragment.whole(list(fragment.own(None)))
    return None if found is None else found.to(torch.promote_types(found.dtype, torch.float32))


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the exact weights of a parameter, and with them those that it computes with.

    Args:
        value: in the parameter's shape; the same on every rank.
    Raises:
        OnefoldError: the model is not sharded, or the shape is another.
    """
    fragment = _sharded(param, "safe_set_full_fp32_param")
    _set_full(fragment, None, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """One optimizer state (such as "exp_avg") of a parameter, whole; None if there is none (yet)."""
    fragment = _fragment(param, "safe_get_full_optimizer_state")
    return None if fragment is None else fragment.whole(list(fragment.own(optim_state_key)))


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set one optimizer state of a parameter. Arguments and errors as for `safe_set_full_fp32_param`; also an
    OnefoldError if the optimizer has no such state."""
    fragment = _sharded(param, "safe_set_full_optimizer_state")
    _set_full(fragment, optim_state_key, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient of a parameter, whole, averaged over the ranks and unscaled; None where none is pending."""
    if owner_session(param) is None:
        return param.grad
    with gathered(param):
        return None if param.grad is None else param.grad.detach().clone()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the pending gradient of a parameter: what the next step uses.

    Raises:
        OnefoldError: no gradient is pending.
    """
    safe_update_full_grad_vectorized([param], lambda _, __: value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the pending gradient of each parameter by `update_func(gradient, parameter)`.

    Raises:
        OnefoldError: no gradient is pending.
    """
    params = [param for param in param_list if param.requires_grad]
    if not params:
        return
    with gathered(params):
        for param in params:
            if param.grad is None:
                raise OnefoldError(f"a parameter {list(param.shape)} has no gradient to set: call backward first")
            param.grad.copy_(update_func(param.grad.clone(), param))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """The exact weights that this rank keeps of a parameter whose weights rest in shards."""
    return _joined(_local(param, "safe_get_local_fp32_param").own(None), param)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the exact weights that this rank keeps; `value` as `safe_get_local_fp32_param` gives it. Every rank calls
    it."""
    _set_local(_local(param, "safe_set_local_fp32_param"), None, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor:
    """One optimizer state of the elements that this rank keeps."""
    return _joined(_local(param, "safe_get_local_optimizer_state").own(optim_state_key), param)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set one optimizer state of the elements that this rank keeps. Every rank calls it."""
    _set_local(_local(param, "safe_set_local_optimizer_state"), optim_state_key, value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """The pending gradient of the elements that this rank keeps; None where none is pending. Every rank calls it."""
    fragment = _local(param, "safe_get_local_grad")
    whole = safe_get_full_grad(param)
    start, stop = _range(fragment)
    return None if whole is None else whole.view(-1)[start:stop]


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the pending gradient of the elements that this rank keeps. Every rank calls it."""
    fragment = _local(param, "safe_set_local_grad")
    start, stop = _range(fragment)
    _check_size(fragment, value, stop - start)
    whole = fragment.whole([(start, value.reshape(-1))] if stop > start else [])
    if whole is not None:
        safe_set_full_grad(param, whole)


def _range(fragment: _Fragment) -> tuple[int, int]:
    """The elements of a parameter that are in this rank's shard."""
    slot = fragment.flat.layout.slots[fragment.slot]
    low, high = fragment.flat.layout.shard_range(fragment.session.comm.shard)
    start = min(max(low, slot.start), slot.stop)
    return start - slot.start, max(start, min(high, slot.stop)) - slot.start


def _local(param: nn.Parameter, what: str) -> _Fragment:
    fragment = _sharded(param, what)
    if not fragment.session.plan.params.partitioned:
        raise OnefoldError(f"{what}: the weights rest whole on every rank; call it under stage 3, or the full one")
    return fragment


def _joined(pieces: Iterator[tuple[int, Tensor]], param: nn.Parameter) -> Tensor:
    values = [values.detach().clone() for _, values in pieces]
    return torch.cat(values) if values else torch.empty(0, device=param.device)


def _check_size(fragment: _Fragment, value: Tensor, numel: int) -> None:
    if value.numel() != numel:
        raise OnefoldError(f"{fragment.flat.names[fragment.slot]}: got {value.numel()} values for {numel} elements")


def _set_full(fragment: _Fragment, state: str | None, value: Tensor) -> None:
    if value.shape != fragment.param.shape:
        raise OnefoldError(
            f"{fragment.flat.names[fragment.slot]} is {list(fragment.param.shape)}; the values are {list(value.shape)}"
        )
    flat = value.detach().reshape(-1)
    fragment.write(state, lambda entry: entry.write(entry.start, flat[entry.start : entry.stop]))


def _set_local(fragment: _Fragment, state: str | None, value: Tensor) -> None:
    start, stop = _range(fragment)
    _check_size(fragment, value, stop - start)
    flat = value.detach().reshape(-1)
    fragment.write(state, lambda entry: entry.write(entry.start, flat[entry.start - start : entry.stop - start]))
