"""Promise: one command finds the largest model that fits, between two sizes that were tried, or says why not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def climb(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__("largest").climb


@pytest.mark.parametrize(
    ("first", "room", "most", "found"),
    [(4, 9, 99, 8), (4, 4, 99, 4), (9, 4, 99, 3), (9, 3, 99, 3), (3, 0, 99, None), (5, 99, 9, 9), (2, 1, 99, None)],
)
def test_the_largest_that_fits_is_found_and_each_size_tried_once(climb, first, room, most, found):
    tried = []

    def fits(layers):
        tried.append(layers)
        return layers <= room

    assert climb(first, 2, most, fits) == found
    assert len(set(tried)) == len(tried)
    if found is not None and found < most - 1:
        assert found + 2 in tried


def test_the_program_tells_what_it_tried(tmp_path):
    words = ["--device", "cpu", "--params", "0.004", "--context", "16", "--ranks", "1", "--first", "1", "--most", "1"]
    where = ["--rows", "zero_3:eager", "nothing", "--json", str(tmp_path / "largest.json")]
    program = [sys.executable, BENCHMARKS / "largest.py"]
    refused = subprocess.run([*program, *words, *where], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "the systems are" in refused.stderr
    where.remove("nothing")
    ran = subprocess.run([*program, *words, *where], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads((tmp_path / "largest.json").read_text())
    assert told["largest"]["zero_3:eager"]["layers"] == 1
    assert [trial["layers"] for trial in told["trials"]] == [1]
    assert "| zero_3:eager | 0.00 | 1 |" in ran.stdout
