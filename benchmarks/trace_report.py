"""Reads a profiler's trace of one training step on a GPU: what ran on which stream, and what the step waited for.

    python benchmarks/trace_report.py TRACE.json [--plot FILE]

TRACE.json is what `trace.py` exports, or any Chrome trace of torch.profiler in which `record_function("step")` marks
steps; the last one is read. The computation's stream is the one with the most kernel time. A gap is a time in which it
runs nothing; a gap is exposed traffic while another stream works, and an empty GPU while none does.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LABEL = "gpu_user_annotation"
STEP = "step"
VERBS = ("forward", "gather", "reduce", "update", "refresh")
_SHORT_US = 2.0
"""A pause between two kernels that were launched in time."""

Span = tuple[float, float]

_GAP_SIZES_US = (20.0, 100.0, 500.0, 1e6)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that ran on a GPU's stream, or a label over it; microseconds."""

    name: str
    kind: str
    stream: int
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step ran; times in microseconds since it began on the host."""

    events: Sequence[Event]
    labels: Sequence[Event]
    host_us: float
    """Until the host had launched everything."""

    @property
    def stop(self) -> float:
        return max(event.stop for event in self.events)

    @property
    def streams(self) -> list[int]:
        """The computation's first, then by time."""
        busy: dict[int, float] = defaultdict(float)
        for event in self.events:
            busy[event.stream] += (event.stop - event.start) * (event.kind == "kernel" and "nccl" not in event.name)
        return sorted(busy, key=lambda stream: -busy[stream])

    def busy(self, streams: Iterable[int]) -> list[Span]:
        """When any of `streams` runs something, in order, without overlaps."""
        wanted = set(streams)
        return union((event.start, event.stop) for event in self.events if event.stream in wanted)

    def gaps(self) -> list[Span]:
        """When the computation's stream runs nothing, between the step's first event and its last."""
        begin = min(event.start for event in self.events)
        edges = [(begin, begin), *self.busy(self.streams[:1]), (self.stop, self.stop)]
        return [(end, start) for (_, end), (start, _) in pairwise(edges) if start - end > _SHORT_US]

    def around(self, gap: Span) -> tuple[str, str]:
        """The names of the computation's events before and after a gap."""
        mine = [event for event in self.events if event.stream == self.streams[0]]
        before = max((event for event in mine if event.stop <= gap[0]), key=lambda event: event.stop, default=None)
        after = min((event for event in mine if event.start >= gap[1]), key=lambda event: event.start, default=None)
        return before.name if before else "the step's start", after.name if after else "the step's end"

    def by_verb(self) -> dict[str, float]:
        """Microseconds under each kind of label, on whatever stream."""
        totals: dict[str, float] = defaultdict(float)
        for verb in VERBS:
            for stream in {label.stream for label in self.labels}:
                spans = (
                    (label.start, label.stop)
                    for label in self.labels
                    if label.stream == stream and label.name.split(" ")[0] == verb
                )
                totals[verb] += length(union(spans))
        return {verb: total for verb, total in totals.items() if total}


def union(spans: Iterable[Span]) -> list[Span]:
    """The same points in time, in order, without overlaps."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def common(some: Sequence[Span], others: Sequence[Span]) -> float:
    """For how long both are true."""
    return length(some) + length(others) - length(union([*some, *others]))


def read(trace: Mapping[str, Any]) -> Step:
    """The last step of a trace.

    Raises:
        ValueError: it is no trace, marks no step, or no GPU ran anything in it.
    """
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError("this is no Chrome trace: it holds no traceEvents")
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = [each for each in events if each["name"] == STEP and each.get("cat") == "user_annotation"]
    if not marks:
        raise ValueError(f'no record_function("{STEP}") marks a step in this trace')
    mark = max(marks, key=lambda each: each["ts"])
    begin, end = float(mark["ts"]), float(mark["ts"] + mark["dur"])
    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= event["ts"] <= end
    }
    found: list[Event] = []
    for event in events:
        kind, details = event.get("cat"), event.get("args", {})
        is_ours = kind in WORK and details.get("correlation") in launched
        if is_ours or (kind == LABEL and begin <= event["ts"] <= end and event["name"] != STEP):
            start = float(event["ts"]) - begin
            stream = int(details.get("stream", event["tid"]))
            found.append(
                Event(name=event["name"], kind=kind, stream=stream, start=start, stop=start + float(event["dur"]))
            )
    work, labels = [each for each in found if each.kind != LABEL], [each for each in found if each.kind == LABEL]
    if not work:
        raise ValueError("no GPU ran anything in the last step of this trace")
    return Step(events=work, labels=labels, host_us=end - begin)


def summary(step: Step, num_gaps: int = 8) -> dict[str, Any]:
    """The figures of a step, in milliseconds."""
    first, *others = step.streams
    gaps, beside = step.gaps(), step.busy(others)
    exposed = common(gaps, beside)
    return {
        "step_ms": step.stop / 1e3,
        "host_ms": step.host_us / 1e3,
        "busy_ms": length(step.busy([first])) / 1e3,
        "gaps_ms": length(gaps) / 1e3,
        "exposed_ms": exposed / 1e3,
        "empty_ms": (length(gaps) - exposed) / 1e3,
        "num_launches": len(step.events),
        "streams_ms": {str(stream): length(step.busy([stream])) / 1e3 for stream in step.streams},
        "labels_ms": {verb: total / 1e3 for verb, total in step.by_verb().items()},
        "gaps_by_size": gaps_by_size(gaps),
        "kernels": kernels(step),
        "longest_gaps": [
            {
                "at_ms": gap[0] / 1e3,
                "ms": length([gap]) / 1e3,
                "traffic_ms": common([gap], beside) / 1e3,
                "after": step.around(gap)[0][:60],
                "before": step.around(gap)[1][:60],
            }
            for gap in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:num_gaps]
        ],
    }


def gaps_by_size(gaps: Sequence[Span]) -> list[dict[str, float]]:
    """How many gaps there are up to each size, from the next smaller one on, and what they add up to."""
    found, least = [], 0.0
    for most in _GAP_SIZES_US:
        sizes = [length([gap]) for gap in gaps if least < length([gap]) <= most]
        found.append({"up_to_us": most, "num": len(sizes), "ms": sum(sizes) / 1e3})
        least = most
    return found


def kernels(step: Step, most: int = 24) -> list[dict[str, Any]]:
    """What ran longest, on the computation's stream and beside it: a trace of the limit has the first ones alone."""
    totals: dict[tuple[bool, str], list[float]] = defaultdict(list)
    for event in step.events:
        totals[event.stream == step.streams[0], event.name[:70]].append(event.stop - event.start)
    longest = sorted(totals.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        {"name": name, "is_beside": not is_first, "num": len(times), "ms": sum(times) / 1e3}
        for (is_first, name), times in longest
    ]


def table(figures: Mapping[str, Any]) -> str:
    lines = [
        f"step {figures['step_ms']:.2f} ms: computing {figures['busy_ms']:.2f}, exposed traffic "
        f"{figures['exposed_ms']:.2f}, empty {figures['empty_ms']:.2f}",
        f"host done after {figures['host_ms']:.2f} ms, {figures['num_launches']} launches",
        "under labels: " + ", ".join(f"{verb} {ms:.2f}" for verb, ms in figures["labels_ms"].items()),
        "streams: " + ", ".join(f"{stream}: {ms:.2f}" for stream, ms in figures["streams_ms"].items()),
        "gaps: " + ", ".join(f"{g['num']} up to {g['up_to_us']:g} us {g['ms']:.2f}" for g in figures["gaps_by_size"]),
        "longest gaps:",
    ]
    for gap in figures["longest_gaps"]:
        lines.append(
            f"  at {gap['at_ms']:8.2f}: {gap['ms']:6.3f} ms ({gap['traffic_ms']:.3f} of them traffic) between "
            f"{gap['after']} and {gap['before']}"
        )
    lines.append("longest work:")
    for each in figures["kernels"]:
        beside = "beside" if each["is_beside"] else "      "
        lines.append(f"  {each['ms']:8.2f} ms {beside} {each['num']:5} x {each['name']}")
    return "\n".join(lines)


def plot(step: Step, path: str) -> None:
    """Draw the step: a row for each stream, coloured by label."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    streams = step.streams
    figure, axes = plt.subplots(figsize=(14, 1.0 + 0.5 * len(streams)))
    colours = {verb: f"C{index}" for index, verb in enumerate(VERBS)}
    for row, stream in enumerate(streams):
        spans = [(start / 1e3, (stop - start) / 1e3) for start, stop in step.busy([stream])]
        axes.broken_barh(spans, (row - 0.4, 0.8), color="0.75")
        for verb, colour in colours.items():
            labelled = union(
                (label.start, label.stop)
                for label in step.labels
                if label.stream == stream and label.name.split(" ")[0] == verb
            )
            bars = [(start / 1e3, (stop - start) / 1e3) for start, stop in labelled]
            axes.broken_barh(bars, (row - 0.4, 0.25 if verb == "forward" else 0.8), color=colour, label=verb)
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the step began on the host")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), loc="upper right", ncols=len(handles))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--plot", help="draw the step here")
    words = parser.parse_args()
    try:
        step = read(json.loads(Path(words.trace).read_text()))
    except (OSError, ValueError) as error:
        parser.error(f"{words.trace}: {error}")
    print(table(summary(step)))
    if words.plot:
        plot(step, words.plot)


if __name__ == "__main__":
    main()
