"""Promise: a script written for DeepSpeed does the same after one import is changed, step by step.

The loops are in `deepspeed_loops.py`. DeepSpeed runs them in processes of its own, Onefold on the ranks of the pool.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import deepspeed_loops
from deepspeed_loops import VARIANTS
from onefold.deepspeed import DeepSpeedEngine
from onefold.deepspeed.names import way_out

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install deepspeed==0.19.8"
)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """What DeepSpeed's loops saw: by number of ranks, by variant."""
    directory = tmp_path_factory.mktemp("deepspeed")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, deepspeed_loops.__file__, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    seen = {num_ranks: torch.load(directory / f"{num_ranks}.pt", weights_only=True) for num_ranks in (1, 2)}
    return seen | {"names": (directory / "names.txt").read_text().split()}


def train(rank, num_ranks, name):
    import onefold.deepspeed as deepspeed

    return deepspeed_loops.train(deepspeed, name, rank, num_ranks)


TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3, "autocast": 2e-2}
"""Of losses and norms, of their size or of 1: DeepSpeed rounds sums of gradients at other places, to 16 bits."""


def tolerance_of(name):
    return next((bound for word, bound in TOLERANCE.items() if word in name), 1e-4)


@needs_deepspeed
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_one_changed_import_changes_nothing(theirs, ranks, num_ranks, name):
    want, got = theirs[num_ranks][name], ranks(num_ranks).run(train, name)[0]
    bound = tolerance_of(name)
    assert got["counts"] == want["counts"]
    assert got["boundaries"] == want["boundaries"]
    assert got.get("lengths") == want.get("lengths")
    assert got["scales"] == want["scales"]
    assert close(got["rates"], want["rates"], 1e-9)
    assert close(got["losses"], want["losses"], bound)
    norms = [(mine, other) for mine, other in zip(got["norms"], want["norms"], strict=True) if other is not None]
    applied = [(mine, other) for (mine, other), count in zip(norms, got["counts"], strict=False) if count[-1]]
    assert close([mine for mine, _ in applied], [other for _, other in applied], bound)


def close(got, want, bound):
    got, want = torch.tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)
    return True


@needs_deepspeed
def test_every_name_of_deepspeeds_engine_is_there_or_spoken_of(theirs):
    there = {*dir(DeepSpeedEngine), "is_compiled"}
    missing = [name for name in theirs["names"] if name not in there and way_out(name) is None]
    assert missing == []
