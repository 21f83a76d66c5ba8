"""Promise: one command times the host's part of a step of several systems, and tells where Onefold's goes."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent.parent / "benchmarks" / "host_time.py"


def test_rows_are_timed_and_this_packages_are_profiled(tmp_path):
    work = {"--device": "cpu", "--params": 0.004, "--layers": 1, "--context": 16, "--steps": 2, "--warm-up": 1}
    words = (PROGRAM, "zero_2:eager", "ddp:eager", "--functions", 40, "--json", tmp_path / "host.json")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [*torchrun, *words, *(word for pair in work.items() for word in pair)]
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ours, theirs = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert all(0 < row["host_s"] <= row["step_s"] for row in (ours, theirs))
    assert "functions" not in theirs
    assert len(ours["functions"]) == 40
    (step,) = (each for each in ours["functions"] if each["function"].endswith("step"))
    assert step["function"].startswith("optim/optimizer.py:")
    assert step["calls"] == 1
    assert all(each["function"] in ran.stdout for each in ours["functions"])
