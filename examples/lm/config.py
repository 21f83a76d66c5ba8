"""Owns the settings of a run: their names, defaults and help, once, for the command line and for TOML files.

Invariant: a `Config` that exists is consistent; `check_ranks` then holds it to the number of ranks.
"""

import enum
import inspect
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from onefold.plan.table import NAMED_PLANS

PlanName = enum.StrEnum("PlanName", {name: name for name in NAMED_PLANS})
"""The names of the plans, from Onefold itself."""


class PrecisionName(enum.StrEnum):
    """What the parameters compute in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Device(enum.StrEnum):
    """Where the model is trained."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def _option(text: str, **kwargs: object) -> object:
    return typer.Option(help=text, **kwargs)


def _fraction(given: object) -> float | Literal["auto"]:
    """What `onefold.shard(fraction=...)` takes, from a flag's text or a TOML value."""
    text = str(given)  # a TOML true becomes "True", which is refused, where float(True) would be 1
    if text == "auto":
        return "auto"
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 <= fraction <= 1:
        raise typer.BadParameter(f'{text!r} is neither a number from 0 to 1 nor "auto"')
    return fraction


PLAN_HELP = "Where the training state rests; the list is above."
FRACTION_HELP = (
    "How much of what the plan keeps off the device to keep on it after all: 0 (nothing) to 1 (everything), or auto, "
    "as much as fits."
)
PRECISION_HELP = (
    "What parameters compute in. fp32: 16 bytes a parameter with AdamW. bf16: 14, its exact fp32 master weight being "
    "the bf16 weight plus 16 more bits. fp16: 16, with a dynamic loss scale."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of a run; the command line is made from these fields."""

    plan: Annotated[PlanName, _option(PLAN_HELP, metavar="NAME")] = PlanName.zero_3
    # A float or "auto"; typer knows no such type, so the parser decides.
    fraction: Annotated[float | None, _option(FRACTION_HELP, metavar="NUMBER|auto", parser=_fraction)] = None
    delayed: Annotated[
        bool, _option("Let updates on the host take effect one step late, beside the next step (offload only).")
    ] = False
    delay_after: Annotated[int, _option("With --delayed, the number of updates that are exact first.", min=0)] = 40
    precision: Annotated[PrecisionName, _option(PRECISION_HELP)] = PrecisionName.fp32
    checkpoint_activations: Annotated[
        bool, _option("Keep only each block's input in forward; compute the rest again in backward.")
    ] = False
    compile: Annotated[bool, _option("Compile each block with torch.compile (needs a C++ compiler on CPU).")] = False

    layers: Annotated[int, _option("Transformer blocks.", min=1)] = 4
    width: Annotated[int, _option("Size of a token's vector; a multiple of --heads.", min=1)] = 128
    heads: Annotated[int, _option("Attention heads.", min=1)] = 4
    context: Annotated[int, _option("Tokens (bytes) the model sees at once.", min=2)] = 64
    tied: Annotated[bool, _option("Let the head share the token embedding's weight.")] = True

    steps: Annotated[int, _option("Optimizer steps.", min=1)] = 1800
    global_batch: Annotated[
        int, _option("Samples a step over all ranks; a multiple of the number of ranks.", min=1)
    ] = 8
    micro_batch: Annotated[
        int,
        _option("Samples a rank runs at once; with a larger share of the global batch, gradients accumulate.", min=1),
    ] = 8
    lr: Annotated[float, _option("Peak learning rate: linear warm-up over 5% of the steps, then cosine to 10%.")] = 3e-3
    weight_decay: Annotated[float, _option("AdamW weight decay of matrices (not of norms and biases).", min=0)] = 0.1
    clip: Annotated[float, _option("Largest global gradient norm; 0 turns clipping off.", min=0)] = 1.0
    seed: Annotated[int, _option("Decides initial weights, data order and the sample.")] = 0

    device: Annotated[Device, _option("auto: one GPU a process where there are GPUs, else the CPU.")] = Device.auto
    eval_batches: Annotated[int, _option("Global batches of held-out text for the loss at the end.", min=1)] = 8
    prompt: Annotated[str, _option("Text that the sample continues.")] = "def __init__(self"
    sample_tokens: Annotated[int, _option("Length of the sample in bytes; 0 for none.", min=0)] = 320
    log_every: Annotated[int, _option("Without a terminal, print a line every this many steps.", min=1)] = 50
    out: Annotated[Path, _option("Folder for metrics.json, loss.png and sample.txt.", file_okay=False)] = Path("out/lm")

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise typer.BadParameter(f"--width {self.width} is not a multiple of --heads {self.heads}")
        if not self.prompt:
            raise typer.BadParameter("--prompt needs at least one character to continue")

    def check_ranks(self, num_ranks: int) -> None:
        """Every rank gets an equal share of the global batch, cut into equal micro-batches.

        Raises:
            typer.BadParameter: the sizes do not divide.
        """
        share, rest = divmod(self.global_batch, num_ranks)
        if rest or not share:
            raise typer.BadParameter(f"--global-batch {self.global_batch} is not a multiple of the {num_ranks} ranks")
        if share > self.micro_batch and share % self.micro_batch:
            raise typer.BadParameter(
                f"each rank's share of the global batch is {share} samples, which is not a multiple of --micro-batch "
                f"{self.micro_batch}"
            )

    def plain(self) -> dict[str, str | int | float | bool | None]:
        """The settings as JSON and TOML know them."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value.value if isinstance(value, enum.Enum) else str(value) if isinstance(value, Path) else value
            for name, value in found.items()
        }


def _read_toml(context: typer.Context, path: Path | None) -> Path | None:
    """Make a TOML file's values the defaults, so that flags on the command line still win."""
    if path is None:
        return None
    try:
        table = {key.replace("-", "_"): value for key, value in tomllib.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from error
    known = {field.name for field in fields(Config)}
    if unknown := sorted(table.keys() - known):
        raise typer.BadParameter(f"{path} sets {', '.join(unknown)}; a setting is one of {', '.join(sorted(known))}")
    context.default_map = table
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file of settings, named as here (global_batch = 16). Flags win over it.",
        is_eager=True,
        callback=_read_toml,
        dir_okay=False,
        exists=True,
    ),
]


def command(run: Callable[[Config], None]) -> Callable[..., None]:
    """`run` as a command-line function whose options are the fields of `Config`."""

    def main(ctx: typer.Context, config: Path | None = None, **values: object) -> None:
        try:
            run(Config(**values))
        except typer.BadParameter as error:
            error.ctx = ctx  # so that the message comes with the usage line
            raise

    own = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    own.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, annotation=ConfigFile, default=None))
    signature = inspect.Signature([*own, *inspect.signature(Config).parameters.values()])
    main.__signature__ = signature
    main.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    main.__doc__ = run.__doc__
    return main
