"""Owns the way from what was written to checked sections: unknown keys, other spellings, "auto", wrong values.

Invariant: every key of the source comes out once, as a `Key` with its path or in a `Problem` that names its path.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Any, Literal, TypeVar, get_args

from pydantic import ValidationError

from onefold.deepspeed.auto_values import Filled, Given, fill
from onefold.deepspeed.config import FOREIGN, Config
from onefold.deepspeed.key_support import Section, Support, Switched, support_of
from onefold.deepspeed.optimizer_sections import (
    OPTIMIZERS,
    SCHEDULERS,
    OptimizerParams,
    OptimizerSection,
    ScheduleParams,
    SchedulerSection,
)
from onefold.deepspeed.source import Source
from onefold.deepspeed.values import said

_OFF = Support("ignored", "part of a section that is off")
_OF_REFUSED = Support("ignored", "part of a section that is refused")
_NULL = Support("ignored", "null: as if it were not there")
NoteWord = Literal["honoured", "adapted", "ignored"]
AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a configuration cannot be used: where, and what to do."""

    path: str
    what: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path}{f' (line {self.line})' if self.line else ''}: {self.what}"


@dataclass(frozen=True, slots=True)
class Key:
    """One key that was written: where, what, which declared key it is, what is said of it, and what "auto" became."""

    written: str
    path: str
    value: Any
    support: Support
    filled: Filled | None = None


@dataclass(slots=True)
class Findings:
    """What is found in a configuration: the checked sections, all keys, and all problems.

    `notes` holds what the translator says of single keys; `open` what has to be given for those that nothing fills in.
    """

    source: Source
    given: Given
    config: Config = field(default_factory=Config)
    optimizer: OptimizerParams | None = None
    scheduler: ScheduleParams | None = None
    keys: list[Key] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: dict[str, tuple[NoteWord, str]] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)

    def note(self, path: str, text: str, word: NoteWord = "honoured") -> None:
        """Say what the declared key `path` became."""
        self.notes[path] = (word, text)

    def refuse(self, path: str, what: str) -> None:
        """Add a problem, with its line where that is known."""
        self.problems.append(Problem(path, what, self.source.lines.get(path)))

    def key(self, path: str) -> Key | None:
        """The key that was written for the declared `path`."""
        return next((key for key in self.keys if key.path == path), None)


def walk(source: Source, given: Given) -> Findings:
    """Check all of `source`. Problems are collected, not raised."""
    findings = Findings(source, given)
    clean = _section(findings, source.values, Config, "", "")
    optimizer, scheduler = clean.get("optimizer"), clean.get("scheduler")
    if isinstance(optimizer, dict) and (chosen := optimizer_section(optimizer.get("type"))):
        findings.optimizer = _checked(findings, chosen, optimizer.get("params") or {}, "optimizer.params")
    if isinstance(scheduler, dict) and (kind := SCHEDULERS.get(str(scheduler.get("type")))):
        findings.scheduler = _checked(findings, kind, scheduler.get("params") or {}, "scheduler.params")
    findings.config = _checked(findings, Config, clean, "") or Config()
    return findings


def optimizer_section(kind: Any) -> type[OptimizerParams] | None:
    """The section of `optimizer.params` for a type, where DeepSpeed names one."""
    return OPTIMIZERS.get(kind.lower()) if isinstance(kind, str) else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _section(
    findings: Findings, raw: Mapping[str, Any], section: type[Section], written: str, path: str
) -> dict[str, Any]:
    """The keys of `raw` under their declared names, without those that are unknown, null sections or "auto"."""
    clean: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    off = issubclass(section, Switched) and raw.get("enabled") is not True
    for key, value in raw.items():
        here, name = _join(written, key), section.aliases.get(key, key)
        if name not in section.model_fields:
            findings.refuse(here, unknown(key, section))
            continue
        if name in spelled:
            findings.refuse(here, f"says the same as {spelled[name]}; keep one of them")
            continue
        spelled[name] = here
        if inner := _inner(section, name, raw):
            nested = _nested(findings, value, inner, here, _join(path, name))
            if nested is not None:
                clean[name] = nested
            continue
        value, filled = _fill(findings, value, section, here, _join(path, name))
        if filled is None or filled.value is not None:
            clean[name] = value
        if filled is not None and filled.missing:
            findings.open[here] = f'"auto", and nothing fills it in: give {filled.missing}'
        support = support_of(section, name) or (_switched(section, name) if not off else _OFF)
        findings.keys.append(Key(here, _join(path, name), raw[key], support, filled))
    return clean


def _switched(section: type[Section], name: str) -> Support:
    """The support of a key of a section that is on and counts as a whole."""
    return section.support if name == "enabled" and issubclass(section, Switched) else _OF_REFUSED


def _nested(findings: Findings, value: Any, inner: type[Section], written: str, path: str) -> dict[str, Any] | None:
    if isinstance(value, bool) and path == "zero_optimization":
        findings.keys.append(Key(written, path, value, Support("honoured", "stage 1 or 0, as this older form means")))
        return {"stage": int(value)}
    if value is None:
        findings.keys.append(Key(written, path, None, _NULL))
        return None
    if not isinstance(value, Mapping):
        findings.refuse(written, f"expected a section {{...}}, not {said(value)}")
        return None
    if not value:
        findings.keys.append(Key(written, path, {}, Support("ignored", "empty: defaults")))
    return _section(findings, value, inner, written, path)


def _fill(findings: Findings, value: Any, section: type[Section], written: str, path: str) -> tuple[Any, Filled | None]:
    """`value`, or what stands for it if it is "auto"."""
    if not (isinstance(value, str) and value == "auto"):
        return value, None
    filled = fill(path, findings.given, findings.source.values)
    if filled is None and section.default_on_auto:
        default = section.model_fields[path.rpartition(".")[2]].get_default(call_default_factory=True)
        filled = Filled(None, f"the default, {said(default)}")
    return (value, None) if filled is None else (filled.value, filled)


def _inner(section: type[Section], name: str, raw: Mapping[str, Any]) -> type[Section] | None:
    """The section that the key `name` holds; the params of an optimizer or a schedule depend on its type."""
    if name == "params" and issubclass(section, OptimizerSection):
        return optimizer_section(raw.get("type"))
    if name == "params" and issubclass(section, SchedulerSection):
        return SCHEDULERS.get(str(raw.get("type")))
    kinds = [kind for kind in get_args(section.model_fields[name].annotation) if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], Section) else None


def _checked(findings: Findings, section: type[AnySection], clean: dict[str, Any], path: str) -> AnySection | None:
    """`clean` as a `section`; what is wrong in it becomes problems, and its default. None if nothing is left to use."""
    for _ in range(3):  # leaving out a wrong key may leave out a required one, and then its section
        try:
            return section.model_validate(clean)
        except ValidationError as error:
            usable = True
            for wrong in error.errors(include_url=False, include_input=False):
                place = [str(part) for part in wrong["loc"]]
                missing = wrong["type"] == "missing"
                _report(findings, ".".join([path, *place] if path else place), missing, wrong["msg"])
                usable &= _without(clean, place[:-1] if missing else place)
            if not usable:
                return None
    return None


def _report(findings: Findings, path: str, missing: bool, message: str) -> None:
    key = findings.key(path)
    if missing:
        known = any(problem.path == path for problem in findings.problems)
        if not known and (key is None or not _is_open(key)):
            findings.refuse(path, "is missing; it has no default")
    else:
        findings.refuse(key.written if key else path, message)


def _is_open(key: Key) -> bool:
    return key.filled is not None and bool(key.filled.missing)


def _without(clean: dict[str, Any], place: list[str]) -> bool:
    """Drop what lies at `place`; False if that is everything."""
    if not place:
        return False
    for part in place[:-1]:
        if not isinstance(clean.get(part), dict):  # gone already, with a section that lacks a required key
            return True
        clean = clean[part]
    clean.pop(place[-1], None)
    return True


def unknown(key: str, section: type[Section]) -> str:
    """What to say of a key that `section` does not have."""
    if section is Config and key in FOREIGN:
        return f"belongs to {FOREIGN[key]}; keep only DeepSpeed's keys in this file"
    names = [*section.model_fields, *section.aliases]
    close = get_close_matches(key.lower(), names, n=1, cutoff=0.75)
    elsewhere = places(key)
    if elsewhere:
        return f"unknown key here; it belongs at {' or '.join(elsewhere[:3])}"
    if close:
        return f"unknown key; did you mean {close[0]}?"
    few = f"; known are {', '.join(sorted(section.model_fields))}" if len(section.model_fields) <= 16 else ""
    return f"unknown key{few}"


@cache
def places(name: str) -> tuple[str, ...]:
    """Every path that ends in `name`, where that says something."""
    if name in ("enabled", "params", "type"):
        return ()
    return tuple(dict.fromkeys(path for path, _, _ in declared() if path.rpartition(".")[2] == name))


def declared(section: type[Section] = Config, path: str = "") -> Iterator[tuple[str, type[Section], str]]:
    """(path, section, name) of every declared key, sections included, in order of declaration.

    The keys of an optimizer's or a schedule's `params` come once for each type that has keys of its own.
    """
    for name in section.model_fields:
        here = _join(path, name)
        yield here, section, name
        inner = _inner(section, name, {})
        kinds: dict[type[Section], None] = {} if inner is None else {inner: None}
        if name == "params":
            kinds = dict.fromkeys(OPTIMIZERS.values() if issubclass(section, OptimizerSection) else SCHEDULERS.values())
        for kind in kinds:
            yield from declared(kind, here)
