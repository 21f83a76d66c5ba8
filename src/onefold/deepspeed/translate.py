"""Owns the translation: from checked sections to a `Translation`, and the verdict on every key.

Invariant: every key that was written has one verdict, and a translation is given only where none is refused or open.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onefold.deepspeed.auto_values import Given
from onefold.deepspeed.sections import Compile
from onefold.deepspeed.source import Source, read
from onefold.deepspeed.spec import Translation
from onefold.deepspeed.to_batch import batch_of
from onefold.deepspeed.to_optimizer import optimizer_of, scheduler_of
from onefold.deepspeed.to_plan import plan_of, prefetch_of
from onefold.deepspeed.to_precision import autocast_of, precision_of
from onefold.deepspeed.values import said
from onefold.deepspeed.walk import Findings, Key, Problem, walk
from onefold.deepspeed.zero_section import Zero
from onefold.errors import ConfigError

VerdictWord = Literal["honoured", "adapted", "ignored", "refused", "open"]
Configuration = Mapping[str, Any] | str | Path | Source


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one key became, or why nothing came of it.

    Args:
        path: the key, as it was written.
        value: what was written.
        word: honoured, adapted, ignored, refused, or open: "auto", and nothing is known that fills it in.
        text: what it became, or the reason.
    """

    path: str
    value: Any
    word: VerdictWord
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that is to be said of a configuration.

    Args:
        source: what was read.
        verdicts: one for each key that was written and is known, in that order.
        problems: why it cannot be used; empty if it can.
        open: paths that nothing fills in, and what to give.
        preview: the translation as far as it is known; keys that are refused or open count as not written.
    """

    source: Source
    verdicts: tuple[Verdict, ...]
    problems: tuple[Problem, ...]
    open: Mapping[str, str]
    preview: Translation

    @property
    def translation(self) -> Translation | None:
        """The translation, if nothing is refused or open."""
        return None if self.problems or self.open else self.preview


def examine(config: Configuration, given: Given | None = None) -> Outcome:
    """What every key of a configuration becomes.

    Args:
        config: a dict, the path of a JSON file, JSON text, or JSON in base64.
        given: what fills in "auto"; None is one rank and nothing known.
    Raises:
        ConfigError: the text cannot be read at all.
    """
    findings = walk(config if isinstance(config, Source) else read(config), given or Given())
    for key in findings.keys:
        if _is_refused(key):
            nearest = f"; nearest: {key.support.nearest}" if key.support.nearest else ""
            findings.refuse(key.written, f"{key.support.why}{nearest}")
    preview = _translation(findings)
    _contradictions(findings)
    problems = {problem.path: problem for problem in reversed(findings.problems)}
    verdicts = tuple(_verdict(key, findings, problems) for key in findings.keys)
    return Outcome(findings.source, verdicts, tuple(findings.problems), findings.open, preview)


def translate(config: Configuration, given: Given | None = None) -> Translation:
    """`config` in Onefold's terms. Arguments as for `examine`.

    Raises:
        ConfigError: a key is unknown, wrong or refused, or "auto" with nothing that fills it in; names all of them.
    """
    outcome = examine(config, given)
    if outcome.translation is not None:
        return outcome.translation
    lines = [*map(str, outcome.problems), *(f"{path}: {text}" for path, text in outcome.open.items())]
    raise ConfigError(f"{outcome.source.name} cannot be used:\n  " + "\n  ".join(lines))


def _translation(findings: Findings) -> Translation:
    config = findings.config
    precision, plan, batch = precision_of(findings), plan_of(findings), batch_of(findings)
    return Translation(
        plan=plan,
        precision=precision,
        autocast=autocast_of(findings),
        optimizer=optimizer_of(findings),
        scheduler=scheduler_of(findings),
        max_grad_norm=config.gradient_clipping or None,
        micro_batch=batch.micro,
        accumulation=batch.accumulation,
        train_batch=batch.train,
        prefetch_bytes=prefetch_of(findings, plan, precision),
        compile=_compiles(findings),
        save_16bit=(config.zero_optimization or Zero()).stage3_gather_16bit_weights_on_model_save,
        drop_last=config.dataloader_drop_last,
        managed=config.managed_gradient_accumulation,
    )


def _compiles(findings: Findings) -> bool:
    section = findings.config.compile or Compile()
    on, off = section.enabled or section.deepcompile, "disable" in section.model_fields_set and section.disable
    if on and off:
        findings.refuse("compile.disable", "is true, and compile is on; keep one of them")
    return on or not section.disable


def _is_refused(key: Key) -> bool:
    if key.support.word != "refused" or key.filled is not None:
        return False
    return not any(type(key.value) is type(value) and key.value == value for value in key.support.harmless)


def _verdict(key: Key, findings: Findings, problems: Mapping[str, Problem]) -> Verdict:
    if key.written in problems:
        return Verdict(key.written, key.value, "refused", problems[key.written].what)
    if key.written in findings.open:
        return Verdict(key.written, key.value, "open", findings.open[key.written])
    word: VerdictWord = key.support.word
    text = key.support.why
    if key.support.word == "refused":
        word, text = "ignored", "asks for nothing that is not so anyway"
    if key.path in findings.notes:
        word, text = findings.notes[key.path]
    if key.filled is not None:
        became = "" if key.filled.value is None else f"{said(key.filled.value)}, "
        text = f"auto: {became}{key.filled.source}; {text}"
    return Verdict(key.written, key.value, word, text)


def _contradictions(findings: Findings) -> None:
    """Refuse what was written and is otherwise in what is given beside it."""
    given = findings.given
    optimizer, scheduler = "optimizer.params", "scheduler.params"
    known: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": given.micro_batch,
        "gradient_accumulation_steps": given.accumulation,
        "gradient_clipping": given.max_grad_norm,
        f"{optimizer}.lr": given.lr,
        f"{optimizer}.betas": given.betas,
        f"{optimizer}.eps": given.eps,
        f"{optimizer}.weight_decay": given.weight_decay,
        f"{scheduler}.warmup_max_lr": given.lr,
        f"{scheduler}.warmup_num_steps": given.warmup_steps,
        f"{scheduler}.total_num_steps": given.total_steps,
        "fp16.enabled": None if given.precision is None else given.precision == "fp16",
        "bf16.enabled": None if given.precision is None else given.precision == "bf16",
    }
    for path, value in known.items():
        key = findings.key(path)
        if value is None or key is None or key.filled is not None:
            continue
        found = _found(findings, path)
        if found is not None and found != value and not any(each.path == key.written for each in findings.problems):
            findings.refuse(key.written, f"is {said(found)}, and {said(value)} was given; make them one, or write auto")


def _found(findings: Findings, path: str) -> Any:
    """The checked value at `path`; None if there is none."""
    head, _, name = path.rpartition(".")
    sections = {"optimizer.params": findings.optimizer, "scheduler.params": findings.scheduler}
    section = sections[head] if head in sections else getattr(findings.config, head) if head else findings.config
    return getattr(section, name, None)
