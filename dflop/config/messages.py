"""What pydantic finds wrong in a config, in our words: the key, its value and what would be right."""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any

from dflop.base import printable, way_out_of
from dflop.config.schema import Config, FixedPlan
from dflop.plan.schedules import REMOVED_SCHEDULES

__all__ = ["UNKNOWN_KEY", "message_of"]

UNKNOWN_KEY = "unexpected_keyword_argument"
_KINDS = {"int": "a whole number", "float": "a number", "string": "a text", "bool": "true or false"}
_KINDS["finite"] = _KINDS["int"]  # an infinite number where a whole one belongs
# From the top of the config to a key: names, and numbers of entries in lists.
_Place = tuple[str | int, ...]


def message_of(error: Mapping[str, Any]) -> str:
    """The message for one of the errors that pydantic lists."""
    place, value, kind = error["loc"], error["input"], error["type"]
    key, section = _key_at(place), _section_at(place)
    is_no_module = kind == "dataclass_type" and (place[0], *place[-2:-1]) == ("plan", "modules")
    known = _keys_of(FixedPlan) if is_no_module else []
    if kind in (UNKNOWN_KEY, "invalid_key") or difflib.get_close_matches(str(place[-1]), known):
        known = known or _keys_of(_section_at(place[:-1]))
        way_out = way_out_of(str(place[-1]), known, key.removesuffix(printable(str(place[-1]))))
        return f"unknown key `{key}` (value {value!r}); {way_out}"
    if kind == "value_error":
        return f"`{key}` {error['ctx']['error']}"
    if kind == "literal_error":
        wanted = "be one of " + error["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        if value in REMOVED_SCHEDULES:
            return f"`{key}` is {value!r}, which was removed; it must {wanted}"
    elif kind == "dataclass_type":
        wanted = f"hold the keys {', '.join(_keys_of(section))}"
        if is_no_module:
            wanted += f" if it is a module; other keys here are {', '.join(known)}"
    elif kind == "dict_type":
        wanted = f"hold names, each with {', '.join(_keys_of(section))}"
    elif kind == "list_type":
        wanted = "be a list" + (f", each entry with {', '.join(_keys_of(section))}" if section else "")
    else:
        wanted = f"be {_KINDS[kind.partition('_')[0]]}"
    return f"`{key}` is {'null' if value is None else repr(value)}; it must {wanted}"


def _key_at(place: _Place) -> str:
    """A key in full, as `data.sources[1].path`. Modules stand beside the other keys of `plan.fixed`."""
    if place[0:3:2] == ("plan", "modules"):
        place = place[:2] + place[3:]
    names = (f"[{name}]" if isinstance(name, int) else f".{printable(name)}" for name in place)
    return "".join(names).removeprefix(".")


def _section_at(place: _Place) -> type | None:
    """The section that a key holds, e.g. `TrainConfig` for `train`; None for a single value.

    For a list or a mapping of sections it is the section of an entry, e.g. `SourceConfig` for `data.sources`.
    """
    section: type | None = Config
    for name in place:
        hints = typing.get_type_hints(section) if section else {}
        if name in hints:  # and not an entry's number or name
            kinds = (hints[name], *typing.get_args(hints[name]))
            section = next(filter(dataclasses.is_dataclass, kinds), None)
    return section


def _keys_of(section: type) -> list[str]:
    return [item.name for item in dataclasses.fields(section) if (section, item.name) != (FixedPlan, "modules")]
