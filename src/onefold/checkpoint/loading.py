"""Owns `load`: which checkpoint is meant, whether it fits, and where its values go."""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from onefold.agree import together
from onefold.checkpoint.bar import bar
from onefold.checkpoint.codec import decode, dtype_of
from onefold.checkpoint.contents import several
from onefold.checkpoint.directory import candidates
from onefold.checkpoint.entries import buffer_entries, kept_entries, persistent_buffers, updates_of
from onefold.checkpoint.files import Files
from onefold.checkpoint.plans import EntryLoadPlanner
from onefold.checkpoint.saving import alone_is_fine, as_ours, failure
from onefold.checkpoint.storage import Reader
from onefold.ema import EMA
from onefold.errors import CheckpointError, OptimizerError
from onefold.optimizer import Optimizer
from onefold.session import Session


def load(session: Session, path: Path, job: "Job", rest: Callable[[Reader], Any]) -> Any:
    """Let `job` read the checkpoint that `path` means, then `rest` what it returns; see `onefold.load`."""
    session.wait_for_readers()
    agree = partial(together, session.comm, kind=CheckpointError, did="could not load")
    agree(partial(as_ours, session.wait_for_saves))
    paths, passed = agree(partial(as_ours, lambda: candidates(path)))
    for index, candidate in enumerate(paths):
        try:
            reader = job.run(candidate)
        except _Damaged as error:
            if index + 1 == len(paths):
                raise CheckpointError(str(error)) from error
            passed.append(f"{candidate.name} ({error})")
            continue
        if passed and session.comm.rank == 0:
            logging.getLogger("onefold").warning("loading %s; passed over: %s", candidate, "; ".join(passed))
        return agree(partial(as_ours, partial(rest, reader)))
    raise CheckpointError(f"there is no checkpoint {path}")


class _Damaged(CheckpointError):
    """The checkpoint is not whole; an older one may be."""


class Job:
    """Reads a checkpoint into a model and its optimizer."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: Optimizer | None,
        ema: EMA | None,
        files: Files,
        progress: bool,
    ) -> None:
        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._ema = ema
        self._files = files
        self._progress = progress

    def run(self, path: Path) -> Reader:
        """Read one checkpoint into model and optimizer."""
        session = self._session
        agree = partial(together, session.comm, did="could not load")
        reader: Reader = agree(partial(as_ours, lambda: self._open(path), kind=_Damaged), kind=_Damaged)
        agree(partial(as_ours, lambda: self._check(reader)), kind=CheckpointError)
        session.runtime.settle()
        session.runtime.catch_up()
        entries = [*kept_entries(session, self._optimizer, self._ema), *buffer_entries(self._model)]
        total = sum((entry.stop - entry.start) * entry.dtype.itemsize for entry in entries)
        group = session.comm.side_group()
        with bar(f"loading {path.name}", total, self._progress and session.comm.rank == 0) as advance:
            reader.progress = advance
            try:
                with alone_is_fine():
                    dcp_load({}, storage_reader=reader, planner=EntryLoadPlanner(entries), process_group=group)
            except BaseException as error:
                told = failure(error, f"reading {path} failed, and the model holds part of it", session.comm.rank)
                raise (_Damaged(str(told)) if isinstance(told, CheckpointError) else told) from error
            finally:
                reader.close()
        for unit in session.runtime.units:
            unit.show_stored(unit.flats)
        self._take_optimizer(reader.shared)
        session.scaler.load_state_dict(_scaler_state(session, reader.shared))
        return reader

    def _open(self, path: Path) -> Reader:
        reader = Reader(path, self._files)
        if self._session.comm.rank == 0:
            reader.check_sizes()
        return reader

    def _check(self, reader: Reader) -> None:
        """Compare names and shapes, and make room for state.

        Raises:
            CheckpointError: naming the first that differ.
        """
        shared, where = reader.shared, reader.directory
        flats = [flat for unit in self._session.runtime.units for flat in unit.flats]
        mine = {n: tuple(s.shape) for flat in flats for n, s in zip(flat.names, flat.layout.slots, strict=True)}
        _compare(where, "parameter", mine, {name: tuple(saved["shape"]) for name, saved in shared["params"].items()})
        buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(self._model).items()}
        _compare(where, "buffer", buffers, {name: tuple(shape) for name, shape in shared["buffers"].items()})
        if self._ema is not None and not shared["has_ema"]:
            raise CheckpointError(
                f"{where} was saved without an EMA; make one after loading: it starts from the weights"
            )
        if self._optimizer is None:
            return
        if shared["optimizer"] is None:
            raise CheckpointError(f"{where} was saved without an optimizer: load(path, model) takes its weights")
        dtypes = _state_dtypes(reader)
        for update in updates_of(self._optimizer).values():
            try:
                update.expect({slot: dtypes.get(name, {}) for slot, name in enumerate(update.flat.names)})
            except OptimizerError as error:
                raise CheckpointError(
                    f"{where} does not fit: {error}. load(path, model) takes its weights alone"
                ) from error
        self._hyper_parameters(shared["optimizer"], where)

    def _hyper_parameters(self, saved: Mapping[str, Any], where: Path) -> list[dict[str, Any]]:
        """What each of the optimizer's groups takes over."""
        if self._optimizer is None:
            return []
        hyper_of = {name: decode(group["hyper"]) for group in saved["groups"] for name in group["params"]}
        names = self._names()
        found = []
        for index, group in enumerate(self._optimizer.param_groups):
            theirs = [hyper_of.get(names[id(param)]) for param in group["params"]]
            if any(each != theirs[0] for each in theirs) or (theirs and theirs[0] is None):
                odd = next(
                    p for p, each in zip(group["params"], theirs, strict=True) if each is None or each != theirs[0]
                )
                raise CheckpointError(
                    f"{where} has other parameter groups: {names[id(odd)]!r} of group {index} was "
                    f"{'in no group' if hyper_of.get(names[id(odd)]) is None else 'in another one'} when it was saved"
                )
            found.append((theirs[0] if theirs else None) or {})
        return found

    def _names(self) -> dict[int, str]:
        flats = [flat for unit in self._session.runtime.units for flat in unit.flats]
        return {id(param): name for flat in flats for name, param in zip(flat.names, flat.params, strict=True)}

    def _take_optimizer(self, shared: Mapping[str, Any]) -> None:
        if self._optimizer is None:
            return
        saved = shared["optimizer"]
        for group, hyper in zip(self._optimizer.param_groups, self._hyper_parameters(saved, Path()), strict=True):
            group.update(hyper)
        for update in updates_of(self._optimizer).values():
            names = enumerate(update.flat.names)
            scalars = {slot: decode(saved["scalars"][name]) for slot, name in names if name in saved["scalars"]}
            update.take_scalars(scalars)
        self._optimizer.num_updates = saved["num_updates"]


def _compare(where: Path, what: str, mine: Mapping[str, Sequence[int]], theirs: Mapping[str, Sequence[int]]) -> None:
    missing, unknown = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if missing or unknown:
        name = (missing or unknown)[0]
        near = get_close_matches(name, unknown if missing else missing, n=1)
        raise CheckpointError(
            f"{where} does not fit the model: {len(missing)} of its {what}s are not in the checkpoint and "
            f"{len(unknown)} of the checkpoint's are not in the model, first {name!r}"
            f"{f' (did you mean {near[0]!r}?)' if near else ''}"
        )
    for name, shape in mine.items():
        if shape != theirs[name]:
            raise CheckpointError(
                f"{where} does not fit the model: {what} {name!r} has shape {theirs[name]} in the checkpoint and "
                f"{shape} in the model"
            )


def _state_dtypes(reader: Reader) -> dict[str, dict[str, torch.dtype]]:
    tensors = reader.shared["tensors"]
    return {
        name: {state: dtype_of(tensors[f"optimizer.{state}.{name}"]["dtype"]) for state in states}
        for name, states in reader.shared["optimizer"]["states"].items()
    }


def _scaler_state(session: Session, shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved loss scale where it is of the kind that is used now, else the one that is used now."""
    saved, mine = decode(shared["scaler"]), session.scaler.state_dict()
    return saved if saved.keys() == mine.keys() else mine


def take_rest(session: Session, reader: Reader, *, scheduler: Any, loader: Any, random_states: bool) -> Any:
    """Schedulers, data loader, random states; returns the extra."""
    shared, rank = reader.shared, session.comm.rank
    schedulers = several(scheduler)
    if schedulers and len(schedulers) != len(shared["schedulers"]):
        raise CheckpointError(f"{reader.directory} holds {len(shared['schedulers'])} schedulers, not {len(schedulers)}")
    for each, state in zip(schedulers, shared["schedulers"], strict=False):
        each.load_state_dict(decode(state))
    if loader is not None:
        if reader.num_ranks != session.comm.num_ranks:
            raise CheckpointError(
                f"{reader.directory} was saved by {reader.num_ranks} ranks, and this is one of "
                f"{session.comm.num_ranks}: the place in each rank's data cannot be carried over. Load without loader="
            )
        state = reader.own(rank)["loader"]
        if state is None:
            raise CheckpointError(f"{reader.directory} was saved without the state of a data loader")
        loader.load_state_dict(decode(state))
    if random_states and rank < reader.num_ranks:
        states = decode(reader.own(rank)["random"])
        if states is not None:  # a checkpoint that was imported has none
            _take_random(session.device, states)
    try:
        return decode(shared["extra"], partial(_extra_tensor, reader))
    finally:
        reader.close()


def _extra_tensor(reader: Reader, key: str) -> Tensor:
    empty = reader.shared["empty"].get(key)
    return reader.tensor(key) if empty is None else torch.empty(empty[0], dtype=dtype_of(empty[1]))


def _take_random(device: torch.device, states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    random.setstate(states["python"])
    if states["numpy"] is not None:
        import numpy

        numpy.random.set_state(states["numpy"])
