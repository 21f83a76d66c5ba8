"""Promise: one command times gathers and reductions both ways, alone and beside computation."""

import json
import subprocess
import sys
from pathlib import Path

WIRE = Path(__file__).resolve().parent.parent / "benchmarks" / "wire.py"


def test_both_ways_are_timed(tmp_path):
    words = (WIRE, "--numel", 10_000, "--repeats", 1, "--json", tmp_path / "wire.json")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ran = subprocess.run([*torchrun, *map(str, words)], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads((tmp_path / "wire.json").read_text())
    names = ["gather, collective", "gather, copies", "reduce, collective", "reduce, copies"]
    names += ["reduce, pull and sum", "collect, one kernel", "collect, copies"]
    assert [row["row"] for row in told["rows"]] == names
    assert all(row["alone_s"] > 0 and row["beside_s"] > 0 and row["bytes_per_second"] > 0 for row in told["rows"])
    assert told["numel"] == 10_016
    assert {"date", "versions", "cpu", "num_ranks"} <= set(told)
    assert all(name in ran.stdout for name in names)
