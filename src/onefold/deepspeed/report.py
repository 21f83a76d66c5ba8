"""Owns the words in which a translation is told: a table for the screen, and the rows of the manual."""

from collections.abc import Iterator
from textwrap import wrap

from onefold.deepspeed.auto_values import Given
from onefold.deepspeed.key_support import Section, Switched, support_of
from onefold.deepspeed.optimizer_sections import OPTIMIZERS, SCHEDULERS
from onefold.deepspeed.to_batch import BATCH_KEYS
from onefold.deepspeed.to_plan import plan_name
from onefold.deepspeed.translate import Configuration, Outcome, Verdict, VerdictWord, examine
from onefold.deepspeed.values import said
from onefold.deepspeed.walk import declared
from onefold.errors import ConfigError
from onefold.plan.precision import DynamicLossScale

_ORDER: tuple[VerdictWord, ...] = ("refused", "open", "adapted", "honoured", "ignored")
_HEADINGS = {
    "refused": "refused: the run does not start",
    "open": 'open: "auto", filled in when the run starts',
    "adapted": "adapted: met by other means",
    "honoured": "honoured: means what it means in DeepSpeed",
    "ignored": "ignored: steers what does not exist here, or changes no numbers",
}


def report(config: Configuration, given: Given | None = None, *, width: int = 110) -> str:
    """What each key of a configuration became, as plain text for a screen `width` columns wide.

    A configuration that cannot be used is reported too: what is wrong stands first.
    """
    return judged(config, given, width=width)[0]


def judged(config: Configuration, given: Given | None = None, *, width: int = 110) -> tuple[str, bool]:
    """What `report` returns, and whether nothing is wrong with the configuration."""
    try:
        outcome = examine(config, given)
    except ConfigError as error:
        return f"refused: {error}\n", False
    parts = [_summary(outcome)]
    named = {verdict.path for verdict in outcome.verdicts}
    for word in _ORDER:
        rows = [verdict for verdict in outcome.verdicts if verdict.word == word]
        if word == "refused":
            rows += [Verdict(each.path, None, word, each.what) for each in outcome.problems if each.path not in named]
        if word == "open":
            rows += [Verdict(path, None, word, text) for path, text in outcome.open.items() if path not in named]
        if rows:
            parts.append("\n".join([_HEADINGS[word], *_table(rows, outcome, width)]))
    return "\n\n".join(parts) + "\n", not outcome.problems


def _summary(outcome: Outcome) -> str:
    t = outcome.preview
    state = (
        "can be used"
        if outcome.translation
        else "cannot be used"
        if outcome.problems
        else "can be used, once filled in"
    )
    scale = t.precision.loss_scale
    told = f"dynamic from {scale.initial:g}" if isinstance(scale, DynamicLossScale) else scale or "none"
    params = "the model's own" if t.precision.params is None else str(t.precision.params).removeprefix("torch.")
    lines = [
        f"{outcome.source.name}: {state}",
        f"  plan         {plan_name(t.plan)}",
        f"  precision    {params}, loss scale {told}",
        f"  optimizer    {t.optimizer or 'the script brings it'}",
        f"  schedule     {t.scheduler or 'none, or the script brings it'}",
        f"  clipping     {t.max_grad_norm or 'none'}",
        f"  batch        {t.train_batch} a step = {t.micro_batch} x {t.accumulation} x ranks",
    ]
    if t.autocast is not None:
        lines.append(f"  autocast     {str(t.autocast).removeprefix('torch.')}")
    if t.prefetch_bytes is not None:
        lines.append(f"  prefetch     {t.prefetch_bytes} bytes")
    if t.compile:
        lines.append("  compile      every block")
    if any(path in BATCH_KEYS for path in (*outcome.open, *(problem.path for problem in outcome.problems))):
        lines[6] = "  batch        not known"
    return "\n".join(lines)


def _table(rows: list[Verdict], outcome: Outcome, width: int) -> Iterator[str]:
    longest = min(max(len(_left(row, outcome)) for row in rows), width // 2)
    for row in rows:
        left = _left(row, outcome)
        lines = wrap(row.text, max(20, width - longest - 4)) or [""]
        if len(left) > longest:
            yield f"  {left}"
            left = ""
        for line in lines:
            yield f"  {left:<{longest}}  {line}".rstrip()
            left = ""


def _left(row: Verdict, outcome: Outcome) -> str:
    line = outcome.source.lines.get(row.path)
    shown = "" if row.value is None else f" = {said(row.value)}"
    return f"{row.path}{shown}{f' (line {line})' if line and row.word == 'refused' else ''}"


def manual() -> Iterator[tuple[str, str, str, str]]:
    """(path, default, word, text) of every key there is, for the documentation.

    A key whose meaning depends on the type of the optimizer or the schedule has the types in its path.
    """
    for path, section, name in declared():
        support = support_of(section, name)
        field = section.model_fields[name]
        if issubclass(section, Switched):
            if name == "enabled":
                yield path, "false", "refused if true", f"{section.support.why}; nearest: {section.support.nearest}"
        elif support is not None:
            default = "required" if field.is_required() else said(field.get_default(call_default_factory=True))
            word = f"{support.word} unless default" if support.word == "refused" else support.word
            types = ", ".join(_types(section))
            here = f"{path} ({types})" if types else path
            yield here, default, word, f"{support.why}; nearest: {support.nearest}" if support.nearest else support.why


def _types(section: type[Section]) -> list[str]:
    """The types of optimizer or schedule whose params `section` holds."""
    kinds = {**OPTIMIZERS, **SCHEDULERS}
    return [name for name, kind in kinds.items() if kind is section]
