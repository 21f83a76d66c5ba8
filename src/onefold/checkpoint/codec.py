"""Owns how values that are not shards become JSON and back: exactly, and without running anybody's code.

Invariant: `decode(json.loads(json.dumps(encode(value))))` has the same types and bits as `value`, but that mappings are
dicts and parameters tensors. What cannot be said in this way is refused when it is saved, by the path that leads to it.
"""

import base64
import gzip
import json
import math
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onefold.errors import CheckpointError

_TAG = "$"
_PLAIN = (bool, str, type(None))
_MOST_DEEP = 100
_LONG = 2**63
"""From here on numbers are written to base 16: Python limits how many digits it reads to base 10."""
_MOST_TEXT = 2**30
"""Bytes in a file of JSON: a small one that a stranger made could unpack to more than there is memory."""
_SEQUENCES: dict[str, type] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}

Keep = Callable[[Tensor], str]
"""Puts a tensor aside; returns the name to find it by."""


def encode(value: Any, where: str, keep: Keep | None = None, depth: int = 0) -> Any:
    """`value` in terms of JSON. Tensors go to `keep`, or into the text. `depth` is that of `where`.

    Raises:
        CheckpointError: it holds something else than numbers, strings, bytes, tensors, arrays and containers of them.
    """
    if depth > _MOST_DEEP:
        raise CheckpointError(f"{where[:80]}... is nested more than {_MOST_DEEP} deep, or holds itself")
    if type(value) in _PLAIN:
        return value
    if type(value) is int:
        return value if abs(value) < _LONG else {_TAG: "int", "value": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, keep)
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "value": dtype_name(value)}
    if type(value) in (bytes, bytearray):
        return {_TAG: type(value).__name__, "value": base64.b64encode(value).decode()}
    if isinstance(value, Mapping) and hasattr(value, "items"):
        return _encode_mapping(value, where, keep, depth + 1)
    if type(value) in (list, *_SEQUENCES.values()):
        items = [encode(item, f"{where}[{index}]", keep, depth + 1) for index, item in enumerate(value)]
        kind = next((kind for kind, each in _SEQUENCES.items() if type(value) is each), None)
        return items if kind is None else {_TAG: kind, "items": items}
    array = _as_array(value)
    if array is not None:
        return array
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: it would "
        "take pickle, which runs code when it is read. Give numbers, strings, bytes, tensors, and lists, tuples, sets "
        "and dicts of them"
    )


def _encode_tensor(value: Tensor, where: str, keep: Keep | None) -> Any:
    if value.layout != torch.strided:
        raise CheckpointError(f"{where} is a tensor with layout {value.layout}; give a dense one")
    if value.is_meta:
        raise CheckpointError(f"{where} is a tensor on meta, which has no values; give one that has")
    value = value.detach().resolve_conj().resolve_neg()
    if keep is not None:
        return {_TAG: "tensor", "key": keep(value)}
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    raw = bytearray(flat.nbytes)
    if raw:
        torch.frombuffer(raw, dtype=torch.uint8).copy_(flat.view(torch.uint8))
    return {
        _TAG: "tensor",
        "dtype": dtype_name(value.dtype),
        "shape": list(value.shape),
        "value": base64.b64encode(raw).decode(),
    }


def _encode_mapping(value: Mapping[Any, Any], where: str, keep: Keep | None, depth: int) -> Any:
    items = [(key, encode(item, f"{where}[{key!r}]", keep, depth)) for key, item in value.items()]
    if all(type(key) is str for key in value) and _TAG not in value:
        return dict(items)
    return {_TAG: "dict", "items": [[encode(key, f"a key of {where}", None, depth), item] for key, item in items]}


def _as_array(value: Any) -> Any:
    numpy = sys.modules.get("numpy")  # who has its arrays has imported it
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)) or value.dtype.kind in "OV":
        return None  # objects, and records, whose fields a name of a dtype does not tell
    raw = numpy.ascontiguousarray(value).tobytes()
    return {
        _TAG: "array" if isinstance(value, numpy.ndarray) else "scalar",
        "dtype": value.dtype.str,
        "shape": list(value.shape),
        "value": base64.b64encode(raw).decode(),
    }


def decode(value: Any, fetch: Callable[[str], Tensor] | None = None) -> Any:
    """What `encode` was given; tensors that were put aside come from `fetch`.

    Raises:
        CheckpointError: it was not made by `encode`.
    """
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, fetch) for key, item in value.items()}
    try:
        return _decode_tagged(value, fetch)
    except CheckpointError:
        raise  # of the file that a tensor comes from, or a value within this one
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{value.get(_TAG)!r} is no value that this version can read ({error!r})") from error


def _decode_tagged(value: Mapping[str, Any], fetch: Callable[[str], Tensor] | None) -> Any:
    match value[_TAG]:
        case "float":
            return float(value["value"])
        case "dtype":
            return dtype_of(value["value"])
        case "int":
            return int(value["value"], 16)
        case "bytes":
            return base64.b64decode(value["value"])
        case "bytearray":
            return bytearray(base64.b64decode(value["value"]))
        case kind if kind in _SEQUENCES:
            return _SEQUENCES[kind](decode(item, fetch) for item in value["items"])
        case "dict":
            return {decode(key, fetch): decode(item, fetch) for key, item in value["items"]}
        case "tensor" if "key" in value:
            if fetch is None:
                raise ValueError("a tensor elsewhere, where none is expected")
            return fetch(value["key"])
        case "tensor":
            raw = bytearray(base64.b64decode(value["value"]))
            dtype = dtype_of(value["dtype"])
            return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(value["shape"])
        case "array" | "scalar":
            import numpy

            array = numpy.frombuffer(base64.b64decode(value["value"]), dtype=numpy.dtype(value["dtype"]))
            array = array.reshape(value["shape"])
            return array.copy() if value[_TAG] == "array" else array[()]
        case other:
            raise ValueError(f"unknown kind {other!r}")


def packed(value: Any) -> bytes:
    """A file of JSON. What is in ours is a tenth of its size when compressed, which counts beside small models."""
    return gzip.compress(json.dumps(value, separators=(",", ":")).encode(), mtime=0)


def unpacked(data: bytes) -> Any:
    """What `packed` was given.

    Raises:
        ValueError: it is no such file.
    """
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        text = unpacker.decompress(data, _MOST_TEXT)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"it does not end where it should, or has more than {_MOST_TEXT} bytes of text")
    return json.loads(text)


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that `dtype_name` named.

    Raises:
        CheckpointError: there is none of that name.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is no dtype of this version of torch")
    return dtype
