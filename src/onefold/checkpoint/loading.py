"""Owns `load`: which checkpoint is meant, whether it fits, and where its values go."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from onefold.checkpoint.bar import bar
from onefold.checkpoint.codec import decode, dtype_of
from onefold.checkpoint.contents import check_given, check_same, several
from onefold.checkpoint.directory import Damaged, Found, candidates, next_candidate, tell_passed
from onefold.checkpoint.entries import Entry, buffer_entries, kept_entries, param_names, persistent_buffers
from onefold.checkpoint.files import Files
from onefold.checkpoint.manifest import OWN, SHARED, file_of, understood
from onefold.checkpoint.plans import EntryLoadPlanner
from onefold.checkpoint.saving import as_ours
from onefold.checkpoint.storage import Reader
from onefold.checkpoint.writing import alone_is_fine, failure
from onefold.comm.agreement import together
from onefold.comm.comm import Comm
from onefold.engine.session import Session
from onefold.errors import CheckpointError, OptimizerError
from onefold.files.names import modules_with_more
from onefold.optim.ema import EMA
from onefold.optim.optimizer import Optimizer
from onefold.optim.update import FlatUpdate


def load(session: Session, path: Path, job: "Job", rest: "Rest") -> Any:
    """Let `job` read the checkpoint that `path` means, and `rest` take what else is in it; see `onefold.load`."""
    session.come_to_rest("onefold.load")
    session.wait_for_readers()
    agree = partial(together, session.comm, kind=CheckpointError, did="could not load")
    agree(partial(as_ours, session.wait_for_saves))
    job.check()
    damaged: dict[Found, Damaged] = {}
    while True:
        # What rank 0 sees counts: others may see a directory that changes at another moment. It is looked at again for
        # each attempt: another run may have removed or replaced a checkpoint meanwhile, and left a newer one.
        found, passed = session.comm.exchange_objects(agree(partial(as_ours, lambda: candidates(path))))[0]
        candidate, passed = next_candidate(found, passed, damaged)
        try:
            read = job.run(candidate.path, rest)
        except Damaged as error:
            damaged[candidate] = error
            continue
        if session.comm.rank == 0:
            tell_passed("loading", candidate.path, passed)
        return agree(partial(as_ours, partial(rest.take, session, read)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What is read beside the tensors of model and optimizer, decoded."""

    reader: Reader
    own: Mapping[str, Any]
    """Of the rank of this number when it was saved; empty if there was none."""
    schedulers: Sequence[Mapping[str, Any]]
    module_states: Mapping[str, Any] | None
    """What modules keep beside tensors, by their names; None if that is not known."""
    extra: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What `load` was given to fill beside model and optimizer."""

    scheduler: Any
    loader: Any
    random_states: bool

    def check(self, read: Read, comm: Comm) -> None:
        """Whether the checkpoint has what is asked for, before anything is changed.

        Raises:
            CheckpointError: it has not.
        """
        where, have, want = read.reader.directory, len(read.schedulers), len(several(self.scheduler))
        if want and want != have:
            raise CheckpointError(f"{where} holds the state of {have} schedulers, not {want}")
        if self.loader is not None and read.reader.num_ranks != comm.num_ranks:
            raise CheckpointError(
                f"{where} was saved by {read.reader.num_ranks} ranks, and this is one of {comm.num_ranks}: the place "
                "in each rank's data cannot be carried over. Load without loader="
            )
        if self.loader is not None and read.own.get("loader") is None:
            raise CheckpointError(f"{where} was saved without the state of a data loader")

    def take(self, session: Session, read: Read) -> Any:
        """Schedulers, data loader, random states; returns the extra."""
        where = read.reader.directory
        for index, (each, state) in enumerate(zip(several(self.scheduler), read.schedulers, strict=False)):
            with _taking(where, f"scheduler {index}"):
                each.load_state_dict(state)
        if self.loader is not None:
            with _taking(where, "the loader"):
                self.loader.load_state_dict(decode(read.own["loader"]))
        if self.random_states and read.own.get("random") is not None:  # a checkpoint that was imported has none
            own = where / file_of(session.comm.rank, OWN)
            understood(own, lambda: _take_random(session.device, decode(read.own["random"])))
        return read.extra


class Job:
    """Reads a checkpoint into a model and its optimizer."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: Optimizer | None,
        ema: EMA | None,
        files: Files,
        strict: bool,
        progress: bool,
    ) -> None:
        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._ema = ema
        self._files = files
        self._strict = strict
        self._progress = progress

    def check(self) -> None:
        """Whether it can be done at all.

        Raises:
            CheckpointError: on every rank, if not on any.
        """
        given = (self._session, self._optimizer, self._ema)
        together(self._session.comm, partial(check_given, *given), kind=CheckpointError, did="could not load")
        check_same(*given)

    def run(self, path: Path, rest: Rest) -> Read:
        """Read one checkpoint into model and optimizer."""
        session = self._session
        agree = partial(together, session.comm, did="could not load")
        with ExitStack() as stack:
            reader: Reader = agree(partial(as_ours, lambda: self._open(path), kind=Damaged), kind=Damaged)
            stack.callback(reader.close)
            read: Read = agree(partial(as_ours, lambda: self._beside(reader), kind=Damaged), kind=Damaged)
            agree(partial(as_ours, lambda: self._check(reader, read)), kind=CheckpointError)
            agree(partial(as_ours, lambda: rest.check(read, session.comm)), kind=CheckpointError)
            for update, saved in self._states(reader):
                update.make_room(saved)
            self._tensors(reader)
        for unit in session.runtime.units:
            unit.show_stored(unit.flats)
        agree(partial(as_ours, lambda: understood(path / SHARED, lambda: self._take(reader.shared))))
        agree(partial(as_ours, lambda: self._take_module_states(read)))
        return read

    def _tensors(self, reader: Reader) -> None:
        entries = self._wanted(reader)
        total = sum(entry.nbytes for entry in entries)
        path, comm = reader.directory, self._session.comm
        with bar(f"loading {path.name}", total, self._progress and comm.rank == 0) as advance:
            reader.progress = advance
            try:
                with alone_is_fine():
                    dcp_load(
                        {},
                        storage_reader=reader,
                        planner=EntryLoadPlanner(entries),
                        process_group=comm.control_group(),
                    )
            except BaseException as error:
                told = failure(error, f"reading {path} failed, and the model holds part of it", comm.rank)
                raise (Damaged(str(told)) if _is_damage(error) else told) from error

    def _wanted(self, reader: Reader) -> list[Entry]:
        """What is to be read; unless strict, of weights and buffers those that are there."""
        entries = [
            *kept_entries(self._session, self._optimizer, self._ema),
            *buffer_entries(persistent_buffers(self._model)),
        ]
        if self._strict:
            return entries
        params, buffers = understood(reader.directory / SHARED, lambda: _shapes(reader.shared))
        there = {*(f"model.{name}" for name in params), *(f"buffer.{name}" for name in buffers)}
        return [each for each in entries if not each.key.startswith(("model.", "buffer.")) or each.key in there]

    def _open(self, path: Path) -> Reader:
        reader = Reader(path, self._files)
        if self._session.comm.rank == 0:
            reader.check_sizes()
        return reader

    def _beside(self, reader: Reader) -> Read:
        """Whatever is no tensor of model or optimizer: damage to it has to be known before anything is changed."""
        shared, rank = reader.shared, self._session.comm.rank
        path = reader.directory / SHARED
        return Read(
            reader=reader,
            own=reader.own(rank) if rank < reader.num_ranks else {},
            schedulers=understood(path, lambda: [decode(state) for state in shared["schedulers"]]),
            module_states=understood(path, lambda: _module_states(reader)),
            extra=understood(path, lambda: decode(shared["extra"], reader.tensor)),
        )

    def _take(self, shared: Mapping[str, Any]) -> None:
        self._take_optimizer(shared)
        self._session.scaler.load_state_dict(_scaler_state(self._session, shared))

    def _take_module_states(self, read: Read) -> None:
        modules = modules_with_more(self._model)
        for name, state in (read.module_states or {}).items():
            if name in modules:
                with _taking(read.reader.directory, f"module {name!r}"):
                    modules[name].set_extra_state(state)

    def _check(self, reader: Reader, read: Read) -> None:
        """Compare names and shapes, and make room for state.

        Raises:
            CheckpointError: naming the first that differ.
        """
        where = reader.directory
        params, buffers = understood(where / SHARED, lambda: _shapes(reader.shared))
        flats = [flat for unit in self._session.runtime.units for flat in unit.flats]
        mine = {n: tuple(s.shape) for flat in flats for n, s in zip(flat.names, flat.layout.slots, strict=True)}
        compare = _compare if self._strict else _compare_common
        compare(where, "parameter", mine, params)
        mine = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(self._model).items()}
        compare(where, "buffer", mine, buffers)
        if read.module_states is not None:
            more, theirs = (dict.fromkeys(names, ()) for names in (modules_with_more(self._model), read.module_states))
            compare(where, "module with extra state", more, theirs)
        if self._ema is not None and not reader.shared.get("has_ema"):
            raise CheckpointError(f"{where} was saved without an EMA; one made after loading starts from the weights")
        if self._optimizer is None:
            return
        if reader.shared.get("optimizer") is None:
            raise CheckpointError(f"{where} was saved without an optimizer: load(path, model) takes its weights")
        understood(where / SHARED, lambda: self._hyper_parameters(reader.shared["optimizer"], where))
        rule = understood(where / SHARED, lambda: str(reader.shared["optimizer"]["rule"]))
        try:
            for update, saved in self._states(reader):
                update.expect(rule, saved)
        except OptimizerError as error:
            raise CheckpointError(
                f"{where} does not fit: {error}. load(path, model) takes its weights alone"
            ) from error

    def _states(self, reader: Reader) -> list[tuple[FlatUpdate, dict[int, dict[str, torch.dtype]]]]:
        """The optimizer's updates, and what was saved of the state of each, by slot."""
        if self._optimizer is None:
            return []
        dtypes = understood(reader.directory / SHARED, lambda: _state_dtypes(reader))
        return [
            (update, {slot: dtypes.get(name, {}) for slot, name in enumerate(update.flat.names)})
            for update in self._optimizer.updates
        ]

    def _hyper_parameters(self, saved: Mapping[str, Any], where: Path) -> list[dict[str, Any]]:
        """What each of the optimizer's groups takes over."""
        if self._optimizer is None:
            return []
        hyper_of = {name: decode(group["hyper"]) for group in saved["groups"] for name in group["params"]}
        names = param_names(self._session)
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

    def _take_optimizer(self, shared: Mapping[str, Any]) -> None:
        if self._optimizer is None:
            return
        saved = shared["optimizer"]
        for group, hyper in zip(self._optimizer.param_groups, self._hyper_parameters(saved, Path()), strict=True):
            group.update(hyper)
        for update in self._optimizer.updates:
            names = enumerate(update.flat.names)
            scalars = {slot: decode(saved["scalars"][name]) for slot, name in names if name in saved["scalars"]}
            update.take_scalars(scalars)
        self._optimizer.num_updates = int(saved["num_updates"])


def _compare(where: Path, what: str, mine: Mapping[str, Sequence[int]], theirs: Mapping[str, Sequence[int]]) -> None:
    missing, unknown = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if missing or unknown:
        name = (missing or unknown)[0]
        near = get_close_matches(name, unknown if missing else missing, n=1)
        raise CheckpointError(
            f"{where} does not fit the model: {len(missing)} of its {_plural(what)} are not in the checkpoint and "
            f"{len(unknown)} of the checkpoint's are not in the model, first {name!r}"
            f"{f' (did you mean {near[0]!r}?)' if near else ''}; strict=False loads those that both have"
        )
    _compare_common(where, what, mine, theirs)


def _compare_common(
    where: Path, what: str, mine: Mapping[str, Sequence[int]], theirs: Mapping[str, Sequence[int]]
) -> None:
    if mine and theirs and not mine.keys() & theirs.keys():
        raise CheckpointError(
            f"{where} does not fit the model: they have no {what} in common; it begins with {min(theirs)!r}, and the "
            f"model with {min(mine)!r}"
        )
    for name, shape in mine.items():
        if name in theirs and shape != theirs[name]:
            raise CheckpointError(
                f"{where} does not fit the model: {what} {name!r} has shape {theirs[name]} in the checkpoint and "
                f"{shape} in the model"
            )


def _plural(what: str) -> str:
    first, *rest = what.split(" ", 1)
    return " ".join([f"{first}s", *rest])


def _module_states(reader: Reader) -> Mapping[str, Any] | None:
    states = reader.shared["module_states"]
    return None if states is None else {name: decode(state, reader.tensor) for name, state in states.items()}


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


@contextmanager
def _taking(where: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what} does not take the state in {where}: {error!r}") from error


def _is_damage(error: BaseException) -> bool:
    """Whether it is the checkpoint's fault: then an older one may do."""
    found = [told[0] for told in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return all(isinstance(each, CheckpointError) for each in found)


def _shapes(shared: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    params = {name: tuple(saved["shape"]) for name, saved in shared["params"].items()}
    return params, {name: tuple(shape) for name, shape in shared["buffers"].items()}


def _take_random(device: torch.device, states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    random.setstate(states["python"])
    if states["numpy"] is not None:
        import numpy

        numpy.random.set_state(states["numpy"])
