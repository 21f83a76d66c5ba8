"""Promise: one command finds the largest model that fits, between two sizes that were tried, or says why not."""

import json
import os
import subprocess
import sys
from pathlib import Path

PATH = os.environ.get("PYTHONPATH", "")
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


CASES = [(4, 9, 99, 8), (4, 4, 99, 4), (9, 4, 99, 3), (9, 3, 99, 3), (3, 0, 99, None), (5, 99, 9, 9), (2, 1, 99, None)]
"""Layers to begin with, layers that there is room for, layers to stop at, and the answer in strides of 2."""

# In a process of its own: other programs here have modules of the same names.
CLIMB = """
import json, sys
from largest import climb
answers = []
for first, room, most, _ in json.loads(sys.argv[1]):
    tried = []
    answers.append([climb(first, 2, most, lambda layers: tried.append(layers) or layers <= room), tried])
print(json.dumps(answers))
"""


def test_the_largest_that_fits_is_found_and_each_size_tried_once():
    words = [sys.executable, "-c", CLIMB, json.dumps(CASES)]
    ran = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": f"{PATH}:{BENCHMARKS}"}
    )
    assert ran.returncode == 0, ran.stderr
    for (_, room, most, wanted), (found, tried) in zip(CASES, json.loads(ran.stdout), strict=True):
        assert found == wanted
        assert len(set(tried)) == len(tried)
        if found is not None and found < most - 1:
            assert found + 2 in tried, room


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


def test_a_search_without_an_answer_is_written_too(tmp_path):
    words = ["--device", "cpu", "--params", "0.004", "--rows", "zero_3:eager", "--within-s", "0", "--first", "1"]
    program = [sys.executable, BENCHMARKS / "largest.py", *words, "--json", str(tmp_path / "largest.json")]
    assert subprocess.run(program, capture_output=True, text=True).returncode == 1
    told = json.loads((tmp_path / "largest.json").read_text())
    assert told["largest"]["zero_3:eager"] == {"error": "not finished: 0 s were over"}


CUT_SHORT = """
import sys
import largest
rows = iter([{"num_params": 10**9}, {"num_params": 2 * 10**9}, {"error": "stopped after 3 s"}])
largest.apart = lambda *_: next(rows)
search = largest.Search(largest.parse())
search.run()
print(search.told["largest"]["zero_3:eager"]["error"])
"""


def test_what_fitted_is_told_where_the_search_was_cut_short():
    words = ["--device", "cpu", "--params", "0.004", "--rows", "zero_3:eager", "--first", "2", "--stride", "1"]
    program = [sys.executable, "-c", CUT_SHORT, *words]
    said = subprocess.run(program, capture_output=True, text=True, check=True, cwd=BENCHMARKS).stdout.splitlines()[-1]
    assert said == "4 layers ended without an answer: stopped after 3 s; 3 layers fit, 2.00e9 parameters"
