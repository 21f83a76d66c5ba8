"""Promise: a checkpoint on disk exports to what its model would have exported, by one process without the model."""

import json
import logging
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import onefold
from checkpoint_faults import WAYS, harm, save_both
from huggingface_models import bert, gpt2, loaded, logits, lora, t5, text, tied_llama
from models import build
from onefold import Precision
from onefold.checkpoint.manifest import OWN
from onefold.errors import CheckpointError, OnefoldError
from plans import NAMED_PLANS
from ranks import Turn

MODELS = {"gpt2": gpt2, "llama, tied": tied_llama, "bert": bert, "t5": t5}


def saved_and_exported(rank, num_ranks, make, plan, precision, directory, dtypes):
    model = onefold.shard(build(make), NAMED_PLANS[plan], precision=precision)
    optimizer = onefold.AdamW(model, lr=1e-2)
    text(model, Turn(rank, 0, sharded=True))
    optimizer.step()
    onefold.save(directory / "saved" / "step-1", model, optimizer)
    for dtype in dtypes:
        onefold.export(model, directory / f"live-{dtype}", dtype=dtype, max_file_bytes=20_000)
    return logits(model)


def tensors(directory):
    found = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize(
    ("name", "plan", "precision"),
    [
        ("gpt2", "zero_3", Precision()),
        ("llama, tied", "offload_3", Precision(params="bf16")),
        ("bert", "zero_0", Precision(params="bf16", master="fp32")),
        ("t5", "zero_1", Precision()),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.params),
)
def test_a_checkpoint_exports_as_its_model_does(ranks, tmp_path, name, plan, precision):
    dtypes = (None, "fp32", "bf16")
    want = ranks(2).run(saved_and_exported, MODELS[name], plan, precision, tmp_path, dtypes)[0]
    for dtype in dtypes:
        out = tmp_path / f"stored-{dtype}"
        onefold.export(tmp_path / "saved" / "latest", out, dtype=dtype, max_file_bytes=20_000)
        live, stored = tensors(tmp_path / f"live-{dtype}"), tensors(out)
        assert stored.keys() == live.keys()
        assert all(torch.equal(stored[key], tensor) for key, tensor in live.items())
        configs = [json.loads((where / "config.json").read_text()) for where in (out, tmp_path / f"live-{dtype}")]
        assert configs[0] == configs[1]
    if precision.params is None:
        assert torch.equal(logits(loaded(tmp_path / "stored-None")), want)


def test_the_command_exports(ranks, tmp_path):
    ranks(1).run(saved_and_exported, gpt2, "zero_3", Precision(), tmp_path, ())
    words = ["export", str(tmp_path / "saved" / "step-1"), str(tmp_path / "out"), "--dtype", "bf16"]
    ran = subprocess.run([sys.executable, "-m", "onefold", *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert loaded(tmp_path / "out").dtype == torch.bfloat16
    failed = subprocess.run(
        [sys.executable, "-m", "onefold", "export", str(tmp_path), "out"], capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert "not a whole checkpoint" in failed.stderr


def saved(rank, num_ranks, make, directory):
    onefold.save(directory / "a", onefold.shard(build(make), onefold.ZERO_3))


def test_adapters_are_exported_from_their_model(ranks, tmp_path):
    ranks(1).run(saved, lora, tmp_path)
    with pytest.raises(CheckpointError, match="adapters"):
        onefold.export(tmp_path / "a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(OnefoldError, match="no checkpoint"):
        onefold.export(tmp_path / "nothing", tmp_path / "out")


def exported(directory, name, out, caplog):
    """The tensors that an export gives, and what the log says of it."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "onefold"):
        onefold.export(directory / name, out)
    return tensors(out), caplog.messages


@pytest.mark.parametrize("way", [way for way in WAYS if way != "of the one before"])
def test_damage_to_the_newest_checkpoint_is_told_and_the_one_before_is_exported(ranks, tmp_path, caplog, way):
    whole, out = tmp_path / "whole", tmp_path / "out"
    ranks(2).run(save_both, whole)
    want, _ = exported(whole, "step-2", out, caplog)
    newest, told = exported(whole, "latest", out, caplog)
    assert not torch.equal(newest["first.weight"], want["first.weight"])
    assert not told
    for name in sorted(path.name for path in (whole / "step-3").iterdir()):
        place = shutil.copytree(whole, tmp_path / name)
        harm(place, name, way)
        if "bit" in way and name.startswith("rank-") and name.endswith(OWN):
            continue  # random states, which are of no use to an export and are not read
        found, told = exported(place, "latest", out, caplog)
        assert all(torch.equal(tensor, want[key]) for key, tensor in found.items()), name
        assert len(told) == 1
        assert "passed over: step-3 (" in told[0]
        assert name in told[0]
        shutil.rmtree(out)
        with pytest.raises(CheckpointError, match=name):
            onefold.export(place / "step-3", out)
        shutil.rmtree(place / "step-2")
        (place / "step-3").rename(place / "step-2")
        shutil.copytree(whole / "step-3", place / "step-3")
        harm(place, name, way)
        with pytest.raises(CheckpointError, match=f"step-.*{name}.*step-.*{name}"):
            onefold.export(place / "latest", out)
        assert not out.exists()
