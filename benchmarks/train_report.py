"""What `train.py` shows of its runs: a Markdown table, and a plot of step times and memory.

A run is what one command measured on one machine. Runs lie side by side, and a row's tax is its step over the limit of
its own run, on as many GPUs, compiled or eager as the row is: absolute times of two machines say nothing together.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from rows import Row

GIB = 2**30
WORK = ("params", "layers", "batch", "context", "checkpointing")
"""What makes steps comparable."""
HEAD = "| system | GPUs | step s | tokens/s a GPU | TFLOP/s a GPU | tax | peak GiB | reserved / allocated | run |"

Run = Mapping[str, Any]


def load(paths: Sequence[str]) -> list[Run]:
    """The runs in files that `train.py` wrote, in their order.

    Raises:
        OSError, ValueError: a file cannot be read, or holds something else.
    """
    runs: list[Run] = []
    for path in paths:
        what = f"{path} holds no runs of train.py: give a file that --json wrote"
        try:
            found = json.loads(Path(path).read_text())
        except ValueError:
            raise ValueError(what) from None
        several = found.get("runs") if isinstance(found, dict) else None
        if not isinstance(several, list) or not all(_is_run(each) for each in several):
            raise ValueError(what)
        runs += several
    return runs


def _is_run(found: Any) -> bool:
    return isinstance(found, dict) and "rows" in found and set(WORK) <= set(found.get("work", ()))


def letter(index: int) -> str:
    return ascii_uppercase[index] if index < len(ascii_uppercase) else str(index + 1)


def tax(run: Run, row: Mapping[str, Any]) -> float | None:
    """Step over the compute limit of the same run; None where that has no such limit."""
    want = Row.parse(row["system"]).limit
    for other in run["rows"]:
        if other["system"] == want and other["num_ranks"] == row["num_ranks"] and "seconds" in other:
            return float(row["seconds"] / other["seconds"])
    return None


def workloads(runs: Sequence[Run]) -> Iterator[tuple[Run, list[tuple[int, Run]]]]:
    """Runs of the same work together: the first of them, and all with their numbers."""
    groups: dict[tuple[Any, ...], list[tuple[int, Run]]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(tuple(run["work"][key] for key in WORK), []).append((index, run))
    for group in groups.values():
        yield group[0][1], group


def title(run: Run) -> str:
    work = run["work"]
    layers = "" if work["layers"] is None else f" with {work['layers']} layers"
    checkpoints = "full checkpointing" if work["checkpointing"] else "no checkpointing"
    return f"{work['params']:g}e9 parameters{layers}, {work['batch']} x {work['context']} tokens a GPU, {checkpoints}"


def line(index: int, run: Run, row: Mapping[str, Any]) -> str:
    cells = [row["system"], str(row["num_ranks"])]
    if "error" in row:
        cells += ["no time: " + row["error"].replace("|", "/").replace("\n", " "), "", "", "", "", ""]
    else:
        times, allocated, reserved = tax(run, row), row["peak_allocated_bytes"], row["peak_reserved_bytes"]
        cells += [
            f"{row['seconds']:.3f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['flops_per_second'] / 1e12:.1f}",
            "" if times is None else f"{times:.3f}",
            f"{allocated / GIB:.2f}" if allocated else "",
            f"{reserved / allocated:.2f}" if allocated else "",
        ]
    return f"| {' | '.join([*cells, letter(index)])} |"


def table(runs: Sequence[Run]) -> str:
    """The runs in Markdown: a table for each workload, then what the runs ran on."""
    parts = []
    for first, group in workloads(runs):
        lines = [f"### {title(first)}", "", HEAD, "|---|" + "---:|" * 7 + "---|"]
        lines += [line(index, run, row) for index, run in group for row in run["rows"]]
        parts.append("\n".join(lines))
    about = []
    for index, run in enumerate(runs):
        versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items() if number[0].isdigit())
        cards = run["cards"][0] if run["cards"] else run["cpu"]
        about.append(
            f"- Run {letter(index)}: {run['date']}, {len(run['cards']) or run['cores']} x {cards}, driver "
            f"{run['driver']}, CUDA {run['cuda']}; {versions}. Medians of {run['steps']} steps."
        )
    return "\n\n".join([*parts, "\n".join(about)]) + "\n"


def problem_of_plot(path: str) -> str | None:
    """Why no plot can be drawn to `path`, if so."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "--plot needs matplotlib: pip install matplotlib"
    kinds = Figure().canvas.get_supported_filetypes()
    kind = Path(path).suffix.removeprefix(".") or "png"
    return None if kind.lower() in kinds else f"--plot {path}: give a name that ends in one of .{', .'.join(kinds)}"


def plot(runs: Sequence[Run], path: str) -> None:
    """Draw step times, with the limits as lines, and peak memory of each workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(workloads(runs))
    longest = max(sum(len(run["rows"]) for _, run in group) for _, group in groups)
    figure, axes = pyplot.subplots(
        len(groups), 2, figsize=(13, len(groups) * (1.4 + 0.3 * longest)), squeeze=False, layout="constrained"
    )
    for (first, group), (times, memory) in zip(groups, axes, strict=True):
        rows = [(index, run, row) for index, run in group for row in run["rows"] if "seconds" in row]
        names = [f"{row['system']}, {row['num_ranks']} GPUs, run {letter(index)}" for index, _, row in rows]
        colors = ["#8a8a85" if row["system"].startswith("limit") else "#4a6f8a" for _, _, row in rows]
        places = range(len(rows))
        times.barh(places, [row["seconds"] for _, _, row in rows], color=colors)
        for place, (_, run, row) in enumerate(rows):
            over = tax(run, row)
            times.text(row["seconds"], place, "" if over is None else f" {over:.2f}", va="center")
        memory.barh(places, [row["peak_reserved_bytes"] / GIB for _, _, row in rows], color="#dfe6eb")
        memory.barh(places, [row["peak_allocated_bytes"] / GIB for _, _, row in rows], color=colors)
        times.set(yticks=places, yticklabels=names, xlabel="seconds a step; the number is step / limit")
        times.margins(x=0.12)
        memory.set(yticks=[], xlabel="GiB at the peak: allocated, and reserved behind it")
        times.set_title(title(first), loc="left", fontsize=10)
        for each in (times, memory):
            each.invert_yaxis()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
