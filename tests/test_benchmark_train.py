"""Promise: one command measures systems side by side on several ranks, and tells what it found: JSON with every
repetition, a table and a plot in which a row is held against the limit of its own run.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
WORK = {"--params": 0.004, "--layers": 1, "--batch": 1, "--context": 16, "--steps": 2, "--warm-up": 1}
TINY = [word for pair in {"--device": "cpu", "--ranks": 2, **WORK}.items() for word in pair]


def train(*words, code=0):
    """The program's output; it has to end well, or with that code."""
    command = [sys.executable, str(BENCHMARKS / "train.py"), *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The files that one small run wrote."""
    folder = tmp_path_factory.mktemp("train")
    words = ("--rows", "zero_3:eager+keep=1", "--within-s", 500)
    files = {name: folder / f"run.{name}" for name in ("json", "table", "plot")}
    files["plot"] = folder / "run.png"
    train(*words, *TINY, *(word for name, path in files.items() for word in (f"--{name}", path)))
    return files


def test_a_run_keeps_every_repetition_and_what_it_ran_on(measured):
    (run,) = json.loads(measured["json"].read_text())["runs"]
    assert [row["system"] for row in run["rows"]] == ["limit:eager", "zero_3:eager+keep=1"]
    for row in run["rows"]:
        assert [len(each) for each in row["repetitions"]] == [2, 2]
        assert min(min(each) for each in row["repetitions"]) <= row["seconds"]
        assert len(row["losses"]) == 3
    assert run["rows"][1]["kept_bytes"] > 0
    assert run["rows"][1]["losses"][2] < run["rows"][1]["losses"][0]
    assert {"date", "versions", "cards", "links", "cpu", "driver", "command"} <= set(run)


def test_a_run_is_shown(measured):
    assert "| zero_3:eager+keep=1 | 2 |" in measured["table"].read_text()
    assert measured["plot"].read_bytes().startswith(b"\x89PNG")


def row(system, seconds, num_ranks=4, **other):
    peak = {"peak_allocated_bytes": 2**30, "peak_reserved_bytes": 3 * 2**29, "repetitions": [[seconds]]}
    speed = {"tokens_per_second": 8192 / seconds, "flops_per_second": 4e14 / seconds}
    return {"system": system, "seconds": seconds, "num_ranks": num_ranks, **peak, **speed, **other}


def run(*rows, **work):
    work = {"params": 6.74, "layers": None, "batch": 2, "context": 4096, "checkpointing": True, **work}
    facts = {"date": "2026-01-01", "driver": "1", "cuda": "13", "cpu": "c", "cores": 2, "cards": ["H"] * 4, "steps": 8}
    return {**facts, "versions": {"torch": "2.11", "deepspeed": "not installed"}, "work": work, "rows": list(rows)}


def merged(tmp_path, *runs):
    """The table of runs that lie in a file each."""
    files = []
    for index, each in enumerate(runs):
        files.append(tmp_path / f"{index}.json")
        files[-1].write_text(json.dumps({"runs": [each]}))
    train("--rows", "--merge", *files, "--table", tmp_path / "all.md", "--json", tmp_path / "all.json")
    assert json.loads((tmp_path / "all.json").read_text())["runs"] == list(runs)
    return (tmp_path / "all.md").read_text()


def test_runs_are_merged_each_with_its_own_limit(tmp_path):
    first = run(row("limit", 1.0), row("limit:eager", 2.0), row("zero_3", 1.1), row("fsdp2:eager", 2.5))
    second = run(row("limit", 2.0), row("fsdp2", 2.4), {"system": "deepspeed_3", "num_ranks": 4, "error": "ran | out"})
    other = run(row("limit", 1.0, 1), row("zero_2", 1.5, 2), batch=4, checkpointing=False)
    lines = merged(tmp_path, first, second, other).splitlines()
    assert "| zero_3 | 4 | 1.100 | 7447 | 363.6 | 1.100 | 1.00 | 1.50 | A |" in lines
    assert "| fsdp2:eager | 4 | 2.500 | 3277 | 160.0 | 1.250 | 1.00 | 1.50 | A |" in lines
    assert "| fsdp2 | 4 | 2.400 | 3413 | 166.7 | 1.200 | 1.00 | 1.50 | B |" in lines
    assert "| deepspeed_3 | 4 | no time: ran / out |  |  |  |  |  | B |" in lines
    assert "| zero_2 | 2 | 1.500 | 5461 | 266.7 |  | 1.00 | 1.50 | C |" in lines  # no limit on two ranks
    assert [each for each in lines if each.startswith("###")] == [
        "### 6.74e9 parameters, 2 x 4096 tokens a GPU, full checkpointing",
        "### 6.74e9 parameters, 4 x 4096 tokens a GPU, no checkpointing",
    ]


@pytest.mark.parametrize("words", [("--rows", "ddp:keep"), ("--rows", "--merge")], ids=["no such row", "nothing"])
def test_what_cannot_be_measured_is_refused(words):
    ran = subprocess.run([sys.executable, BENCHMARKS / "train.py", *words], capture_output=True, text=True, timeout=600)
    assert ran.returncode != 0
    assert "Traceback" not in ran.stderr


def test_a_row_that_fails_tells_why(tmp_path):
    train("--rows", "zero_3:eager", *TINY, "--within-s", 0, "--json", tmp_path / "late.json", code=1)
    (late,) = json.loads((tmp_path / "late.json").read_text())["runs"]
    assert all("not started" in each["error"] for each in late["rows"])
