"""Promise: the files of a checkpoint are what these few lines take them for, whatever version wrote them. They read
what `save` writes, and `load` reads what they write, however tensors are cut into boxes."""

import gzip
import json
from array import array
from itertools import product
from math import prod
from zlib import crc32

import pytest
import torch
from torch import nn

import onefold
from checks import equal
from onefold.plan.table import NAMED_PLANS


class Deep(nn.Module):
    """Weights of up to five dims, and of none."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        shapes = [(), (7,), (5, 3), (2, 3, 4), (3, 2, 5, 2), (2, 3, 2, 2, 3)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.register_buffer("turned", torch.randn(3, 4).t())

    def forward(self):
        return sum(weight.float().square().sum() for weight in self.weights)


def read(directory):
    """Every tensor, by name; what else all ranks share; and the manifest."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    checksum = manifest.pop("crc32")
    assert checksum == crc32(json.dumps(manifest, sort_keys=True).encode())
    assert (manifest["format"], manifest["version"]) == ("onefold checkpoint", 2)
    files = {name: (directory / name).read_bytes() for name in manifest["files"]}
    for name, record in manifest["files"].items():
        assert len(files[name]) == record["bytes"]
        size = record["block"] or len(files[name])
        sums = [crc32(files[name][at : at + size]) for at in range(0, len(files[name]), size)]
        told = [record["crc32"]] if record["block"] is None else list(array("I", files[name[:-4] + "sums"]))
        assert sums == told
    shared = json.loads(gzip.decompress(files["checkpoint.json.gz"]))
    tensors = {}
    for key, saved in shared["tensors"].items():
        dtype = getattr(torch, saved["dtype"])
        tensors[key] = torch.empty(saved["shape"], dtype=dtype)
        for offsets, sizes, file, start in saved["chunks"]:
            raw = bytearray(files[file][start : start + prod(sizes) * dtype.itemsize])
            box = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            tensors[key][box] = torch.frombuffer(raw, dtype=dtype).reshape(sizes)
    return tensors, shared, manifest


def rewrite(directory, tensors, shared, manifest):
    """Let every row of a tensor be a box, the last ones first, in turn in one file or another."""
    block, data = 1024, [bytearray(), bytearray(b"unused")]
    for number, (key, tensor) in enumerate(tensors.items()):
        rows = [*product(*map(range, tensor.shape[:-1]))] if tensor.dim() else [()]
        chunks = shared["tensors"][key]["chunks"] = []
        for place, row in enumerate(reversed(rows)):
            offsets, sizes = [*row, *[0] * bool(tensor.dim())], [*[1] * len(row), *tensor.shape[len(row) :]]
            which = (number + place) % 2
            chunks.append([offsets, sizes, f"rank-{which:05d}.data", len(data[which])])
            data[which] += tensor[row].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    files = {"checkpoint.json.gz": gzip.compress(json.dumps(shared).encode())}
    records = {}
    for which, raw in enumerate(data):
        files[f"rank-{which:05d}.data"] = bytes(raw)
        sums = array("I", [crc32(raw[at : at + block]) for at in range(0, len(raw), block)])
        files[f"rank-{which:05d}.sums"] = sums.tobytes()
        files[f"rank-{which:05d}.json.gz"] = (directory / f"rank-{which:05d}.json.gz").read_bytes()
    for name, text in files.items():
        (directory / name).write_bytes(text)
        is_data = name.endswith(".data")
        sum_, size = (None, block) if is_data else (crc32(text), None)
        records[name] = {"bytes": len(text), "crc32": sum_, "block": size}
    body = {**manifest, "files": records}
    text = json.dumps({**body, "crc32": crc32(json.dumps(body, sort_keys=True).encode())})
    (directory / "manifest.json").write_text(text)


def save(rank, num_ranks, directory, plan):
    model = onefold.shard(Deep(1), NAMED_PLANS[plan], precision=onefold.Precision(params="bf16"))
    optimizer = onefold.AdamW(model, lr=0.1)
    model().backward()
    optimizer.step()
    onefold.save(directory, model, optimizer, extra={"it": torch.arange(6).view(2, 3)})


def load(rank, num_ranks, directory, plan):
    """All of it, as a save of what was loaded has it."""
    model = onefold.shard(Deep(2), NAMED_PLANS[plan], precision=onefold.Precision(params="bf16"))
    optimizer = onefold.AdamW(model, lr=0.1)
    extra = onefold.load(directory, model, optimizer)
    onefold.save(directory.parent / "again", model, optimizer, extra=extra)
    return read(directory.parent / "again")[0]


@pytest.mark.parametrize(("save_ranks", "load_ranks"), [(1, 2), (2, 3), (3, 2)])
def test_a_checkpoint_is_read_and_written_by_hand(ranks, tmp_path, save_ranks, load_ranks):
    ranks(3).run(save, tmp_path / "three", "zero_3")
    ranks(save_ranks).run(save, tmp_path / "it", "zero_1")
    tensors, shared, manifest = read(tmp_path / "it")
    assert equal(tensors, read(tmp_path / "three")[0])
    assert len(tensors) == 3 * 6 + 2
    rewrite(tmp_path / "three", tensors, {**shared, "num_ranks": 2}, manifest)
    assert equal(read(tmp_path / "three")[0], tensors)
    assert equal(ranks(load_ranks).run(load, tmp_path / "three", "zero_3")[0], tensors)
