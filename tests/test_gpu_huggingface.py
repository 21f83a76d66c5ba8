"""Promise: transformers' Trainer trains on GPUs in fp32, bf16 and fp16 as it does everywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_models import NUM_GPUS, gpus

BOUNDS = {"bf16": 5e-2, "fp16": 1e-2}
"""Of 16-bit losses, beside fp32's; fp32's is 1e-4."""


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Of every case, by name: one run of the script for all of them."""
    folder = tmp_path_factory.mktemp("trainer")
    script = Path(__file__).parent / "helpers" / "gpu_trainer.py"
    words = [sys.executable, "-m", "onefold", "run", "--nproc", str(min(2, NUM_GPUS)), script]
    ran = subprocess.run(
        [*map(str, words), str(folder / "losses.json"), str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
    return json.loads((folder / "losses.json").read_text())


@gpus(1)
@pytest.mark.parametrize(
    "name", ["zero3", "zero2-offload", "zero2-bf16", "zero3-bf16", "zero3-bf16-offload", "zero2-fp16"]
)
def test_the_trainer_computes_the_same_wherever_state_rests(losses, name):
    bound = next((bound for word, bound in BOUNDS.items() if word in name), 1e-4)
    assert losses[name] == pytest.approx(losses["zero2"], rel=bound, abs=bound)


@gpus(1)
def test_optimizer_and_schedule_of_the_configuration_are_used(losses):
    assert losses["zero3-own"][0] == pytest.approx(losses["zero2"][0], rel=1e-4)
    assert losses["zero3-own"] != pytest.approx(losses["zero2"], rel=1e-4)
