"""Promise: the model of a step gives back what was measured, and changes with what it is made of."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parent.parent / "benchmarks" / "step_model.py"
PARAMS, UNIT = 6_400_000, 200_000
# Seconds on 2 GPUs: the update, and gradients into buffers, at 1e9 bytes a second; 64 gathers; 32 reductions.
UPDATE, COPIES, GATHERS, REDUCTIONS = 26 * PARAMS / 2 / 1e9, 4 * PARAMS / 1e9, 64 * 0.001, 32 * 0.002


def model(folder, *words, check=True):
    row = {"num_params": PARAMS, "num_ranks": 2}
    rows = [{**row, "system": "limit", "seconds": 0.8}, {**row, "system": "zero_3", "seconds": 1.1}]
    costs = [{"row": "gather, copies", "cost_s": 0.001}, {"row": "reduce, collective", "cost_s": 0.002}]
    costs.append({"row": "reduce, copies", "cost_s": 0.001})
    (folder / "train.json").write_text(json.dumps({"runs": [{"rows": rows}]}))
    (folder / "wire.json").write_text(json.dumps({"num_ranks": 2, "numel": UNIT, "rows": costs}))
    files = ("--train", folder / "train.json", "--wire", folder / "wire.json", "--copy-bytes-s", 1e9)
    command = [sys.executable, PROGRAM, *files, *words]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, check=check)


def steps(folder, *words):
    """Seconds by number of GPUs."""
    lines = [line.split("|") for line in model(folder, *words).stdout.splitlines() if line.startswith("| ")]
    return {int(cells[1]): (float(cells[2]) / 1e3, cells[4].strip()) for cells in lines[1:]}


def test_it_is_what_was_measured_and_more_ranks_update_less_and_receive_more(tmp_path):
    found = steps(tmp_path, "--gpus", 2, 4, 8)
    assert found[2] == (1.1, "measured")
    more = {4: (UPDATE / 2, 1.5), 8: (UPDATE / 4, 1.75)}
    for num_gpus, (update, times) in more.items():
        want = 1.1 + update - UPDATE + (times - 1) * (GATHERS + REDUCTIONS)
        assert found[num_gpus] == (pytest.approx(want, abs=1e-3), "prediction")


def test_copies_take_gradients_from_where_they_are(tmp_path):
    found = steps(tmp_path, "--gpus", 2, 4, "--reduce", "reduce, copies")
    want = 1.1 + UPDATE / 2 - UPDATE + 0.5 * (GATHERS + REDUCTIONS / 2)
    assert found[4] == (pytest.approx(want, abs=1e-3), "prediction")


def test_a_network_counts_only_where_backward_does_not_hide_it(tmp_path):
    fast, slow = (steps(tmp_path, "--gpus", 8, 16, "--nic-bytes-s", rate) for rate in (50e9, 1e6))
    assert fast[16][0] == fast[8][0] == slow[8][0]
    assert slow[16][0] == pytest.approx(slow[8][0] + 2 * PARAMS / 8 / 1e6 - 0.75 * 0.8, abs=1e-3)


def test_a_run_without_the_row_is_refused(tmp_path):
    ran = model(tmp_path, "--row", "zero_3:eager", check=False)
    assert ran.returncode == 2
    assert "the run holds limit, zero_3, not" in ran.stderr
