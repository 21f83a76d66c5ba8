"""Finds the largest model that each system trains on the GPUs of one machine, by stepping up the number of layers.

    python benchmarks/largest.py [--rows zero_3:eager fsdp2:eager deepspeed_3:eager] [--ranks 4] [--card-gib 80]
                                 [--params 13] [--first 60 50 50] [--stride 2] [--batch 1] [--context 2048]
                                 [--row-limit-s 200] [--within-s 570] [--json FILE]

The rows are those of `train_rows.py`, run as `train.py` runs them: two steps of a Llama shape of the width that
--params says, all blocks checkpointed, on as much of each GPU as a card of --card-gib has (what contexts and NCCL take
included). From --first layers, one number a row, it goes up by --stride while the model fits, or down until it does; so
the answer is between two numbers of layers, both of which were tried. Prints a table and writes JSON with every trial.
`--device cpu --params 0.004 --first 2 --most 4` tries the program where no GPU is: there everything fits.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from rows import add_work, check_rows, check_work, seconds
from train import about, command
from workload import apart, check_writable, end_in_order, write_whole

GIB = 2**30


def climb(first: int, stride: int, most: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number of layers that fits, not above `most`; None if none does. Each is tried once."""
    layers, best = first, None
    while 1 <= layers <= most:
        if not fits(layers):
            if best is not None:
                return best
            layers -= stride
        elif best is None and layers < first:
            return layers
        else:
            best, layers = layers, layers + stride
    return best


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["zero_3:eager", "fsdp2:eager", "deepspeed_3:eager"])
    parser.add_argument("--ranks", type=int, help="GPUs; all that are there unless given")
    parser.add_argument(
        "--first", nargs="+", type=int, default=[60], help="layers to begin with, one number or one a row"
    )
    parser.add_argument("--stride", type=int, default=2, help="layers from one trial to the next")
    parser.add_argument("--most", type=int, default=10_000, help="layers to stop at")
    parser.add_argument("--row-limit-s", type=seconds, default=200, help="seconds a trial may take")
    parser.add_argument(
        "--within-s",
        type=seconds,
        default=float("inf"),
        help="seconds that all trials may take; the last is stopped then",
    )
    parser.add_argument("--json", help="write all trials here")
    add_work(parser)
    parser.set_defaults(params=13.0, batch=1, context=2048, steps=1, warm_up=1, card_gib=80.0)
    words = parser.parse_args()
    check_rows(parser, words.rows)
    if len(words.first) == 1:
        words.first *= len(words.rows)
    if len(words.first) != len(words.rows) or words.stride < 1 or min(words.first) < 1:
        parser.error("--first is one number of layers or one for each row, and like --stride at least 1")
    if words.ranks is None:
        words.ranks = torch.cuda.device_count() if words.device == "cuda" else 2
    check_work(parser, words, words.ranks)
    check_writable(parser, words.json)
    if max(words.first) > words.most:
        parser.error("--first is at most --most")
    if words.device == "cpu":
        words.card_gib = None
    return words


class NoAnswer(Exception):
    """Whether a size fits was not found out."""


class Search:
    """Tries sizes, and keeps what it found."""

    def __init__(self, words: argparse.Namespace) -> None:
        self._words = words
        self._begun = time.monotonic()
        self.told: dict[str, Any] = {**about(words), "card_gib": words.card_gib, "trials": [], "largest": {}}

    def run(self) -> None:
        for name, first in zip(self._words.rows, self._words.first, strict=True):
            try:
                layers = climb(first, self._words.stride, self._words.most, lambda n, name=name: self._fits(name, n))
                trials = [row for row in self.told["trials"] if row["system"] == name and row["layers"] == layers]
                found = trials[0] if trials else {"error": "none of the sizes that were tried fits"}
            except NoAnswer as error:
                found = {"error": "; ".join([str(error), *self._fitted(name)])}
            self.told["largest"][name] = found
            self._write()

    def _fitted(self, name: str) -> list[str]:
        """What is known of a system whose search has ended without an answer."""
        trials = [row for row in self.told["trials"] if row["system"] == name and "error" not in row]
        most = max(trials, key=lambda row: row["layers"], default=None)
        return [] if most is None else [f"{most['layers']} layers fit, {most['num_params'] / 1e9:.2f}e9 parameters"]

    def _fits(self, name: str, layers: int) -> bool:
        left = self._words.within_s - (time.monotonic() - self._begun)
        if left <= 0:
            raise NoAnswer(f"not finished: {self._words.within_s:g} s were over")
        self._words.layers = layers
        row = apart(name, command(name, self._words.ranks, self._words), min(self._words.row_limit_s, left))
        self.told["trials"].append({**row, "system": name, "layers": layers})
        params = f"{row['num_params'] / 1e9:.2f}e9 parameters" if "num_params" in row else row["error"][:120]
        print(f"{name}, {layers} layers: {'fits' if 'error' not in row else 'no'}, {params}", flush=True)
        self._write()
        if "error" in row and "OutOfMemory" not in row["error"] and "out of memory" not in row["error"].lower():
            raise NoAnswer(f"{layers} layers ended without an answer: {row['error']}")
        return "error" not in row

    def _write(self) -> None:
        if self._words.json:
            write_whole(self._words.json, json.dumps(self.told, indent=1))


def table(told: dict[str, Any]) -> str:
    lines = ["| system | largest, 1e9 parameters | layers | peak GiB | reserved GiB |", "|---|---:|---:|---:|---:|"]
    for name, row in told["largest"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | |")
            continue
        peak, reserved = row["peak_allocated_bytes"] / GIB, row["peak_reserved_bytes"] / GIB
        lines.append(f"| {name} | {row['num_params'] / 1e9:.2f} | {row['layers']} | {peak:.1f} | {reserved:.1f} |")
    return "\n".join(lines)


def main() -> None:
    search = Search(parse())
    end_in_order()
    search.run()
    print("\n" + table(search.told))
    print(json.dumps({key: value for key, value in search.told.items() if key != "trials"}))
    sys.exit(any("error" in row for row in search.told["largest"].values()))


if __name__ == "__main__":
    main()
