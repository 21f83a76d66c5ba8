"""Promise: what a trace of a step shows is added up right: computing, traffic that is waited for, and empty time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def event(name, kind, start, duration, stream=7, correlation=0):
    details = {"stream": stream, "correlation": correlation}
    return {"ph": "X", "name": name, "cat": kind, "ts": 1000 + start, "dur": duration, "tid": stream, "args": details}


def launch(start, correlation):
    return event("cudaLaunchKernel", "cuda_runtime", start, 1, stream=1, correlation=correlation)


# The step: products on stream 7 with gaps of 100 us (a gather is waited for) and of 40 us (nothing runs).
TRACE = [
    event("step", "user_annotation", -900, 300),
    event("product of the step before", "kernel", -800, 200, correlation=1),
    launch(-850, 1),
    event("step", "user_annotation", 0, 500),
    *(launch(10 * number, number) for number in range(2, 7)),
    event("product one", "kernel", 20, 200, correlation=2),
    event("forward blocks.0", "gpu_user_annotation", 20, 200),
    event("ncclDevKernel_AllGather", "kernel", 150, 170, stream=20, correlation=3),
    event("gather blocks.1", "gpu_user_annotation", 150, 170, stream=20),
    event("product two", "kernel", 320, 100, correlation=4),
    event("Memcpy DtoD", "gpu_memcpy", 330, 50, stream=20, correlation=5),
    event("product three", "kernel", 460, 140, correlation=6),
    event("product that another step launched", "kernel", 700, 100, correlation=99),
]


def told(tmp_path, events, *words):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    command = [sys.executable, str(BENCHMARKS / "trace_report.py"), str(path), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_a_step_is_added_up_and_drawn(tmp_path):
    ran = told(tmp_path, TRACE, "--plot", tmp_path / "step.png")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "step 0.60 ms: computing 0.44, exposed traffic 0.10, empty 0.04"
    assert lines[1] == "host done after 0.50 ms, 5 launches"
    assert lines[2] == "under labels: forward 0.20, gather 0.17"
    assert lines[3] == "streams: 7: 0.44, 20: 0.22"
    assert lines[4] == "gaps: 0 up to 20 us 0.00, 2 up to 100 us 0.14, 0 up to 500 us 0.00, 0 up to 1e+06 us 0.00"
    assert " ".join(lines[6].split()) == "at 0.22: 0.100 ms (0.100 of them traffic) between product one and product two"
    assert (
        " ".join(lines[7].split()) == "at 0.42: 0.040 ms (0.000 of them traffic) between product two and product three"
    )
    work = [" ".join(line.split()) for line in lines[9:]]
    assert work[:2] == ["0.20 ms 1 x product one", "0.17 ms beside 1 x ncclDevKernel_AllGather"]
    assert len(work) == 5
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([each for each in TRACE if each["name"] != "step"], 'no record_function("step") marks a step'),
        ([each for each in TRACE if each["cat"] == "user_annotation"], "no GPU ran anything in the last step"),
    ],
    ids=["no step", "no GPU"],
)
def test_a_trace_without_a_step_is_refused(tmp_path, events, why):
    ran = told(tmp_path, events)
    assert ran.returncode == 2
    assert why in ran.stderr
