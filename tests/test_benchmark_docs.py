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
    "DDP": "ddp",
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
    "E": "train-2xh200-1.35b-again",
    "F": "train-1xh200-1.35b",
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


def table_lines(begin, end):
    """The cells of table rows between two words of the text."""
    lines = TEXT[TEXT.index(begin) : TEXT.index(end)].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_tables_of_steps_are_the_runs():
    wrong, found = [], 0
    for cells in table_lines("## What a step costs", "125e6 parameters"):
        if cells[0] not in NAMES:
            continue
        measured = rows(FILES[cells[5] if len(cells) > 5 else "A"])
        wanted = [*figures(measured, NAMES[cells[0]]), measured[NAMES[cells[0]]]["tokens_per_second"]]
        shown = [*cells[1:5], *cells[6:]]
        wrong += [(cells, value) for cell, value in zip(shown, wanted, strict=False) if not near(cell, value)]
        found += 1
    assert not wrong
    assert found == 26


def test_the_largest_models_are_the_trials():
    told = json.loads((ROOT / "benchmarks" / "results" / "largest-2xh200.json").read_text())
    rows = {
        NAMES[cells[0]]: cells for cells in table_lines("## The largest model", "## What bounds") if cells[0] in NAMES
    }
    assert set(rows) == {"zero_3:eager", "fsdp2:eager", "deepspeed_3:eager"}
    trials = [trial for run in told for trial in run["trials"]]
    for system, cells in rows.items():
        mine = [trial for trial in trials if trial["system"] == system]
        best = max((trial for trial in mine if "seconds" in trial), key=lambda trial: trial["layers"])
        assert int(cells[2]) == best["layers"]
        assert any(trial["layers"] == best["layers"] + 2 and "out of memory" in trial["error"] for trial in mine)
        figures = (best["num_params"] / 1e9, best["peak_allocated_bytes"] / GIB, best["seconds"])
        assert all(near(cells[place], value) for place, value in zip((1, 3, 4), figures, strict=True))


def test_what_keeping_units_gave_is_the_runs():
    (gave,) = re.findall(r"and gave ([\d.]+), for 9 GiB", TEXT)
    measured = rows("train-2xh200-6.74b")
    assert near(gave, 1e3 * (measured["zero_3"]["seconds"] - measured["zero_3:keep"]["seconds"]))
