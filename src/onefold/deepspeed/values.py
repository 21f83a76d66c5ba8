"""Owns what a value may be: counts, numbers, switches and names, as JSON, YAML and Python write them.

Invariant: a value is taken as what it plainly says (5e8 and "5e8" are five hundred million) or refused; no value is
bent into another type: `true` is no number, 1 is no switch, "yes" is no switch.
"""

import json
import math
import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Annotated, Any

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

_NUMERIC = re.compile(r"\s*[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?\s*\Z", re.ASCII)
LARGEST = 2**63 - 1


def said(value: Any) -> str:
    """`value` as JSON would write it, cut short."""
    try:
        text = json.dumps(value, default=repr, ensure_ascii=False)
    except ValueError:  # Python prints no integer of more than some thousand digits
        return f"a value of type {type(value).__name__} too long to print"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse(expected: str, value: Any, hint: str = "") -> PydanticCustomError:
    if isinstance(value, str) and value == "auto":
        hint = ': nothing fills in "auto" here'
    elif isinstance(value, str) and value.strip().lower() in ("true", "false"):
        hint = f": write {value.strip().lower()} without quotes"
    # Braces would be taken for the message's own places.
    return PydanticCustomError("value", "{text}", {"text": f"expected {expected}, not {said(value)}{hint}"})


def as_number(value: Any) -> int | float | None:
    """The finite number that `value` says, exactly for integers; None if it says none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        if not _NUMERIC.match(value):
            return None
        text = value.strip()
        value = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if isinstance(value, Integral):  # numpy's too
        return int(value)
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def _whole(least: int, most: int) -> Callable[[Any], int]:
    bound = f"an integer of at least {least}" if most == LARGEST else f"an integer from {least} to {most}"

    def check(value: Any) -> int:
        number = as_number(value)
        if number is None or number != int(number) or not least <= number <= most:
            raise _refuse(bound, value)
        return int(number)

    return check


_count = _whole(0, LARGEST)


def whole(least: int = 0, most: int = LARGEST) -> Any:
    """An integer from `least` to `most`; an integral float or numeric string counts as one."""
    return PlainValidator(_whole(least, most))


def real(least: float | None = None, most: float | None = None, *, above: float | None = None) -> Any:
    """A finite number within bounds."""
    parts = [f"of at least {least:g}"] if least is not None else [f"above {above:g}"] if above is not None else []
    parts += [f"at most {most:g}"] if most is not None else []
    expected = f"a number {' and '.join(parts)}" if parts else "a finite number"

    def check(value: Any) -> float:
        number = as_number(value)
        wrong = number is None or abs(number) > 1e300
        wrong = wrong or (least is not None and number < least) or (most is not None and number > most)  # type: ignore[operator]
        if wrong or (above is not None and number <= above):  # type: ignore[operator]
            raise _refuse(expected, value)
        return float(number)  # type: ignore[arg-type]

    return PlainValidator(check)


def one_of(*names: str, or_null: bool = False) -> Any:
    """One of `names`, whatever the case of its letters; gives the spelling of `names`. With `or_null`, null stays."""
    spelled = {name.lower(): name for name in names}

    def check(value: Any) -> str | None:
        if or_null and value is None:
            return None
        found = spelled.get(value.lower()) if isinstance(value, str) else None
        if found is None:
            raise _refuse(f"one of {', '.join(names)}", value)
        return found

    return PlainValidator(check)


def _interval(value: Any) -> int | float | None:
    """A number of steps, null or infinity: never (as Accelerate writes it)."""
    return value if value is None or (isinstance(value, float) and value == math.inf) else _count(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        is_number = isinstance(value, Real) and value in (0, 1)
        raise _refuse("true or false", value, f": write {'true' if value else 'false'}" if is_number else "")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or value == "auto":
        raise _refuse("a string", value)
    return value


def _loss_scale(value: Any) -> float:
    number = as_number(value)
    if number is None or not 0 <= number <= 1e30:
        raise _refuse("0 (dynamic) or a positive loss scale", value)
    return float(number)


def _betas(value: Any) -> tuple[float, float]:
    numbers = [as_number(item) for item in value] if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or any(item is None or not 0 <= item < 1 for item in numbers):
        raise _refuse("two numbers in [0, 1)", value)
    first, second = (float(item) for item in numbers if item is not None)
    return first, second


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise _refuse("a list of strings", value)
    return list(value)


def _numbers(value: Any) -> float | list[float]:
    several = isinstance(value, list | tuple)
    numbers = [as_number(item) for item in (value if several else [value])]
    if not numbers or any(item is None or not 0 <= item <= 1e300 for item in numbers):
        raise _refuse("a number of at least 0, or a list of one for each parameter group", value)
    given = [float(item) for item in numbers if item is not None]
    return given if several else given[0]


def _section(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse("a section {...}", value)
    return value


def _any(value: Any) -> Any:
    return value


def maybe(check: Callable[[Any], Any]) -> Any:
    """`check`, or null."""
    return PlainValidator(lambda value: None if value is None else check(value))


Flag = Annotated[bool, PlainValidator(_flag)]
Text = Annotated[str, PlainValidator(_text)]
Texts = Annotated[list[str], PlainValidator(_texts)]
Betas = Annotated[tuple[float, float], PlainValidator(_betas)]
PerGroup = Annotated[float | list[float], PlainValidator(_numbers)]
Count = Annotated[int, whole(0)]
Positive = Annotated[int, whole(1)]
Integer = Annotated[int, whole(-LARGEST)]
NonNegative = Annotated[float, real(0)]
Share = Annotated[float, real(0, 1)]
Number = Annotated[float, real()]
LossScale = Annotated[float, PlainValidator(_loss_scale)]
Free = Annotated[dict[str, Any], PlainValidator(_section)]
MaybeText = Annotated[str | None, maybe(_text)]
MaybeFlag = Annotated[bool | None, maybe(_flag)]
MaybeFree = Annotated[dict[str, Any] | None, maybe(_section)]
MaybeCount = Annotated[int | None, maybe(_count)]
Interval = Annotated[int | float | None, PlainValidator(_interval)]
MaybePositive = Annotated[int | None, maybe(_whole(1, LARGEST))]
MaybePerGroup = Annotated[float | list[float] | None, maybe(_numbers)]
Anything = Annotated[Any, PlainValidator(_any)]
MaybeTexts = Annotated[list[str] | None, maybe(_texts)]
