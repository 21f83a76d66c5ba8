"""Owns what a run shows and leaves behind: the progress bar, the memory table, metrics.json, loss.png and sample.txt.

Invariant: only rank 0 prints and writes, and nothing in here communicates.
"""

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import matplotlib
import rich.progress
import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import onefold
from config import Config

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one step was like. `loss` is the mean over the global batch; `grad_norm` is that before clipping.

    `host_bytes` is the training state this rank holds on the host. `host_busy` and `host_wait` are shares of the step's
    time: updates on the host, which run beside the loop, and the loop's waits for them. An update is counted when it
    ends, so one that began in the step before can bring `host_busy` above 1.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    loss_scale: float
    skipped: bool
    seconds: float
    memory_bytes: int
    host_bytes: int
    host_busy: float
    host_wait: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to. `budgets` are the bytes a rank holds: predicted, then measured."""

    config: Config
    num_ranks: int
    device: str
    num_parameters: int
    records: Sequence[Record]
    held_out_loss: float
    sample: str
    budgets: tuple[onefold.Budget, onefold.Budget]

    @property
    def title(self) -> str:
        return title(self.config, self.num_ranks)


def title(config: Config, num_ranks: int) -> str:
    """A run in a few words: plan, precision, ranks, and in parentheses what changes the plan."""
    changes = [f"fraction {config.fraction}"] * (config.fraction is not None) + ["delayed"] * config.delayed
    run = f"{config.plan.value}, {config.precision.value}, {num_ranks} rank{'s' if num_ranks > 1 else ''}"
    return f"{run} ({', '.join(changes)})" if changes else run


class Display:
    """Live progress on rank 0: a bar on a terminal, a line every `log_every` steps elsewhere."""

    def __init__(self, config: Config, rank: int, num_ranks: int) -> None:
        self._config = config
        self._title = title(config, num_ranks)
        self._console = Console(quiet=rank > 0)
        self._seconds = self._host_busy = self._host_wait = 0.0
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("step {task.completed}/{task.total}  {task.fields[numbers]}"),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=rank > 0 or not self._console.is_terminal,
        )
        # Two short lines leave 100 columns room for the numbers, which have two lines as well.
        self._task = self._bar.add_task(self._title.replace(" (", "\n("), total=config.steps, numbers="")

    def __enter__(self) -> "Display":
        if not self._console.is_terminal:
            self._console.print(f"training: {self._title}")
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, record: Record) -> Record:
        """Show one step; returns it."""
        # Running means: single steps are noisy, and the first one pays for warm-up.
        old = 0.0 if record.step <= 2 else 0.9
        self._seconds = old * self._seconds + (1 - old) * record.seconds
        self._host_busy = old * self._host_busy + (1 - old) * record.host_busy
        self._host_wait = old * self._host_wait + (1 - old) * record.host_wait
        tokens = self._config.global_batch * self._config.context
        numbers = (
            f"loss {record.loss:.3f}  {tokens / self._seconds:,.0f} tokens/s  "
            f"{record.memory_bytes / MIB:,.0f} MiB a rank{'  (skipped: overflow)' if record.skipped else ''}"
        )
        if record.host_bytes:  # on a line of its own: one line of 100 columns has no room for it
            numbers += f"\n{self._host_numbers(record)}"
        self._bar.update(self._task, completed=record.step, numbers=numbers)
        last = record.step == self._config.steps
        if not self._console.is_terminal and (record.step == 1 or last or record.step % self._config.log_every == 0):
            start = f"step {record.step:>5}/{self._config.steps}  "
            self._console.print(start + numbers.replace("\n", "\n" + " " * len(start)), highlight=False, soft_wrap=True)
        return record

    def _host_numbers(self, record: Record) -> str:
        # The device may stand still for other reasons too; what offloading adds is only the wait for the host.
        return (
            f"host {record.host_bytes / MIB:,.0f} MiB  device busy {max(0.0, 1 - self._host_wait):.0%}, "
            f"host busy {self._host_busy:.0%}, waiting {self._host_wait:.0%}"
        )


def publish(result: Result) -> None:
    """Print the result and write metrics.json, loss.png and sample.txt into the run's folder."""
    console = Console()
    bits = result.held_out_loss / math.log(2)
    console.print(f"held-out loss {result.held_out_loss:.4f} nats a byte ({bits:.2f} bits)", highlight=False)
    if result.config.sample_tokens:
        console.print(Panel(Text(_printable(result.sample)), title="a sample", title_align="left"))
    console.print(memory_table(result))
    plan = result.budgets[0]
    console.print(
        f"on the wire a step of one micro-batch: {plan.gather_numel + plan.reduce_numel:,} elements "
        f"({plan.gather_numel:,} gathered, {plan.reduce_numel:,} reduced)",
        highlight=False,
        soft_wrap=True,
    )
    out = result.config.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.json").write_text(json.dumps(metrics(result), indent=1) + "\n", encoding="utf-8")
    (out / "sample.txt").write_text(result.sample + "\n", encoding="utf-8")
    draw_losses(result, out / "loss.png")
    console.print(f"written: {out}/metrics.json, loss.png, sample.txt", highlight=False, soft_wrap=True)


def _printable(text: str) -> str:
    """Control characters other than new lines would move the terminal's cursor."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def budget_bytes(budget: onefold.Budget) -> dict[str, dict[str, int]]:
    """Bytes a rank holds: by kind of training state, then by the tier it rests on (empty tiers left out)."""
    kinds = {"params": budget.params_bytes, "grads": budget.grads_bytes, "optim": budget.optim_bytes}
    return {kind: {tier.name.lower(): held for tier, held in tiers.items() if held} for kind, tiers in kinds.items()}


def memory_table(result: Result) -> Table:
    """Bytes a rank of each kind of training state: what the plan promises beside what the tensors really hold."""
    predicted, measured = (budget_bytes(budget) for budget in result.budgets)
    heading = f"training state a rank: {result.title}, {result.num_parameters:,} parameters"
    table = Table(title=heading, title_justify="left")
    table.add_column("kind")
    table.add_column("tier")
    for heading in ("predicted bytes", "measured bytes", "a parameter"):
        table.add_column(heading, justify="right")
    names = {"params": "parameters", "grads": "gradients", "optim": "optimizer state"}
    for kind, name in names.items():
        for tier in predicted[kind] | measured[kind]:
            held = predicted[kind].get(tier, 0), measured[kind].get(tier, 0)
            _add_row(table, name, tier, *held, result.num_parameters)
    table.add_section()
    totals = [sum(sum(tiers.values()) for tiers in kinds.values()) for kinds in (predicted, measured)]
    _add_row(table, "total", "", *totals, result.num_parameters)
    return table


def _add_row(table: Table, name: str, tier: str, predicted: int, measured: int, num_parameters: int) -> None:
    table.add_row(name, tier, f"{predicted:,}", f"{measured:,}", f"{measured / num_parameters:.2f}")


def metrics(result: Result) -> dict[str, object]:
    """Everything about the run as JSON values; losses in full precision."""
    predicted, measured = (budget_bytes(budget) for budget in result.budgets)
    return {
        "config": result.config.plain(),
        "num_ranks": result.num_ranks,
        "device": result.device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_parameters": result.num_parameters,
        "steps": [asdict(record) for record in result.records],
        "held_out_loss": result.held_out_loss,
        "sample": result.sample,
        "wire_elements_a_step": {"gather": result.budgets[0].gather_numel, "reduce": result.budgets[0].reduce_numel},
        "memory_bytes_a_rank": {"predicted": predicted, "measured": measured},
    }


def _smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of each loss and its neighbours, a fortieth of the run on either side, fewer near the start."""
    reach = len(losses) // 40
    windows = (losses[step - min(step, reach) : step + min(step, reach) + 1] for step in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def draw_losses(result: Result, path: Path) -> None:
    """Draw the training loss by step, and the held-out loss where it was measured, as a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot  # only after the backend is chosen, which needs no screen

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps, losses = [record.step for record in result.records], [record.loss for record in result.records]
    axes.plot(steps, losses, color="#a9c9ee", linewidth=0.8, label="training, each step")
    axes.plot(steps, _smoothed(losses), color="#2a78d6", linewidth=2, label="training, smoothed")
    held_out = f"held out: {result.held_out_loss:.3f}"
    axes.plot([steps[-1]], [result.held_out_loss], "o", color="#d9480f", label=held_out, clip_on=False)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="Python's standard library, byte by byte")
    axes.set_xlim(1, max(2, steps[-1]))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False,
        title=f"{result.title}, {result.num_parameters:,} parameters",
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
