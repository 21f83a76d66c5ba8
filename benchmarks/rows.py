"""The rows that programs time, by name, and the arguments that say what a step is: shared by all that run them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workload import SIZES

PLANS = ("zero_0", "zero_1", "zero_2", "zero_3")
PEERS = ("ddp", "fsdp2", "deepspeed_1", "deepspeed_2", "deepspeed_3")
SYSTEMS = ("limit", *PLANS, *PEERS)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A system, and how it is to be run."""

    system: str
    is_compiled: bool = True
    keep: Any = None
    """Onefold's `keep_bytes`."""
    gather: Any = "auto"
    """Onefold's `gather`."""

    @classmethod
    def parse(cls, name: str) -> "Row":
        """What `name` asks for.

        Raises:
            ValueError: there is no such system or option.
        """
        system, _, words = name.partition(":")
        is_compiled, keep, gather = True, None, "auto"
        for word in words.split("+") if words else ():
            option, _, value = word.partition("=")
            if word == "eager":
                is_compiled = False
            elif option == "keep" and system in PLANS:
                keep = _gib(name, value) if "=" in word else "auto"
            elif word in ("collective", "copy") and system in PLANS and gather in ("auto", word):
                gather = word
            else:
                beside = "" if gather == "auto" else f" beside {gather!r}"
                raise ValueError(f"{name!r}: {system} has no option {word!r}{beside}")
        if system not in SYSTEMS:
            raise ValueError(f"{name!r}: the systems are {', '.join(SYSTEMS)}")
        return cls(system=system, is_compiled=is_compiled, keep=keep, gather=gather)

    @property
    def limit(self) -> str:
        """The limit that the row is held against."""
        return "limit" if self.is_compiled else "limit:eager"


def _gib(name: str, value: str) -> int:
    """Bytes of so many GiB."""
    try:
        nbytes = int(float(value) * 2**30)
    except (OverflowError, ValueError):
        nbytes = -1
    if nbytes < 0:
        raise ValueError(f"{name!r}: {value!r} is no number of GiB to keep")
    return nbytes


def add_work(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what a step is."""
    parser.add_argument("--params", type=float, default=6.74, choices=SIZES, help="billions of parameters")
    parser.add_argument("--layers", type=int, help="in place of the layers that this size has")
    parser.add_argument("--batch", type=int, default=2, help="sequences a GPU")
    parser.add_argument("--context", type=int, default=4096, help="tokens a sequence")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=8, help="that count")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them, at least 1")
    parser.add_argument("--card-gib", type=float, help="use no more of a GPU, as if it were a smaller card")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])


def seconds(text: str) -> float:
    """An argument that limits a time."""
    limit = float(text)
    if not limit >= 0:
        raise ValueError
    return limit


def check_work(parser: argparse.ArgumentParser, words: argparse.Namespace, *ranks: int) -> None:
    """End the program in the parser's way if there is no step to time."""
    num_gpus = torch.cuda.device_count()
    if words.device == "cuda" and not num_gpus:
        parser.error("there is no GPU; --device cpu --params 0.004 --context 64 --ranks 2 tries the program without")
    layers = 1 if words.layers is None else words.layers
    if min(words.warm_up, words.steps, words.batch, words.context, layers, *ranks) < 1:
        parser.error("--warm-up, --steps, --batch, --context, --layers and --ranks are at least 1")
    most = max(ranks, default=1)
    if words.device == "cuda" and most > num_gpus:
        parser.error(f"--ranks {most}: each takes a GPU, and there are {num_gpus}")
    if words.card_gib is not None and not words.card_gib > 0:
        parser.error(f"--card-gib {words.card_gib:g}: a card has more")


def check_rows(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """End the program in the parser's way if one of them is no row."""
    try:
        for name in names:
            Row.parse(name)
    except ValueError as error:
        parser.error(str(error))
