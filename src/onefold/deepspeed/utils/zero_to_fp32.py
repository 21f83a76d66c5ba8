"""Owns DeepSpeed's `zero_to_fp32`, for what `engine.save_checkpoint` writes: exact weights from a checkpoint, without
its model.

A directory holds one checkpoint under each tag, the file `latest` with the tag of the newest, and `SCRIPT`.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from onefold.checkpoint.codec import dtype_of
from onefold.checkpoint.storage import Reader
from onefold.deepspeed.values import as_number
from onefold.errors import CheckpointError, ConfigError, OnefoldError
from onefold.interop.huggingface.export import export
from onefold.system.atomic_replace import replacing_file

SCRIPT = '''"""Exact weights of a checkpoint in this directory, by onefold: python zero_to_fp32.py . OUT [--tag TAG]"""

from onefold.deepspeed.utils.zero_to_fp32 import (  # noqa: F401
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

if __name__ == "__main__":
    main()
'''
"""What `engine.save_checkpoint` leaves beside `latest`, as `zero_to_fp32.py`."""

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _checkpoint(checkpoint_dir: "str | Path", tag: str | None) -> Path:
    directory = Path(checkpoint_dir)
    if tag is None:
        latest = directory / "latest"
        if not latest.is_file():
            raise CheckpointError(f"{latest} is not there; name the checkpoint with tag=")
        tag = latest.read_text(encoding="utf-8").strip()
    found = directory / str(tag)
    if not found.is_dir():
        raise CheckpointError(f"there is no checkpoint {found}")
    if any(found.glob("*_optim_states.pt")):
        raise CheckpointError(
            f"{found} was written by DeepSpeed: turn it into Onefold's with `onefold import-deepspeed`, or use the "
            "zero_to_fp32.py that lies in it"
        )
    return found


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: "str | Path",
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The exact weights in a checkpoint, and its buffers, by name, on the host. Floating-point weights are fp32 (or
    wider); tied ones are one tensor under all their names.

    Args:
        tag: None takes what `latest` says.
        exclude_frozen_parameters: leave out what was not trained.
        lazy_mode: taken; the values are read at once.
    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or DeepSpeed wrote it.
    """
    reader = Reader(_checkpoint(checkpoint_dir, tag))
    try:
        return _weights(reader, exclude_frozen_parameters)
    finally:
        reader.close()


def _weights(reader: Reader, exclude_frozen: bool) -> dict[str, Tensor]:
    shared = reader.shared
    values: dict[str, Tensor] = {}
    for name, saved in shared["params"].items():
        if exclude_frozen and not saved["trained"]:
            continue
        tensor = _read(reader, f"model.{name}", saved["shape"], dtype_of(saved["dtype"]))
        if tensor.is_floating_point():
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        values[name] = tensor
    values |= {name: values[first] for name, first in shared["tied"].items() if first in values}
    for name, shape in shared["buffers"].items():
        values[name] = _read(reader, f"buffer.{name}", shape, torch.float32)
    return values


def _read(reader: Reader, key: str, shape: "list[int]", dtype: torch.dtype) -> Tensor:
    return reader.tensor(key) if key in reader.tensors else torch.empty(tuple(shape), dtype=dtype)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: "str | Path", tag: str | None = None
) -> nn.Module:
    """Load the exact weights in a checkpoint into `model`, which is not sharded, on the host; returns it."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: "str | Path",
    output_dir: "str | Path",
    max_shard_size: "str | int" = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the exact weights in a checkpoint into `output_dir`: as `pytorch_model.bin`, or as safetensors.

    Args:
        max_shard_size: of one file of safetensors ("5GB", "500MB", or bytes).
    """
    target, most = Path(output_dir), _bytes(max_shard_size)
    if safe_serialization and not exclude_frozen_parameters:
        export(_checkpoint(checkpoint_dir, tag), target, dtype="fp32", max_file_bytes=most)
        return
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    target.mkdir(parents=True, exist_ok=True)
    _write(state, target, safe_serialization)


convert_zero_checkpoint_to_state_dict = convert_zero_checkpoint_to_fp32_state_dict


def _write(state: Mapping[str, Tensor], target: Path, as_safetensors: bool) -> None:
    with replacing_file(target / ("model.safetensors" if as_safetensors else "pytorch_model.bin")) as fresh:
        if as_safetensors:
            save_file({name: value.clone() for name, value in state.items()}, fresh)
        else:
            torch.save(dict(state), fresh)


def _bytes(size: "str | int") -> int:
    """Bytes, of a number or of a text such as "5GB"."""
    if isinstance(size, int):
        return size
    text = size.strip().upper()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    number = as_number(text.removesuffix(unit))
    if number is None or not unit:
        raise ConfigError(f"max_shard_size={size!r}: expected a number of bytes, or a text such as '5GB'")
    return int(number * _UNITS[unit])


def main(arguments: Sequence[str] | None = None) -> None:
    """`zero_to_fp32.py` as a command, with DeepSpeed's options. What is wrong is one line on stderr, and exit code 2.

    Args:
        arguments: None takes those of the process.
    """
    parser = ArgumentParser(prog="zero_to_fp32.py", description="Write the exact weights in a checkpoint.")
    parser.add_argument("checkpoint_dir", help="what engine.save_checkpoint was given")
    parser.add_argument("output_dir", help="where pytorch_model.bin, or safetensors, go")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file of safetensors")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="else the one that the file latest names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="taken; there is nothing more to tell")
    given = vars(parser.parse_args(arguments))
    del given["debug"]
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**given)
    except OnefoldError as error:
        parser.exit(2, f"zero_to_fp32.py: error: {error}\n")
    print(f"{given['output_dir']}: the weights of {given['checkpoint_dir']}", file=sys.stderr)


if __name__ == "__main__":
    main()
