"""The kinds of values that config keys take, each with the words for what is right.

A validator's words follow the key in a message: "`train.steps` is 0; it must be at least 1".
"""

import math
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dflop.plan import PLACEMENTS, SCHEDULES, SHARDINGS

__all__ = ["SAMPLING", "SAMPLING_FORMS"]

SAMPLING = re.compile(r"all|(first|end|random):(?=[\d.]*[1-9])\d+(%|\.\d+%)?")
SAMPLING_FORMS = "all, first:30%, first:1000, end:… or random:…, with a whole number above 0 or a percentage"


def _number(kind: type, wanted: str, holds: Callable[[Any], bool]) -> Any:
    """Numbers for which `holds` is true; true and false are none."""

    def read(value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"is {value!r}; it must be {'a whole number' if kind is int else 'a number'}")
        if kind is int and isinstance(value, str) and "e" in value.lower():  # YAML reads 1e3 as a text
            with suppress(ValueError):
                return float(value)
        return value

    def check(value: Any) -> Any:
        if not (value < math.inf and holds(value)):
            raise ValueError(f"is {value}; it must be {wanted}")
        return value

    return Annotated[kind, BeforeValidator(read), AfterValidator(check)]


def _text(form: str, wanted: str) -> Any:
    """Texts of this form, a regular expression."""

    def check(value: str) -> str:
        if not re.fullmatch(form, value):
            raise ValueError(f"is {value!r}; {wanted}")
        return value

    return Annotated[str, AfterValidator(check)]


def _not_empty(wanted: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if not value:
            raise ValueError(f"is empty; it must {wanted}")
        return value

    return AfterValidator(check)


def _two(value: list) -> list:
    if len(value) != 2:
        raise ValueError(f"is {value}; it must hold two values")
    return value


def _options(value: str) -> str:
    try:
        shlex.split(value)
    except ValueError as error:
        raise ValueError(f"is {value!r}: {str(error).lower()}; quote it as for a shell") from None
    return value


# Options of a command, quoted as for a shell.
Options = Annotated[str, AfterValidator(_options)]

Count = _number(int, "at least 1", lambda number: number >= 1)
PowerOfTwo = _number(int, "a power of two: 1, 2, 4, 8, …", lambda number: number >= 1 and not number & (number - 1))
CountOrZero = _number(int, "0 or more, and finite", lambda number: number >= 0)
AtLeastOne = _number(float, "at least 1", lambda number: number >= 1)
AboveZero = _number(float, "above 0 and finite", lambda number: number > 0)
Repeats = _number(float, "above 0, and at most 1000", lambda number: 0 < number <= 1000)
NotNegative = _number(float, "0 or more, and finite", lambda number: number >= 0)
BelowOne = _number(float, "0 or more, and below 1", lambda number: 0 <= number < 1)
Share = _number(float, "from 0 to 1", lambda number: 0 <= number <= 1)
Betas = Annotated[list[BelowOne], AfterValidator(_two)]

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
RunName = _text(_NAME, "it names a folder under results/: use letters, digits, dot, dash and underscore")
SourceName = _text(_NAME, "use letters, digits, dot, dash and underscore")
# The keys of a record that `shapes.records` reads.
RecordKey = Literal[
    *("id", "conversations", "messages", "system", "image", "images", "video", "videos", "audio", "audios"),
    *("width", "height"),
]
Sampling = _text(SAMPLING.pattern, f"it must be {SAMPLING_FORMS}")
TimeLimit = _text(r"\d*[1-9]\d*[mhd]?", "it must be a whole number of minutes, or one with its unit: 90m, 24h, 2d")
Manifest = Annotated[str, Field(validate_default=True), _not_empty("name a manifest")]

Placement = Literal[tuple(PLACEMENTS)]
ScheduleName = Literal[tuple(SCHEDULES)]
ShardingName = Literal[tuple(SHARDINGS)]
# A policy's file in `balance/policies` has its name. They are not imported, as every job reads the config again.
_POLICIES = (Path(__file__).parents[1] / "balance" / "policies").glob("*.py")
PolicyName = Literal[tuple(sorted(path.stem for path in _POLICIES if path.stem not in ("__init__", "policy")))]
Precision = Literal["fp32", "bf16", "fp64"]
# YAML reads `on` and `off` as true and false.
_SWITCHED = {True: "on", False: "off"}
Switch = Annotated[
    Literal["off", "on", "auto"], BeforeValidator(lambda value: _SWITCHED[value] if isinstance(value, bool) else value)
]
SOME = _not_empty("hold at least one value")
