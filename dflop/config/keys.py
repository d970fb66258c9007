"""Checks of one layer before it is merged: whether its keys exist, and their values are of the right kind."""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from dflop.config.schema import Config, FixedPlan
from dflop.runtime import UserError, way_out_of

__all__ = ["refuse_misfits", "type_message"]

_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def refuse_misfits(values: Mapping[str, Any], where: str, section: type = Config, prefix: str = "") -> None:
    """Refuse unknown keys, and values of the wrong kind, also those that OmegaConf would convert.

    Raises:
        UserError: naming the key in full, the value, and what was probably meant.
    """
    hints, others = _hints_of(section)
    for key, value in values.items():
        name = f"{prefix}{key}"
        if others is not None and key not in hints and (value is None or isinstance(value, Mapping)):
            refuse_misfits(value or {}, where, others, f"{name}.")
            continue
        if key not in hints:
            way_out = way_out_of(str(key), hints, prefix)
            raise UserError(f"{where}: unknown key `{name}` (value {value!r}); {way_out}")
        nested, is_list = _nested_section(hints[key])
        if value is None:
            if types.NoneType not in typing.get_args(hints[key]):
                raise UserError(f"{where}: `{name}` is null; it must be {_kind_of(hints[key])}")
            continue
        if typing.get_origin(hints[key]) is dict:
            _refuse_entries(value, where, typing.get_args(hints[key])[1], name)
            continue
        if nested is None:
            is_bool = bool in (hints[key], *typing.get_args(hints[key]))
            wrong_bool = is_bool and not isinstance(value, bool) and "${" not in str(value)
            if isinstance(value, Mapping) or isinstance(value, list) != is_list or wrong_bool:
                raise UserError(f"{where}: `{name}` is {value!r}; it must be {_kind_of(hints[key])}")
            continue
        if is_list:
            if not isinstance(value, list):
                raise UserError(
                    f"{where}: `{name}` is {value!r}; it must be a list, each entry with {_keys_of(nested)}"
                )
            for index, entry in enumerate(value):
                if not isinstance(entry, Mapping):
                    raise UserError(f"{where}: `{name}[{index}]` is {entry!r}; it must hold {_keys_of(nested)}")
                refuse_misfits(entry, where, nested, f"{name}[{index}].")
        elif isinstance(value, Mapping):
            refuse_misfits(value, where, nested, f"{name}.")
        else:
            raise UserError(f"{where}: `{name}` is {value!r}; it must hold the keys {_keys_of(nested)}")


def _refuse_entries(value: Any, where: str, section: type, name: str) -> None:
    """Refuse a value that is not a mapping from names to sections of this type."""
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: `{name}` is {value!r}; it must hold names, each with {_keys_of(section)}")
    for entry, own in value.items():
        if not isinstance(own, Mapping):
            raise UserError(f"{where}: `{name}.{entry}` is {own!r}; it must hold {_keys_of(section)}")
        refuse_misfits(own, where, section, f"{name}.{entry}.")


def _hints_of(section: type) -> tuple[dict[str, Any], type | None]:
    """The types of a section's own keys; and the type of section that each further key holds, None where the section
    takes no further keys."""
    hints = typing.get_type_hints(section)
    # Only `plan.fixed` and `plan.today` take further keys: in them, names of modules stand beside the own keys.
    mappings = [name for name, hint in hints.items() if typing.get_origin(hint) is dict and section is FixedPlan]
    others = [typing.get_args(hints.pop(name))[1] for name in mappings]
    return hints, others[0] if others else None


def _keys_of(section: type) -> str:
    return ", ".join(_hints_of(section)[0])


def _nested_section(hint: Any) -> tuple[type | None, bool]:
    """The dataclass inside `X`, `Optional[X]` or `list[X]`, and whether it was a list."""
    arguments = [item for item in typing.get_args(hint) if item is not types.NoneType]
    candidate = arguments[0] if arguments else hint
    return (candidate if dataclasses.is_dataclass(candidate) else None), typing.get_origin(hint) is list


def type_message(error: OmegaConfBaseException, values: Mapping[str, Any], where: str) -> str:
    """The message for a value that OmegaConf refused."""
    key = re.sub(r"^plan\.(fixed|today)\.modules\.", r"plan.\1.", getattr(error, "full_key", None) or "?")
    value: Any = values
    for name in key.replace("[", ".").replace("]", "").split("."):
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return f"{where}: `{key}`: {str(error).splitlines()[0]}"
    if isinstance(value, str) and "${" in value:
        return f"{where}: `{key}` is {value!r}: {str(error).splitlines()[0]}"
    return f"{where}: `{key}` is {value!r}; it must be {_kind_at(key)}"


def _kind_at(key: str) -> str:
    """What the value at a dotted key must be, in words."""
    hint: Any = Config
    for name in re.findall(r"[^.\[\]]+", key):
        section, _ = _nested_section(hint)
        if typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        elif name.isdigit() or section is None:
            hint = typing.get_args(hint)[0]
        else:
            hints, others = _hints_of(section)
            hint = hints.get(name, others)
    return _kind_of(hint)


def _kind_of(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return "a list"
    section, _ = _nested_section(hint)
    if section is not None:
        return f"a section with the keys {_keys_of(section)}"
    arguments = [item for item in typing.get_args(hint) if item is not types.NoneType]
    return _KINDS[arguments[0] if arguments else hint]
