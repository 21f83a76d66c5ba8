"""Promise: what docs/performance.md says of training steps is what lies in benchmarks/results."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "performance.md").read_text()
GIB = 2**30
NAMES = {
    "limit": "limit",
    "limit, eager": "limit:eager",
    "`ZERO_3`": "zero_3",
    "`ZERO_3`, eager": "zero_3:eager",
    "`ZERO_3` (gathers by copies, chosen by itself)": "zero_3",
    '`ZERO_3`, `gather="collective"`': "zero_3:collective",
    '`ZERO_3`, `keep_bytes="auto"`': "zero_3:keep",
    "`ZERO_2`": "zero_2",
    "FSDP2": "fsdp2",
    "FSDP2, eager": "fsdp2:eager",
    "DeepSpeed ZeRO-3, eager": "deepspeed_3:eager",
    "DeepSpeed ZeRO-2, eager": "deepspeed_2:eager",
}
FILES = {
    "A": "train-4xh200-6.74b",
    "B": "train-2xh200-6.74b",
    "C": "train-2xh200-6.74b-again",
    "D": "train-2xh200-6.74b-fourth",
}


def rows(file):
    (run,) = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())["runs"]
    return {row["system"]: row for row in run["rows"] if "seconds" in row}


def figures(measured, system):
    """Step, tax, peak, reserved over allocated: as the tables have them."""
    row, limit = measured[system], measured["limit:eager" if system.endswith(":eager") else "limit"]
    peak, reserved = row["peak_allocated_bytes"], row["peak_reserved_bytes"]
    return row["seconds"], row["seconds"] / limit["seconds"], peak / GIB, reserved / peak


def near(cell, value):
    """Whether a printed figure is the value, rounded to its last place."""
    unit = 10.0 ** -len(cell.partition(".")[2])
    return abs(float(cell) - value) <= 0.501 * unit


def test_tables_of_steps_are_the_runs():
    wrong, found = [], 0
    for line in TEXT[: TEXT.index("## What bounds a step")].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] not in NAMES:
            continue
        run = cells[5] if len(cells) > 5 else "A"
        wanted = figures(rows(FILES[run]), NAMES[cells[0]])
        wrong += [(line, value) for cell, value in zip(cells[1:5], wanted, strict=True) if not near(cell, value)]
        found += 1
    assert not wrong
    assert found == 20


def test_the_peaks_of_the_smaller_model_are_the_runs():
    peaks, reserved = re.search(r"Peaks: (.*) GiB \(reserved (.*)\)", TEXT).groups()
    measured = rows("train-2xh200-1.35b")
    for system, peak, all_of_it in zip(
        ("zero_2", "ddp", "fsdp2"), re.findall(r"[\d.]+", peaks), re.findall(r"[\d.]+", reserved), strict=True
    ):
        assert near(peak, measured[system]["peak_allocated_bytes"] / GIB)
        assert near(all_of_it, measured[system]["peak_reserved_bytes"] / GIB)


def test_what_keeping_units_gave_is_the_runs():
    (gave,) = re.findall(r"and gave ([\d.]+), for 9 GiB", TEXT)
    measured = rows("train-2xh200-6.74b")
    assert near(gave, 1e3 * (measured["zero_3"]["seconds"] - measured["zero_3:keep"]["seconds"]))
