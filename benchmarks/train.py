"""Times training on several GPUs: the compute limit, Onefold's plans and the peers, on one workload in one run.

    python benchmarks/train.py [--ranks 4] [--params 6.74] [--batch 2] [--context 4096] [--no-checkpointing]
                               [--rows zero_3 zero_3:eager zero_3:keep fsdp2 deepspeed_3:eager ...] [--steps 8]
                               [--row-limit-s 300] [--within-s 570] [--json FILE] [--table FILE] [--plot FILE]
    python benchmarks/train.py --rows --merge a.json b.json --table FILE --plot FILE

A Llama-shaped model in bf16, gradients clipped to 1, blocks compiled unless a row says `eager`. `train_rows.py` lists
the systems and options; each row runs in processes of its own, one a GPU, so that one that fails fails alone. The limit
(forward and backward alone, on all GPUs at once) is measured in every run that has a row to hold against it; tax is
step / limit. A step's time is the slowest rank's median. Several numbers of `--ranks` repeat all rows on each.

The JSON has the machine, every repetition of every rank and all losses; it is written again after each row, so a run
that is stopped is not lost. `--within-s` ends it after so many seconds: the row that runs then is stopped. `--merge`
puts earlier runs before this one in JSON, table and plot; without `--rows` nothing is measured. Needs transformers, and
matplotlib for the plot.
`--device cpu --params 0.004 --context 64 --ranks 2` tries the program where no GPU is; its times mean nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rows import Row, add_work, check_rows, check_work, seconds
from train_report import WORK, letter, load, plot, problem_of_plot, table, tax
from workload import apart, asked, check_writable, end_in_order, machine, write_whole

ROWS = (
    *("zero_3", "zero_3:keep", "zero_3:eager", "zero_2", "zero_2:eager", "zero_1", "zero_0", "ddp"),
    *("fsdp2", "fsdp2:eager", "deepspeed_3:eager", "deepspeed_3", "deepspeed_2:eager", "deepspeed_1:eager"),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=ROWS, help="in this order; limits come first by themselves")
    parser.add_argument("--ranks", nargs="+", type=int, help="GPUs; all that are there unless given")
    parser.add_argument("--row-limit-s", type=seconds, default=300, help="seconds a row may take, compilation included")
    parser.add_argument(
        "--within-s",
        type=seconds,
        default=float("inf"),
        help="seconds that all rows may take; the last is stopped then",
    )
    parser.add_argument("--json", help="write all runs here")
    parser.add_argument("--merge", nargs="*", default=[], help="earlier runs, as --json wrote them")
    parser.add_argument("--table", help="write the table here")
    parser.add_argument("--plot", help="draw it here")
    add_work(parser)
    words = parser.parse_args()
    check_rows(parser, words.rows)
    check_writable(parser, words.json, words.table, words.plot)
    if words.plot and (problem := problem_of_plot(words.plot)):
        parser.error(problem)
    if words.ranks is None:
        words.ranks = [torch.cuda.device_count() if words.device == "cuda" else 2]
    if words.rows:
        check_work(parser, words, *words.ranks)
    try:
        words.merged = load(words.merge)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return words


def with_limits(rows: Sequence[str]) -> list[str]:
    """The rows, after the limits that they are held against; each once."""
    limits = dict.fromkeys(Row.parse(name).limit for name in rows)
    return [*limits, *(name for name in dict.fromkeys(rows) if name not in limits)]


def command(name: str, num_ranks: int, words: argparse.Namespace) -> list[str]:
    script = Path(__file__).with_name("train_rows.py")
    options = {
        "--ranks": num_ranks,
        "--params": words.params,
        "--batch": words.batch,
        "--context": words.context,
        "--steps": words.steps,
        "--warm-up": words.warm_up,
        "--device": words.device,
        **({} if words.card_gib is None else {"--card-gib": words.card_gib}),
        **({} if words.layers is None else {"--layers": words.layers}),
    }
    flat = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-u", str(script), name, *flat, *([] if words.checkpointing else ["--no-checkpointing"])]


def about(words: argparse.Namespace) -> dict[str, Any]:
    """What a run's numbers depend on."""
    cards = [torch.cuda.get_device_name(card) for card in range(torch.cuda.device_count())]
    return {
        **machine(words.device),
        "cards": cards if words.device == "cuda" else [],
        "links": asked("nvidia-smi", "topo", "-m").splitlines(),
        "work": {key: getattr(words, key) for key in WORK},
        "steps": words.steps,
        "warm_up": words.warm_up,
        "command": sys.argv[1:],
    }


def show(index: int, run: dict[str, Any], row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{row['system']:20} no time: {row['error']}", flush=True)
        return
    over, allocated, reserved = tax(run, row), row["peak_allocated_bytes"] / 2**30, row["peak_reserved_bytes"] / 2**30
    print(
        f"{row['system']:20} step {row['seconds']:.3f} s  tax {'-' if over is None else f'{over:.3f}'}  peak "
        f"{allocated:.2f} GiB, reserved {reserved:.2f}  run {letter(index)}",
        flush=True,
    )


def write(runs: list[Any], path: str | None) -> None:
    if path:
        write_whole(path, json.dumps({"runs": runs}, indent=1))


def measure(words: argparse.Namespace, runs: list[Any]) -> None:
    """Adds a run to `runs`."""
    begin = time.monotonic()
    run: dict[str, Any] = {**about(words), "rows": []}
    runs.append(run)
    for num_ranks in words.ranks:
        for name in with_limits(words.rows):
            left = words.within_s - (time.monotonic() - begin)
            print(f"{name} runs on {num_ranks} ranks", flush=True)
            if left <= 0:
                row = {"system": name, "error": f"not started: {words.within_s:g} s were over"}
            else:
                row = apart(name, command(name, num_ranks, words), min(words.row_limit_s, left))
            row["num_ranks"] = num_ranks
            run["rows"].append(row)
            show(len(runs) - 1, run, row)
            write(runs, words.json)


def main() -> None:
    words = parse()
    end_in_order()
    runs: list[Any] = list(words.merged)
    if words.rows:
        measure(words, runs)
    if not runs:
        sys.exit("nothing to do: give --rows to measure, or --merge with files of earlier runs")
    write(runs, words.json)
    text = table(runs)
    print("\n" + text)
    if words.table:
        write_whole(words.table, text)
    if words.plot:
        plot(runs, words.plot)
    if words.rows and all("error" in row for row in runs[-1]["rows"]):
        sys.exit("no row gave a time")


if __name__ == "__main__":
    main()
