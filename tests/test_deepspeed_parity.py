"""Promise: a script written for DeepSpeed does the same after one import is changed, step by step.

The loops are in `deepspeed_loops.py`. DeepSpeed runs them in processes of its own, Onefold on the ranks of the pool.
"""

import pytest
import torch
from typer.testing import CliRunner

import deepspeed_loops
import deepspeed_truth
from apart import finish, start
from checks import refused
from deepspeed_loops import CASES
from onefold.cli.main import app
from onefold.deepspeed import DeepSpeedEngine
from onefold.deepspeed.unsupported_names import way_out
from onefold.errors import CheckpointError
from ranks import needs_deepspeed


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """What DeepSpeed's loops saw: by number of ranks, by variant."""
    directory = tmp_path_factory.mktemp("deepspeed")
    finish(start(deepspeed_truth.__file__, directory))
    seen = {num_ranks: torch.load(directory / f"{num_ranks}.pt", weights_only=True) for num_ranks in (1, 2)}
    return seen | {"directory": directory, "names": (directory / "names.txt").read_text().split()}


def train(rank, num_ranks, name):
    import onefold.deepspeed as deepspeed

    return deepspeed_loops.train(deepspeed, name, rank, num_ranks)


TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3, "autocast": 2e-2}
"""Of losses and norms, of their size or of 1: DeepSpeed rounds sums of gradients at other places, to 16 bits."""


def tolerance_of(name):
    return next((bound for word, bound in TOLERANCE.items() if word in name), 1e-6)


@needs_deepspeed
@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_one_changed_import_changes_nothing(theirs, ranks, num_ranks, name):
    want, got = theirs[num_ranks][name], ranks(num_ranks).run(train, name)[0]
    bound = tolerance_of(name)
    assert got["counts"] == want["counts"]
    assert got["boundaries"] == want["boundaries"]
    assert got.get("lengths") == want.get("lengths")
    assert got["scales"] == want["scales"]
    close(got["rates"], want["rates"], 1e-9)
    close(got["losses"], want["losses"], bound)
    norms = [(mine, other) for mine, other in zip(got["norms"], want["norms"], strict=True) if other is not None]
    applied = [(mine, other) for (mine, other), count in zip(norms, got["counts"], strict=False) if count[-1]]
    close([mine for mine, _ in applied], [other for _, other in applied], bound)


def go_on(rank, num_ranks, directory):
    import onefold.deepspeed as deepspeed

    return deepspeed_loops.resume(deepspeed, directory, "half", rank, num_ranks, is_there=True)


def not_gone_on(rank, num_ranks, directory):
    return refused(lambda: go_on(rank, num_ranks, directory), CheckpointError)


@needs_deepspeed
def test_a_run_that_deepspeed_began_goes_on_after_the_command_that_the_refusal_names(theirs, ranks):
    directory = theirs["directory"] / "run-2"
    first, second = ranks(2).run(not_gone_on, directory)
    assert "was written by DeepSpeed" in second
    assert "was written by DeepSpeed" in first
    command = next(line.split() for line in first.splitlines() if "import-deepspeed" in line)
    assert CliRunner().invoke(app(), command[1:]).exit_code == 0
    client_state, seen = ranks(2).run(go_on, f"{directory}-onefold")[0]
    assert client_state == {"epoch": 2}
    want = {name: values[deepspeed_loops.STOP :] for name, values in theirs[2]["resumed"].items()}
    micro_steps = [count.pop(3) for count in (*seen["counts"], *want["counts"])]
    assert micro_steps == [1, 2, 3, 4, 5, 6]  # they count from the start of a process, in DeepSpeed too
    assert seen["counts"] == want["counts"]
    assert seen["scales"] == want["scales"]
    close(seen["rates"], want["rates"], 1e-9)
    close(seen["losses"], want["losses"], TOLERANCE["fp16"])


def close(got, want, bound):
    got, want = torch.tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


@needs_deepspeed
def test_every_name_of_deepspeeds_engine_is_there_or_spoken_of(theirs):
    there = {*dir(DeepSpeedEngine), "is_compiled"}
    missing = [name for name in theirs["names"] if name not in there and way_out(name) is None]
    assert missing == []
