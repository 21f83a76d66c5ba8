"""Owns `load`: which checkpoint is meant, whether it fits, and where its values go.

Each rank looks for the checkpoint, and reads what is in it beside the tensors of the model. Then ranks tell each other
what they found, and nothing of the model has changed by then. They tell each other once more when it has.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.agreeing import Statement, all_or_none, attempt, go_on, tell
from onefold.checkpoint.bar import bar
from onefold.checkpoint.codec import decode, dtype_of
from onefold.checkpoint.contents import check_given, kinds_given, several
from onefold.checkpoint.directory import Choice, Damaged, Found, choose_checkpoint, damage, tell_passed
from onefold.checkpoint.entries import Entry, buffer_entries, flats_of, kept_entries, param_names, persistent_buffers
from onefold.checkpoint.files import Files
from onefold.checkpoint.manifest import OWN, SHARED, file_of, understood
from onefold.checkpoint.storage import Reader
from onefold.engine.session import Session
from onefold.errors import CheckpointError, OptimizerError
from onefold.files.names import modules_with_more
from onefold.optim.ema import EMA
from onefold.optim.optimizer import Optimizer
from onefold.optim.update import FlatUpdate


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


def load(path: Path, job: "Job") -> Any:
    """Let `job` read the checkpoint that `path` means; see `onefold.load`."""
    session = job.session
    session.come_to_rest("onefold.load")
    session.wait_for_readers()
    comm, given, did = session.comm, kinds_given(job.optimizer, job.ema), "could not load"
    damaged: dict[Found, Damaged] = {}
    meant: Choice | None = None
    while True:
        with ExitStack() as stack:
            choice, problem = attempt(partial(job.choose, path, damaged, meant))
            if problem is None:
                read, problem = attempt(partial(job.open, choice.found.path, stack))
            every: list[Statement[Choice]] = tell(comm, given, choice, problem)
            # What rank 0 sees counts: others may see a directory that changes at another moment.
            meant = every[0].brought
            seen = {told.brought.found for told in every if told.brought is not None}
            if meant is not None and seen != {meant.found} and all(told.may_go_on for told in every):
                continue
            try:
                go_on(every, comm.rank, problem, did)
                extra, _ = all_or_none(comm, partial(job.fill, read), {}, did)
            except Damaged as error:
                if meant is None:
                    raise
                damaged[meant.found], meant = error, None
                continue
            if comm.rank == 0:
                tell_passed("loading", choice)
            return extra


@dataclass(frozen=True, slots=True)
class LoadWishes:
    """What `load` was asked for, beside what to fill."""

    random_states: bool
    strict: bool
    progress: bool
    files: Files


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `load` was given to fill."""

    session: Session
    model: nn.Module
    optimizer: Optimizer | None
    ema: EMA | None
    scheduler: Any
    loader: Any
    wishes: LoadWishes

    def choose(self, path: Path, damaged: Mapping[Found, Damaged], meant: Choice | None) -> Choice:
        """The checkpoint to read: what rank 0 chose, if ranks saw different ones, or the best that is there now."""
        self.session.wait_for_saves()
        check_given(self.session, self.optimizer, self.ema)
        # Another run may have removed or replaced a checkpoint meanwhile, and left a newer one.
        return meant or choose_checkpoint(path, damaged)

    def open(self, path: Path, stack: ExitStack) -> Read:
        """Read whatever is no tensor of model or optimizer, before anything is changed.

        Args:
            stack: to close the files.
        Raises:
            Damaged: a part of it is not what was written.
            CheckpointError: it does not fit, or has not what is asked for; naming the first that differs.
        """
        rank, where = self.session.comm.rank, path / SHARED
        with damage():
            reader = stack.enter_context(closing(Reader(path, self.wishes.files)))
            if rank == 0:
                reader.check_sizes()
            shared = reader.shared
            read = Read(
                reader=reader,
                own=reader.own(rank) if rank < reader.num_ranks else {},
                schedulers=understood(where, lambda: [decode(state) for state in shared["schedulers"]]),
                module_states=understood(where, lambda: _module_states(reader)),
                extra=understood(where, lambda: decode(shared["extra"], reader.tensor)),
            )
        self._check(read)
        self._check_rest(read)
        return read

    def fill(self, read: Read) -> tuple[Any, None]:
        """Let model, optimizer and all else have what was saved; returns the extra, and nothing for other ranks.

        Raises:
            Damaged: a tensor is not what was written, and the model holds part of the checkpoint.
            CheckpointError: something does not take what was saved.
        """
        where, reader = read.reader.directory, read.reader
        try:
            self._read_tensors(reader)
        finally:  # also where it went wrong: the other ranks wait for what this one shows
            for unit in self.session.runtime.units:
                unit.show_stored(unit.flats)
        understood(where / SHARED, lambda: self._take_numbers(reader.shared))
        modules = modules_with_more(self.model)
        for name, state in (read.module_states or {}).items():
            if name in modules:
                with _taking(where, f"module {name!r}"):
                    modules[name].set_extra_state(state)
        for index, (each, state) in enumerate(zip(several(self.scheduler), read.schedulers, strict=False)):
            with _taking(where, f"scheduler {index}"):
                each.load_state_dict(state)
        if self.loader is not None:
            with _taking(where, "the loader"):
                self.loader.load_state_dict(decode(read.own["loader"]))
        if self.wishes.random_states and read.own.get("random") is not None:  # a checkpoint that was imported has none
            own = where / file_of(self.session.comm.rank, OWN)
            understood(own, lambda: _take_random(self.session.device, decode(read.own["random"])))
        return read.extra, None

    def _read_tensors(self, reader: Reader) -> None:
        told = f"reading {reader.directory} failed, and the model holds part of it: "
        try:
            for update, saved in self._states(reader):
                update.make_room(saved)
            entries = self._wanted(reader)
            total, is_first = sum(entry.nbytes for entry in entries), self.session.comm.rank == 0
            with bar(f"loading {reader.directory.name}", total, self.wishes.progress and is_first) as advance:
                reader.fill(entries, advance)
        except CheckpointError as error:
            raise Damaged(f"{told}{error}") from error
        except Exception as error:
            raise CheckpointError(f"{told}{error}") from error

    def _wanted(self, reader: Reader) -> list[Entry]:
        """What is to be read; unless strict, of weights and buffers those that are there."""
        entries = [
            *kept_entries(self.session, self.optimizer, self.ema),
            *buffer_entries(persistent_buffers(self.model)),
        ]
        if self.wishes.strict:
            return entries
        params, buffers = understood(reader.directory / SHARED, lambda: _shapes(reader.shared))
        there = {*(f"model.{name}" for name in params), *(f"buffer.{name}" for name in buffers)}
        return [each for each in entries if not each.key.startswith(("model.", "buffer.")) or each.key in there]

    def _check(self, read: Read) -> None:
        """Compare names and shapes.

        Raises:
            CheckpointError: naming the first that differ.
        """
        reader, where = read.reader, read.reader.directory
        params, buffers = understood(where / SHARED, lambda: _shapes(reader.shared))
        flats = flats_of(self.session)
        mine = {n: tuple(s.shape) for flat in flats for n, s in zip(flat.names, flat.layout.slots, strict=True)}
        compare = _compare if self.wishes.strict else _compare_common
        compare(where, "parameter", mine, params)
        mine = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(self.model).items()}
        compare(where, "buffer", mine, buffers)
        if read.module_states is not None:
            more, theirs = (dict.fromkeys(names, ()) for names in (modules_with_more(self.model), read.module_states))
            compare(where, "module with extra state", more, theirs)
        if self.ema is not None and not reader.shared.get("has_ema"):
            raise CheckpointError(f"{where} was saved without an EMA; one made after loading starts from the weights")
        if self.optimizer is None:
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

    def _check_rest(self, read: Read) -> None:
        where, have, want = read.reader.directory, len(read.schedulers), len(several(self.scheduler))
        if want and want != have:
            raise CheckpointError(f"{where} holds the state of {have} schedulers, not {want}")
        saved_by, here = read.reader.num_ranks, self.session.comm.num_ranks
        if self.loader is not None and saved_by != here:
            raise CheckpointError(
                f"{where} was saved by {saved_by} ranks, and this is one of {here}: the place in each rank's data "
                "cannot be carried over. Load without loader="
            )
        if self.loader is not None and read.own.get("loader") is None:
            raise CheckpointError(f"{where} was saved without the state of a data loader")

    def _states(self, reader: Reader) -> list[tuple[FlatUpdate, dict[int, dict[str, torch.dtype]]]]:
        """The optimizer's updates, and what was saved of the state of each, by slot."""
        if self.optimizer is None:
            return []
        dtypes = understood(reader.directory / SHARED, lambda: _state_dtypes(reader))
        return [
            (update, {slot: dtypes.get(name, {}) for slot, name in enumerate(update.flat.names)})
            for update in self.optimizer.updates
        ]

    def _hyper_parameters(self, saved: Mapping[str, Any], where: Path) -> list[dict[str, Any]]:
        """What each of the optimizer's groups takes over."""
        if self.optimizer is None:
            return []
        hyper_of = {name: decode(group["hyper"]) for group in saved["groups"] for name in group["params"]}
        names = param_names(self.session)
        found = []
        for index, group in enumerate(self.optimizer.param_groups):
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

    def _take_numbers(self, shared: Mapping[str, Any]) -> None:
        """What optimizer and loss scale keep beside tensors."""
        self.session.scaler.load_state_dict(_scaler_state(self.session, shared))
        if self.optimizer is None:
            return
        saved = shared["optimizer"]
        for group, hyper in zip(self.optimizer.param_groups, self._hyper_parameters(saved, Path()), strict=True):
            group.update(hyper)
        for update in self.optimizer.updates:
            names = enumerate(update.flat.names)
            scalars = {slot: decode(saved["scalars"][name]) for slot, name in names if name in saved["scalars"]}
            update.take_scalars(scalars)
        self.optimizer.num_updates = int(saved["num_updates"])


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
