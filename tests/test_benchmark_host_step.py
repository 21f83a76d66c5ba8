"""Promise: one command times the host's work of a step of Onefold's plans, DDP and FSDP2 in turns, and says how many
times each other's theirs is."""

import json
from pathlib import Path

import pytest

from forks import Forks

PROGRAM = Path(__file__).resolve().parent.parent / "benchmarks" / "host_step.py"
NAMES = ["ddp:fused", "fsdp2", "zero_0", "zero_2", "zero_3", "offload_3"]


@pytest.fixture(scope="module")
def run():
    forks = Forks()
    yield lambda *words: forks.run(PROGRAM, *words)
    forks.close()


def test_contenders_train_in_turns_and_are_compared(run, tmp_path):
    ran = run("--blocks", 2, "--steps", 3, "--json", tmp_path / "step.json", "--only", *NAMES)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads((tmp_path / "step.json").read_text())
    rows = {row["contender"]: row for row in told["rows"]}
    assert list(rows) == NAMES
    for row in rows.values():
        assert 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert row["busy_s"] > 0
        assert len(row["repetitions"]) == 3
        assert row["of"]["ddp"] is row["of"]["fsdp2:fused"] is None
        assert row["of"]["fsdp2"] == row["median_s"] / rows["fsdp2"]["median_s"]
        # All of them train the same model on the same tokens.
        assert row["losses"] == pytest.approx(rows["fsdp2"]["losses"], rel=1e-4)
    assert rows["zero_0"]["losses"] == rows["zero_2"]["losses"] == rows["zero_3"]["losses"]
    assert len(set(rows["zero_0"]["losses"])) == told["num_ranks"] == 2
    assert {"date", "versions", "cpu", "num_blocks", "steps"} <= set(told)
    assert all(name in ran.stdout for name in NAMES)


def test_one_rank_trains_too(run):
    ran = run("--ranks", 1, "--blocks", 1, "--steps", 2, "--only", "alone", "ddp", "zero_0")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--steps", 1), "--steps at least 2"),
        (("--ranks", 0), "are at least 1"),
        (("--only", "infinity"), "'infinity'"),
        (("--json", "no-such-folder/step.json"), "step.json cannot be written"),
    ],
    ids=str,
)
def test_what_cannot_be_timed_is_refused_first(run, words, why):
    ran = run(*words)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert why in ran.stderr
    assert "Traceback" not in ran.stderr
