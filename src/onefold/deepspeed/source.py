"""Owns the text of a configuration: strict JSON, with the line of every key.

Invariant: what is read here is what the file says. Nothing is dropped, no key counts twice, no number is made up.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]  # no stub names the C scanner
from pathlib import Path
from typing import Any

from onefold.errors import ConfigError

_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?(?![\w.+-])")
_HALF = re.compile("[\ud800-\udfff]")
_WORDS = {"true": True, "false": False, "null": None}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 64
_MAX_DIGITS = 400


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration as it was written: its values, where it came from, and the line of each key path."""

    values: dict[str, Any]
    name: str = "the configuration"
    lines: Mapping[str, int] = field(default_factory=dict)


def read(config: "Mapping[str, Any] | str | Path") -> Source:
    """Read a configuration: a mapping, the path of a JSON file, JSON text, or JSON text in URL-safe base64.

    Raises:
        ConfigError: there is no such file, the text is no strict JSON (the line is named), or a key is given twice.
    """
    if isinstance(config, Mapping):
        return Source(_plain(config, "", 0))
    if not isinstance(config, str | Path):
        raise ConfigError(f"a configuration is a dict, a path, or a string of JSON or base64, not {config!r}")
    if isinstance(config, str) and config.lstrip().startswith("{"):
        return _parse(config, "the configuration")
    text = _decoded(config) if isinstance(config, str) else None
    if text is not None:
        return _parse(text, "the configuration (base64)")
    return _parse(_contents(Path(config)), str(config))


def _contents(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {str(path)[:200]!r}, and it is not JSON in base64 either") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (OSError, ValueError) as error:  # a folder, no permission, a name too long or with a zero byte
        raise ConfigError(f"{str(path)[:200]!r} cannot be read: {error}") from error


def _decoded(text: str) -> str | None:
    """The JSON object in `text`, if it is one in base64."""
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _plain(value: Any, path: str, depth: int) -> Any:
    """A copy made of dicts and lists alone, so that the caller's objects are neither kept nor changed."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{path[:80]}...: nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{path or 'top level'}: keys are strings, not {key!r}")
            _check_text(key, path or "top level")
        return {key: _plain(item, _join(path, key), depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{place}]", depth + 1) for place, item in enumerate(value)]
    if isinstance(value, str):
        _check_text(value, path)
    return value


def _check_text(text: str, path: str) -> None:
    if wrong := _wrong_in(text):
        raise ConfigError(f"{path}: {wrong}")


def _wrong_in(text: str) -> str | None:
    """What is wrong with half of a surrogate pair: it cannot be printed, not even in a message. None: there is none."""
    return f"{ascii(text)[:80]} holds half of a surrogate pair, which is no character" if _HALF.search(text) else None


def _parse(text: str, name: str) -> Source:
    parser = _Parser(text, name)
    place = parser.space(0)
    if text[place : place + 1] != "{":
        parser.fail(place, 'a configuration is one JSON object and starts with "{"')
    values, place = parser.value(place, "", 0)
    if parser.space(place) != len(text):
        parser.fail(parser.space(place), 'text after the closing "}"')
    return Source(values, name, parser.lines)


class _Parser:
    """A JSON reader that knows the line it is on, which the standard library's does not tell."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.lines: dict[str, int] = {}

    def line(self, place: int) -> int:
        return self.text.count("\n", 0, place) + 1

    def fail(self, place: int, what: str) -> None:
        raise ConfigError(f"{self.name}, line {self.line(place)}: {what}")

    def space(self, place: int) -> int:
        match = _SPACE.match(self.text, place)
        end = match.end() if match else place
        if self.text[end : end + 1] == "#" or self.text[end : end + 2] in ("//", "/*"):
            self.fail(end, "JSON has no comments; take it out")
        return end

    def value(self, place: int, path: str, depth: int) -> tuple[Any, int]:
        if depth > _MAX_DEPTH:
            self.fail(place, f"nested more than {_MAX_DEPTH} levels deep")
        start = self.text[place : place + 1]
        if start == "{":
            return self.mapping(place + 1, path, depth)
        if start == "[":
            return self.sequence(place + 1, path, depth)
        if start == '"':
            return self.string(place)
        return self.scalar(place)

    def string(self, place: int) -> tuple[str, int]:
        try:
            value, end = scanstring(self.text, place + 1, True)
        except JSONDecodeError as error:
            self.fail(error.pos, f"{error.msg[:1].lower()}{error.msg[1:]}")
        if wrong := _wrong_in(value):
            self.fail(place, wrong)
        return value, end

    def scalar(self, place: int) -> tuple[Any, int]:
        match = _NUMBER.match(self.text, place)
        if match:
            if len(match[0]) > _MAX_DIGITS:
                self.fail(place, f"a number of {len(match[0])} digits")
            number = float(match[0]) if match[1] or match[2] else int(match[0])
            if number in (float("inf"), float("-inf")):
                self.fail(place, f"{match[0]} is too large for a number")
            return number, match.end()
        word = re.match(r"[^\s,\]}:]*", self.text[place : place + 60])
        said = word[0] if word else ""
        if said in _WORDS:
            return _WORDS[said], place + len(said)
        if said in _PYTHON:
            self.fail(place, f"JSON writes {_PYTHON[said]}, not {said}")
        if said.lstrip("+-") in ("NaN", "Infinity", "nan", "inf"):
            self.fail(place, f"{said} is no JSON number")
        here = said or self.text[place : place + 1]
        self.fail(place, f"expected a value, found {here!r}" if here else "the text ends in the middle")
        raise AssertionError("fail raises")

    def mapping(self, place: int, path: str, depth: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        at: dict[str, int] = {}
        place = self.space(place)
        while self.text[place : place + 1] != "}":
            if self.text[place : place + 1] != '"':
                here = self.text[place : place + 1]
                self.fail(place, f'a key is a string in "...", found {here!r}' if here else "a closing } is missing")
            key_at = place
            key, place = self.string(place)
            if key in values:
                self.fail(key_at, f"{_join(path, key)} is given twice, first on line {self.line(at[key])}")
            place = self.space(place)
            if self.text[place : place + 1] != ":":
                self.fail(place, f'a ":" is missing after the key "{key}"')
            at[key] = key_at
            self.lines[_join(path, key)] = self.line(key_at)
            values[key], place = self.value(self.space(place + 1), _join(path, key), depth + 1)
            place = self.comma(place, "}")
        return values, place + 1

    def sequence(self, place: int, path: str, depth: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        place = self.space(place)
        while self.text[place : place + 1] != "]":
            item, place = self.value(place, f"{path}[{len(values)}]", depth + 1)
            values.append(item)
            place = self.comma(place, "]")
        return values, place + 1

    def comma(self, place: int, closing: str) -> int:
        """The place of the next item, or of `closing`."""
        place = self.space(place)
        here = self.text[place : place + 1]
        if here == ",":
            after = self.space(place + 1)
            if self.text[after : after + 1] == closing:
                self.fail(place, f'JSON allows no comma before "{closing}"; take it out')
            return after
        if here != closing:
            what = f'a "," or "{closing}" is missing'
            self.fail(place, f"{what} before {here!r}" if here else f"{what} at the end")
        return place


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
