"""Owns an engine's checkpoints: Onefold's, in DeepSpeed's shape of a directory: `DIRECTORY/TAG`, and a file `latest`.

[Note: What latest names is whole]
The checkpoint is in its place, and on the disk, before `latest` is replaced, in one step, by a file that names it. A
process that ends in between leaves `latest` as it was.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onefold.agree import together
from onefold.checkpoint import load, save
from onefold.errors import CheckpointError, WeightsError
from onefold.export import full_state_dict
from onefold.session import session_of

if TYPE_CHECKING:
    from onefold.deepspeed.engine import DeepSpeedEngine

LATEST = "latest"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_log = logging.getLogger("onefold")


def save_checkpoint(
    engine: "DeepSpeedEngine", save_dir: str, tag: Any, client_state: Mapping[str, Any], save_latest: bool
) -> bool:
    """Write `save_dir/tag`, and then its name into `save_dir/latest`. See `DeepSpeedEngine.save_checkpoint`."""
    if not str(save_dir):
        raise CheckpointError(f"save_dir={save_dir!r}: give the name of a directory")
    session = session_of(engine.module, "save_checkpoint")
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    for rank, theirs in enumerate(session.comm.exchange_objects(name)):
        if theirs != name:
            raise CheckpointError(f"the tag is {name!r} on rank {session.comm.rank} and {theirs!r} on rank {rank}")
    _check_tag(name)
    extra = {
        "client_state": dict(client_state),
        "deepspeed": {key: getattr(engine, key) for key in _COUNTERS} | {"num_ranks": session.comm.num_ranks},
    }
    directory = Path(save_dir).absolute()
    save(
        directory / name, engine.module, engine.optimizer, scheduler=engine.lr_scheduler, extra=extra, progress=False
    ).wait()
    if save_latest:
        together(session.comm, lambda: _name(directory, name, session.comm.rank), CheckpointError, "could not save")
    return True


def _check_tag(name: str) -> None:
    if Path(name).name != name or name in (LATEST, "..") or name.startswith("."):
        raise CheckpointError(f"tag={name!r}: give a name for a directory, without slashes, and not {LATEST!r}")


def _name(directory: Path, name: str, rank: int) -> None:
    """Let `latest` name a checkpoint. See [Note: What latest names is whole]."""
    if rank:
        return
    fresh = directory / f".{LATEST}.partial"
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(directory / LATEST)
        opened = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        raise CheckpointError(
            f"{directory / name} is saved, but {directory / LATEST} cannot be written: {error.strerror or error}"
        ) from error


def load_checkpoint(
    engine: "DeepSpeedEngine", load_dir: str, tag: Any, *, with_optimizer: bool, with_scheduler: bool, only_module: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Read `load_dir/tag`, or what `load_dir/latest` names. See `DeepSpeedEngine.load_checkpoint`."""
    session = session_of(engine.module, "load_checkpoint")
    directory = Path(load_dir).absolute()
    name = str(tag) if tag is not None else session.comm.exchange_objects(_latest(directory))[0]
    if name is None:
        _log.warning("%s has no file %s, so nothing was loaded; give the tag of a checkpoint", directory, LATEST)
        return None, None
    path = directory / name
    together(session.comm, lambda: _check_ours(path, directory, name), CheckpointError, "could not load")
    resumes = with_optimizer and not only_module
    scheduler = engine.lr_scheduler if with_scheduler and not only_module else None
    extra = load(
        path,
        engine.module,
        engine.optimizer if resumes else None,
        scheduler=scheduler,
        random_states=resumes,
        progress=False,
    )
    facts = extra.get("deepspeed", {}) if isinstance(extra, dict) else {}
    if not only_module:
        for key in _COUNTERS:
            setattr(engine, key, int(facts.get(key, getattr(engine, key))))
    return str(path), dict(extra["client_state"]) if isinstance(extra, dict) and "client_state" in extra else {}


def _latest(directory: Path) -> str | None:
    """What `latest` names; None if it is not there."""
    path = directory / LATEST
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _check_ours(path: Path, directory: Path, name: str) -> None:
    """Whether a checkpoint is Onefold's.

    Raises:
        CheckpointError: it is DeepSpeed's, and has to be imported first; or there is none.
    """
    if path.is_dir() and any(path.glob("*mp_rank_*_model_states.pt")):
        raise CheckpointError(
            f"{path} was written by DeepSpeed. Import it once, into another directory:\n"
            f"  onefold import-deepspeed {directory} {directory}-onefold/{name} --tag {name}\n"
            f"and then call engine.load_checkpoint({str(directory) + '-onefold'!r}, tag={name!r})"
        )


def weights(engine: "DeepSpeedEngine", without_frozen: bool) -> dict[str, Tensor]:
    """The whole model on rank 0, in the dtypes that it computes in; {} on others. A collective."""
    state = full_state_dict(engine.module)
    frozen = {name for name, param in engine.module.named_parameters() if not param.requires_grad}
    return {name: value for name, value in state.items() if not (without_frozen and name in frozen)}


def save_16bit_model(engine: "DeepSpeedEngine", save_dir: str, filename: str, without_frozen: bool) -> bool:
    """Write the weights into one file. See `DeepSpeedEngine.save_16bit_model`."""
    path = Path(save_dir).absolute() / filename
    if engine.zero_optimization_partition_weights() and not engine.zero_gather_16bit_weights_on_model_save():
        _log.warning(
            "%s was not written: parameters are split over the ranks, and the configuration does not ask for whole "
            "ones; set stage3_gather_16bit_weights_on_model_save, or use onefold.export",
            path,
        )
        return False
    session = session_of(engine.module, "save_16bit_model")
    state = weights(engine, without_frozen)
    together(session.comm, lambda: _write(path, state, session.comm.rank), WeightsError, "could not save")
    return True


def _write(path: Path, state: Mapping[str, Tensor], rank: int) -> None:
    """`torch.save`, in one step: the file is whole, or as it was."""
    if rank:
        return
    fresh = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError where the disk is full
        fresh.unlink(missing_ok=True)
        raise WeightsError(f"{path} could not be written: {error}") from error
