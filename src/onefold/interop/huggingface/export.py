"""Owns `export`: a sharded model as a Hugging Face directory, written as a stream; and `full_state_dict`.

At any time one flat buffer of one unit is gathered, in the dtype that is written, and one small piece of it is on its
way to the file. Rank 0 writes; the others take part in the gathers. What is on disk under the target's name is always
whole: the old export, or the new one.
"""

import copy
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onefold.comm.agreement import united
from onefold.engine.flat import Flat
from onefold.engine.session import Session, session_met
from onefold.engine.unit import Unit
from onefold.errors import WeightsError
from onefold.files.names import Named, named_tensors, written_names
from onefold.files.tensor_files import Entry, prevailing_dtype, write_files, written_dtype
from onefold.memory.streams import Ticket
from onefold.plan.precision import Precision
from onefold.setup.meta_init import only
from onefold.system.atomic_replace import replacing

_OURS = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|(config|generation_config|adapter_config)\.json"
)


def export(
    model: "nn.Module | str | Path",
    out_dir: "str | Path",
    *,
    dtype: "torch.dtype | str | None" = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write the model into `out_dir` as safetensors that `from_pretrained` loads. A collective; rank 0 writes.

    Given the path of a checkpoint instead of a model, one process writes what is in that. `DIRECTORY/latest` means the
    newest whole one, as it does to `load`.

    In goes what `state_dict` has: trained and frozen parameters, persistent buffers, tied parameters once. A model of
    Hugging Face gets its `config.json` and `generation_config.json` too. Of a PEFT model the adapters are written, by
    its own `save_pretrained`. Optimizer state is not.

    Args:
        out_dir: made, or replaced in one step once the new one is whole and on disk; other files in it stay.
        dtype: of the parameters: "fp32" (exact: from the master weights), "bf16" or "fp16"; None keeps the dtypes that
            the model computes in. Buffers, and parameters that are not floating-point numbers or are 8-bit ones, keep
            their own.
        max_file_bytes: bytes of tensors in one file; a larger tensor has a file to itself.

    Raises:
        PrecisionError: `dtype` is none of those.
        WeightsError: the directory cannot be written, or the model holds what such files cannot; on every rank.
        CheckpointError: there is no such checkpoint, it is damaged, or its model has to be there to be exported.
    """
    if not isinstance(model, nn.Module):
        from onefold.checkpoint.exporting import export_checkpoint

        _check_size(max_file_bytes)
        export_checkpoint(Path(model), dtype, max_file_bytes, partial(_replace, Path(out_dir)))
        return
    session = session_met(model, "onefold.export")
    inner: Any = model._modules.get("_orig_mod", model)
    target = Path(out_dir)
    settings = (f"directory {target}", f"dtype {dtype}", f"max_file_bytes {max_file_bytes}")
    session.come_to_rest("onefold.export")
    with united(session.comm, "onefold.export", settings) as meet, torch.no_grad():
        _check(inner, max_file_bytes)
        window = _Window(session, Precision(params=dtype).params, meet)
        is_adapted = hasattr(inner, "peft_config") and hasattr(inner, "get_base_model")
        entries = _entries(inner, _adapter_tensors(inner) if is_adapted else named_tensors(inner), session, window)
        save = _save_adapter if is_adapted else partial(_save_model, max_file_bytes=max_file_bytes)
        if session.comm.rank == 0:
            _replace(target, partial(save, inner, entries))
        else:
            for entry in entries:
                entry.load()


def full_state_dict(model: nn.Module, *, dtype: "torch.dtype | str | None" = None) -> dict[str, Tensor]:
    """The whole model as plain tensors in rank 0's host memory, by the names of `state_dict`; other ranks get {}.

    A collective. One flat buffer at a time is gathered. A tied parameter is one tensor under all its names.

    Args:
        dtype: of the parameters, as for `export`: "fp32" gives the exact master weights.

    Raises:
        PrecisionError: `dtype` is none that `export` takes.
        WeightsError: the model holds state that is no tensor.
    """
    session = session_met(model, "onefold.full_state_dict")
    inner: Any = model._modules.get("_orig_mod", model)
    session.come_to_rest("onefold.full_state_dict")
    values: dict[str, Tensor] = {}
    with united(session.comm, "onefold.full_state_dict", (f"dtype {dtype}",)) as meet, torch.no_grad():
        window = _Window(session, Precision(params=dtype).params, meet)
        wanted = named_tensors(inner)
        all_names = {named.names[0]: named.names for named in wanted}
        for entry in _entries(inner, wanted, session, window, first_name):
            whole = entry.load()
            if session.comm.rank == 0:
                values.update(dict.fromkeys(all_names[entry.name], whole.to("cpu", copy=True)))
    return values


def first_name(_: nn.Module, named: Named) -> tuple[str, ...]:
    """The first of a tensor's names."""
    return named.names[:1]


def _check_size(max_file_bytes: int) -> None:
    if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise WeightsError(f"max_file_bytes={max_file_bytes!r}: give a number of bytes, at least 1")


def _check(model: Any, max_file_bytes: int) -> None:
    _check_size(max_file_bytes)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise WeightsError(
            "adapters that model.add_adapter put inside a model cannot be exported apart; make them with "
            "peft.get_peft_model"
        )


def _replace(target: Path, save: Callable[[Path], None]) -> None:
    try:
        with replacing(target, lambda name: _OURS.fullmatch(name) is not None) as directory:
            save(directory)
    except OSError as error:
        raise WeightsError(f"{target} could not be written: {error}") from error


class _Window:
    """The one flat buffer that is whole now, in the dtype that is written."""

    def __init__(self, session: Session, dtype: "torch.dtype | str | None", meet: Callable[[], None]) -> None:
        self._session = session
        self._dtype = dtype if isinstance(dtype, torch.dtype) else None
        self._meet = meet
        self._flat: Flat | None = None
        self._whole = torch.empty(0)

    def dtype_of(self, flat: Flat) -> torch.dtype:
        """The dtype in which a flat buffer's parameters are written."""
        return written_dtype(flat.weight.dtype, self._dtype)

    def take(self, unit: Unit, flat: Flat, slot: int) -> Tensor:
        """One parameter, whole; valid until the next is taken. Every rank takes the same ones in the same order."""
        if flat is not self._flat:
            self._flat, self._whole = flat, torch.empty(0)
            self._meet()
            self._whole = self._gather(unit, flat)
        place = flat.layout.slots[slot]
        return self._whole[place.start : place.stop].view(place.shape)

    def _gather(self, unit: Unit, flat: Flat) -> Tensor:
        dtype, own = self.dtype_of(flat), flat.weight.dtype
        if dtype == own and unit.is_gathered:
            return flat.buffer.whole
        flat.current.copy().wait()  # a copy: the next gather waits for it too
        part = flat.weight if dtype == own or flat.trained is None else flat.trained.master.load()
        part = part.to(self._session.device, dtype)
        if part.numel() == flat.layout.numel:
            return part
        whole = torch.empty(flat.layout.numel, dtype=dtype, device=self._session.device)
        Ticket(self._session.comm.all_gather(whole, part)).wait()
        return whole


def _entries(
    model: nn.Module,
    wanted: Sequence[Named],
    session: Session,
    window: _Window,
    naming: Callable[[nn.Module, Named], tuple[str, ...]] = written_names,
) -> list[Entry]:
    """What to write, unit by unit, so that each flat buffer is gathered once; buffers last."""
    names = {id(named.tensor): naming(model, named) for named in wanted}
    entries = [
        Entry(
            name=name,
            shape=flat.layout.slots[slot].shape,
            dtype=window.dtype_of(flat),
            load=partial(window.take, unit, flat, slot),
        )
        for unit in session.runtime.units
        for flat in unit.flats
        for slot, param in enumerate(flat.params)
        for name in names.pop(id(param), ())
    ]
    for named in wanted:
        if named.is_param and id(named.tensor) in names:
            raise WeightsError(f"{named.names[0]!r} was added to the model, or replaced, after onefold.shard")
        if not named.is_param:
            tensor = named.tensor.detach()
            entries += [
                Entry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, load=partial(_itself, tensor))
                for name in names[id(named.tensor)]
            ]
    return entries


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _save_model(model: Any, entries: Sequence[Entry], directory: Path, max_file_bytes: int) -> None:
    write_files(directory, entries, max_file_bytes)
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        _save_config(model, entries, directory)
    if hasattr(getattr(model, "generation_config", None), "save_pretrained") and model.can_generate():
        model.generation_config.save_pretrained(directory)


def _save_config(model: Any, entries: Sequence[Entry], directory: Path) -> None:
    """Write the configuration; `from_pretrained` takes class and dtype from it."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    path = directory / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    written["dtype"] = prevailing_dtype(entries)
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _adapter_tensors(model: Any) -> list[Named]:
    """Those tensors of a PEFT model that its own `save_pretrained` writes, found by asking it with empty ones."""
    from peft import get_peft_model_state_dict

    tensors = named_tensors(model)
    blanks = {
        name: torch.empty(named.tensor.shape, dtype=named.tensor.dtype, device="meta")
        for named in tensors
        for name in named.names
    }
    kept: set[int] = set()
    with only(model, {}, set()):  # it asks modules for their state_dict, for the names in it
        for adapter in model.peft_config:
            found = get_peft_model_state_dict(model, state_dict=dict(blanks), adapter_name=adapter)
            kept |= {id(tensor) for tensor in found.values()}
    return [named for named in tensors if any(id(blanks[name]) in kept for name in named.names)]


def _save_adapter(model: Any, entries: Sequence[Entry], directory: Path) -> None:
    # Small beside the model, and PEFT writes them all at once.
    values = {entry.name: entry.load().to("cpu", copy=True) for entry in entries}
    with only(model, {}, set()):
        model.save_pretrained(directory, state_dict=values)
