"""Owns an engine's checkpoints: Onefold's, in DeepSpeed's shape of a directory: `DIRECTORY/TAG`, a file `latest`, and a
script that makes exact weights of it.

[Note: What latest names is whole]
The checkpoint is in its place, and on the disk, before `latest` is replaced, in one step, by a file that names it. A
process that ends in between leaves `latest` as it was.
"""

import logging
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onefold.checkpoint import load, save
from onefold.comm.agreement import together
from onefold.deepspeed.queries import Queries
from onefold.deepspeed.utils.zero_to_fp32 import SCRIPT
from onefold.engine.session import session_of
from onefold.errors import CheckpointError, EngineError, WeightsError
from onefold.interop.huggingface.export import full_state_dict
from onefold.optim.optimizer import Optimizer
from onefold.system.atomic_replace import replacing_file

LATEST = "latest"
_SCRIPT_NAME = "zero_to_fp32.py"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_log = logging.getLogger("onefold")


def save_checkpoint(
    engine: "Saves", save_dir: str, tag: Any, client_state: Mapping[str, Any], save_latest: bool, frozen: bool
) -> bool:
    """Write `save_dir/tag`, and then its name into `save_dir/latest`. See `Saves.save_checkpoint`."""
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
        directory / name,
        engine.module,
        engine.optimizer,
        scheduler=engine.lr_scheduler,
        extra=extra,
        frozen=frozen,
        progress=False,
    ).wait()
    beside = {_SCRIPT_NAME: SCRIPT} | ({LATEST: name} if save_latest else {})
    together(session.comm, lambda: _put(directory, name, beside, session.comm.rank), CheckpointError, "could not save")
    return True


def _check_tag(name: str) -> None:
    if not name or Path(name).name != name or name in (LATEST, _SCRIPT_NAME, "..") or name.startswith("."):
        raise CheckpointError(
            f"tag={name!r}: give a name for a directory, without slashes, and not {LATEST!r} or {_SCRIPT_NAME!r}"
        )


def _put(directory: Path, name: str, beside: Mapping[str, str], rank: int) -> None:
    """Write the files that lie beside checkpoints. See [Note: What latest names is whole]."""
    if rank:
        return
    for file_name, text in beside.items():
        path = directory / file_name
        try:
            with replacing_file(path) as fresh:
                fresh.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"{directory / name} is saved, but {path} cannot be written: {error.strerror or error}"
            ) from error


def load_checkpoint(
    engine: "Saves",
    load_dir: str,
    tag: Any,
    *,
    strict: bool,
    with_optimizer: bool,
    with_scheduler: bool,
    only_module: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Read `load_dir/tag`, or what `load_dir/latest` names. See `Saves.load_checkpoint`."""
    session = session_of(engine.module, "load_checkpoint")
    directory = Path(load_dir).absolute()
    agree = partial(together, session.comm, kind=CheckpointError, did="could not load")
    written = agree(lambda: _latest(directory) if tag is None else str(tag))
    name = session.comm.exchange_objects(written)[0]
    if name is None:
        _log.warning("%s has no file %s, so nothing was loaded; give the tag of a checkpoint", directory, LATEST)
        return None, None
    path = directory / name
    agree(lambda: _check_ours(path, directory, name))
    resumes = with_optimizer and not only_module
    scheduler = engine.lr_scheduler if with_scheduler and not only_module else None
    extra = load(
        path,
        engine.module,
        engine.optimizer if resumes else None,
        scheduler=scheduler,
        random_states=resumes,
        strict=strict,
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
    try:
        return path.read_text(encoding="utf-8").strip() if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check_ours(path: Path, directory: Path, name: str) -> None:
    """Whether a checkpoint is Onefold's.

    Raises:
        CheckpointError: it is DeepSpeed's, and has to be imported first; or it cannot be one.
    """
    _check_tag(name)
    ours = f"{directory}-onefold"
    if path.is_dir() and any(path.glob("*mp_rank_*_model_states.pt")):
        raise CheckpointError(
            f"{path} was written by DeepSpeed. Import it once, into another directory:\n"
            f"  {shlex.join(['onefold', 'import-deepspeed', str(directory), f'{ours}/{name}', '--tag', name])}\n"
            f"and then call engine.load_checkpoint({ours!r}, tag={name!r})"
        )


def weights(engine: "Saves", without_frozen: bool) -> dict[str, Tensor]:
    """The whole model on rank 0, in the dtypes that it computes in; {} on others. A collective."""
    state = full_state_dict(engine.module)
    frozen = {name for name, param in engine.module.named_parameters() if not param.requires_grad}
    return {name: value for name, value in state.items() if not (without_frozen and name in frozen)}


def save_16bit_model(engine: "Saves", save_dir: str, filename: str, without_frozen: bool) -> bool:
    """Write the weights into one file. See `Saves.save_16bit_model`."""
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as fresh:
            torch.save(dict(state), fresh)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError where the disk is full
        raise WeightsError(f"{path} could not be written: {error}") from error


class Saves(Queries, nn.Module):
    """The part of an engine that writes and reads files."""

    module: nn.Module
    optimizer: Optimizer | None
    lr_scheduler: Any
    global_steps: int
    global_rank: int

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's `state_dict`. Under ZeRO 3 it needs whole parameters: `with onefold.gathered(engine.module):`."""
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters():
                if not param.requires_grad:
                    state.pop(f"{prefix}{name}", None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load `checkpoint["module"]`, whole weights, into the model, under any plan. A collective.

        Args:
            fetch_z3_params: has no effect: parameters that rest in parts are always written.
        Raises:
            EngineError: `checkpoint` has no "module".
        """
        _refuse_custom(custom_load_fn)
        if "module" not in checkpoint:
            raise EngineError(
                'load_module_state_dict takes a dict with the weights under "module": hand over '
                '{"module": state_dict}, or call engine.module.load_state_dict(state_dict)'
            )
        self.module.load_state_dict(checkpoint["module"], strict=strict)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint, `save_dir/tag`, for any number of ranks and any plan. A collective.

        Args:
            tag: the same on every rank; None is `global_stepN`.
            client_state: numbers, strings, tensors, and containers of them, for `load_checkpoint` to return; rank 0's.
            save_latest: write the tag into the file `latest` once the checkpoint is there.
            exclude_frozen_parameters: leave frozen weights out; load it with `load_module_strict=False`.
        Raises:
            CheckpointError: on every rank, if any cannot. Older checkpoints stay as they were.
        """
        return save_checkpoint(self, save_dir, tag, client_state or {}, save_latest, not exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Take back what `save_checkpoint` wrote, at any number of ranks and under any plan. A collective.

        Args:
            tag: None is the one that the file `latest` names.
            load_module_strict: False loads the weights and buffers that checkpoint and model both have.
            load_optimizer_states: False leaves the optimizer, and random generators, as they are.
            load_lr_scheduler_states: False leaves the schedule as it is.
            load_module_only: take weights and buffers alone.
        Returns:
            The path and the client state; (None, None) where no tag is given and there is no file `latest`.
        Raises:
            CheckpointError: on every rank; there is no such checkpoint, it does not fit, or it is DeepSpeed's own,
                which is imported first; the message has the command.
        """
        _refuse_custom(custom_load_fn)
        return load_checkpoint(
            self,
            load_dir,
            tag,
            strict=load_module_strict,
            with_optimizer=load_optimizer_states,
            with_scheduler=load_lr_scheduler_states,
            only_module=load_module_only,
        )

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights into one file, for `torch.load`, in the dtypes that the model computes in. A collective.

        Returns:
            False, and nothing is written, where parameters are split and `stage3_gather_16bit_weights_on_model_save`
            is not set.
        """
        return save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Whole weights on rank 0, None on others: accelerate and transformers save them. A collective."""
        state = weights(self, exclude_frozen_parameters)
        return state if self.global_rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict


def _refuse_custom(custom_load_fn: Callable[..., Any] | None) -> None:
    if custom_load_fn is not None:
        raise EngineError(
            "custom_load_fn is not called: weights are read straight into shards; write them inside "
            "`with onefold.gathered(engine.module, write=True):`"
        )
