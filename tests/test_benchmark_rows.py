"""Promise: a row of a benchmark that fails, or whose program is stopped, takes nothing with it and leaves nothing
behind; what cannot be measured or written is refused before anything is measured.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forks import Forks

PATH = os.environ.get("PYTHONPATH", "")
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PLACE = {**os.environ, "PYTHONPATH": f"{PATH}:{BENCHMARKS}"}

# In a process of its own: other programs here have modules of the same names.
APART = """
import json, signal, sys
from workload import apart, end_in_order
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in what runs in the background
end_in_order()
print(json.dumps(apart("row", [sys.executable, "-c", sys.argv[1]], 600)))
"""


def row_of(program):
    ran = subprocess.run([sys.executable, "-c", APART, program], capture_output=True, text=True, env=PLACE)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ('{"system": "row", "error": "first"}{"system": "row", "error": "second"}', "first"),
        ('{"system": "row", "err{"system": "row", "error": "cut"}', "exit code 3; it said last: "),
    ],
    ids=["side by side", "mixed up"],
)
def test_ranks_that_fail_at_once_are_told_from_each_other(said, error):
    assert row_of(f"print({said!r}); raise SystemExit(3)")["error"].startswith(error)


WAITS = "import os, signal; print('row: is', os.getpid(), flush=True); signal.pause()"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT], ids=lambda end: end.name)
def test_a_row_ends_with_the_program_that_runs_it(end):
    program = subprocess.Popen([sys.executable, "-c", APART, WAITS], stdout=subprocess.PIPE, text=True, env=PLACE)
    row = int(program.stdout.readline().split()[-1])
    try:
        program.send_signal(end)
        program.communicate(timeout=60)
        assert program.returncode != 0
        with pytest.raises(ProcessLookupError):
            os.kill(row, 0)
    finally:
        program.kill()


@pytest.fixture(scope="module")
def forks():
    process = Forks()
    yield process
    process.close()


def refused(forks, name, *words):
    """What a program said that ends in the way of argument parsers."""
    ran = forks.run(BENCHMARKS / name, *words)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    return ran.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--rows", "--merge", "not-there.json"), "not-there.json"),
        (("--rows", "--merge", BENCHMARKS / "results" / "wire-2xh200.json"), "holds no runs of train.py"),
        (("--rows", "zero_3:eager", "--json", "no-such-folder/run.json"), "run.json cannot be written"),
        (("--rows", "zero_3:eager", "--plot", "plot.txt"), "give a name that ends in one of"),
        (("--rows", "zero_3:keep=inf"), "'zero_3:keep=inf': 'inf' is no number of GiB"),
        (("--rows", "zero_3:keep=some"), "'zero_3:keep=some': 'some' is no number of GiB"),
        (("--rows", "zero_3:eager=3"), "zero_3 has no option 'eager=3'"),
        (("--rows", "zero_3:copy+collective"), "zero_3 has no option 'collective' beside 'copy'"),
        (("--rows", "zero_3:eager", "--layers", "0"), "are at least 1"),
        (("--rows", "zero_3:eager", "--card-gib", "-1"), "a card has more"),
        (("--rows", "zero_3:eager", "--row-limit-s", "nan"), "invalid seconds value: 'nan'"),
        (("--rows", "zero_3:eager", "--within-s", "-5"), "invalid seconds value: '-5'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(map(str, value[1:3])),
)
def test_train_refuses_before_it_measures(forks, words, why):
    assert why in refused(forks, "train.py", "--device", "cpu", *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", [("train.py",), ("largest.py", "--ranks", "2"), ("train_rows.py", "zero_3")], ids=str)
def test_programs_for_gpus_say_that_there_is_none(forks, words):
    assert "there is no GPU; --device cpu" in refused(forks, *words)


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py")))
def test_every_program_starts_as_a_module_too(forks, name):
    ran = forks.run(f"benchmarks.{name}", "--help", cwd=BENCHMARKS.parent)
    assert ran.returncode == 0, ran.stderr


RESULTS = BENCHMARKS / "results"
WIRE = ("--wire", RESULTS / "wire-2xh200.json")
TRAIN = ("--train", RESULTS / "train-2xh200-6.74b.json")


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("step_model.py", (*WIRE, "--train", "not-there.json"), "not-there.json"),
        ("step_model.py", (*WIRE, "--train", WIRE[1]), "--train is a file that train.py wrote"),
        ("step_model.py", (*WIRE, "--train", RESULTS / "train-4xh200-6.74b.json"), "on 2 GPUs, as many as the wire's"),
        ("step_model.py", (*WIRE, *TRAIN, "--gather", "by hand"), "by hand and reduce"),
        ("step_model.py", (*WIRE, *TRAIN, "--gpus", 12), "fill whole machines"),
        ("step_model.py", (*WIRE, *TRAIN, "--gpus", 0), "are more than 0"),
        ("offload.py", ("--plans", "half"), "'half' is no plan"),
        ("offload.py", ("--plans", "offload:2"), "in [0, 1]"),
        ("trace_report.py", ("not-there.json",), "not-there.json"),
        ("trace_report.py", (RESULTS / "trace-2xh200-zero_3.json",), "no Chrome trace"),
        ("largest.py", ("--device", "cpu", "--first", 5, "--most", 4), "--first is at most --most"),
        ("host_time.py", ("zero_2", "--device", "cpu"), "start it with torchrun"),
        ("trace.py", ("zero_2", "--device", "cpu"), "without a GPU"),
        ("wire.py", ("--numel", 1000), "start it with torchrun"),
        ("train_rows.py", ("limit", "--device", "cpu", "--warm-up", 0), "are at least 1"),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(value)[:40],
)
def test_other_programs_say_what_is_wrong(forks, name, words, why):
    assert why in refused(forks, name, *words)
