"""Predicts a step of ZERO_3 on numbers of GPUs that were not there, from what was measured on a few.

    python benchmarks/step_model.py --train RUN.json --wire WIRE.json [--row zero_3] [--gpus 2 4 8 128] [--host 8]
                                    [--nic-bytes-s 50e9]

A step is the limit, plus the update (26 bytes a parameter of this rank's part, at the rate of a device copy), plus what
traffic costs the computation beside it, plus a rest that no traffic explains. The costs are those of `wire.py`, taken
to grow with the bytes that a rank receives, (n - 1) / n of a unit for n ranks that share; the rest is what is left of
the measured step, and stays. Beyond one host, shards stay within each (a mesh), and gradients' shards are averaged over
the hosts: 2 (h - 1) / h of their bytes over each GPU's own part of the network, beside backward, which they prolong
only by what they exceed it. So the last lines assume links that nobody measured here: they are predictions.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import Row

UPDATE_BYTES = 26
"""Of a parameter with a split master: weight, lower half and both moments read and written, gradient read."""
COPIES = "reduce, copies"
BACKWARD = 3 / 4
"""Of the limit, with full checkpointing: three of four passes over the weights."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a step is made of; seconds, bytes."""

    limit_s: float
    num_params: int
    update_bytes_s: float
    gathers_s: float
    """What all gathers cost the computation on the measured number of GPUs."""
    reduces_s: float
    copies_s: float
    """Gradients into flat buffers."""
    num_ranks: int
    step_s: float

    def known_s(self, share: int) -> float:
        """Without the rest, where `share` ranks of one host hold the shards."""
        more = ((share - 1) / share) / ((self.num_ranks - 1) / self.num_ranks)
        update_s = UPDATE_BYTES * self.num_params / share / self.update_bytes_s
        return self.limit_s + update_s + self.copies_s + more * (self.gathers_s + self.reduces_s)

    def predicted_s(self, num_gpus: int, host: int, nic_bytes_s: float) -> float:
        """A step on so many GPUs, `host` of them in each machine."""
        share, hosts = min(num_gpus, host), -(-num_gpus // host)
        rest_s = self.step_s - self.known_s(self.num_ranks)
        between_s = 2 * (hosts - 1) / hosts * 2 * self.num_params / share / nic_bytes_s
        return self.known_s(share) + rest_s + max(0.0, between_s - BACKWARD * self.limit_s)


def fit(
    train: Mapping[str, Any], wire: Mapping[str, Any], row: str, copy_bytes_s: float, gather: str, reduce: str
) -> Model:
    """The model of one row of a run of `train.py`, with the costs of a run of `wire.py`. Reductions by copies take
    gradients from where they are.

    Raises:
        ValueError: a row is missing, or the files hold something else.
    """
    if not train.get("runs") or "numel" not in wire:
        raise ValueError("--train is a file that train.py wrote, with a run in it, and --wire one that wire.py wrote")
    num_ranks = wire["num_ranks"]
    timed = [each for each in train["runs"][0]["rows"] if "seconds" in each and each["num_ranks"] == num_ranks]
    rows = {each["system"]: each for each in timed}
    costs = {each["row"]: each["cost_s"] for each in wire["rows"]}
    missing = {row, Row.parse(row).limit} - rows.keys()
    if missing:
        raise ValueError(
            f"on {num_ranks} GPUs, as many as the wire's, the run holds {', '.join(rows) or 'nothing'}, not "
            f"{', '.join(sorted(missing))}"
        )
    if num_ranks < 2 or not {gather, reduce} <= costs.keys():
        raise ValueError(
            f"the wire of {num_ranks} GPUs holds {', '.join(costs)}; wanted are several GPUs, {gather} and {reduce}"
        )
    num_params = rows[row]["num_params"]
    units = num_params / wire["numel"]
    return Model(
        limit_s=rows[Row.parse(row).limit]["seconds"],
        num_params=num_params,
        update_bytes_s=copy_bytes_s,
        gathers_s=2 * units * costs[gather],
        reduces_s=units * costs[reduce],
        copies_s=0.0 if reduce == COPIES else 4 * num_params / copy_bytes_s,
        num_ranks=num_ranks,
        step_s=rows[row]["seconds"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="what train.py wrote")
    parser.add_argument("--wire", required=True, help="what wire.py wrote, on as many GPUs")
    parser.add_argument("--row", default="zero_3")
    parser.add_argument("--gather", default="gather, copies", help="the row of wire.py that gathers are")
    parser.add_argument("--reduce", default="reduce, collective", help=f"that reductions are, such as {COPIES!r}")
    parser.add_argument("--copy-bytes-s", type=float, default=4.0e12, help="a copy on the device, read and written")
    parser.add_argument("--gpus", nargs="+", type=int, default=[2, 4, 8, 128])
    parser.add_argument("--host", type=int, default=8, help="GPUs in a machine")
    parser.add_argument("--nic-bytes-s", type=float, default=50e9, help="of the network, for each GPU")
    words = parser.parse_args()
    if min(*words.gpus, words.host, words.nic_bytes_s, words.copy_bytes_s) <= 0:
        parser.error("--gpus, --host, --nic-bytes-s and --copy-bytes-s are more than 0")
    if any(num_gpus > words.host and num_gpus % words.host for num_gpus in words.gpus):
        parser.error("--gpus are at most --host, or fill whole machines of so many")
    try:
        train, wire = (json.loads(Path(path).read_text()) for path in (words.train, words.wire))
        model = fit(train, wire, words.row, words.copy_bytes_s, words.gather, words.reduce)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rest_s = model.step_s - model.known_s(model.num_ranks)
    print(
        f"{words.row} on {model.num_ranks} GPUs, ms: limit {model.limit_s * 1e3:.1f}, update "
        f"{UPDATE_BYTES * model.num_params / model.num_ranks / model.update_bytes_s * 1e3:.1f}, gathers "
        f"{model.gathers_s * 1e3:.1f}, reductions {model.reduces_s * 1e3:.1f}, gradients into buffers "
        f"{model.copies_s * 1e3:.1f}, rest {rest_s * 1e3:.1f}; measured {model.step_s * 1e3:.1f}\n"
    )
    print("| GPUs | step ms | tax | |\n|---:|---:|---:|---|")
    for num_gpus in words.gpus:
        step_s = model.predicted_s(num_gpus, words.host, words.nic_bytes_s)
        kind = "measured" if num_gpus == model.num_ranks else "prediction"
        print(f"| {num_gpus} | {step_s * 1e3:.0f} | {step_s / model.limit_s:.3f} | {kind} |")


if __name__ == "__main__":
    main()
