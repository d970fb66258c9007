"""Reading one layer of a config (a file, a text or a single key) into nested mappings with our names for its keys."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yaml import YAMLError, safe_load

from dflop.base import UserError

__all__ = ["Layer", "read_layer"]

Layer = Path | str | Mapping[str, Any]

_DATASET_KEYS = {"json_path": "path", "sampling_strategy": "sampling"}
# `key=value`, with no slash in the key. A text that is the path of an existing file is read as that file instead.
_OVERRIDE = re.compile(r"\s*([^/\\=]*[^/\\=\s])\s*=(.*)", re.DOTALL)
_IN_LIST = re.compile(r"(.*?)(\[|\.\d+(\.|$))")


def read_layer(layer: Layer) -> tuple[dict[str, Any], str]:
    """The keys of a layer as nested mappings, and what to call the layer in messages.

    A layer is a mapping, the path of a YAML file, the text of one in braces (`{train: {lr: 0.1}}`, JSON is such a
    text), or one key with its value (`train.lr=0.1`). Dotted keys (`{"train.lr": 0.1}`) override the mapping's other
    keys. Top-level keys that begin with `x-` are left out: they only hold YAML anchors for the rest of the file.

    Raises:
        UserError: for a file that is missing or cannot be read, and for content that is not a mapping.
    """
    values, where = _read(layer)
    values = {str(key): value for key, value in values.items() if not str(key).startswith("x-")}
    return _with_our_names(_without_dots(values, where), where), where


def _read(layer: Layer) -> tuple[dict[str, Any], str]:
    if isinstance(layer, Mapping):
        return dict(layer), "config"
    if isinstance(layer, str) and layer.lstrip().startswith("{"):
        return _read_text(layer), "config text"
    if isinstance(layer, str) and (override := _OVERRIDE.fullmatch(layer)) and not Path(layer).is_file():
        try:
            return {override[1]: safe_load(override[2])}, f"config text {layer!r}"
        except YAMLError as error:
            raise UserError(f"config text {layer!r}: the value is not YAML: {_in_one_line(error)}") from None
    return _read_file(Path(layer)), str(layer)


def _read_text(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)  # far faster than the YAML parser, which would read JSON, too
    except json.JSONDecodeError:
        pass
    try:
        return safe_load(text)
    except YAMLError as error:
        raise UserError(f"config text is neither JSON nor YAML: {_in_one_line(error)}") from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if ": " in str(path):
            raise UserError(f"config text {str(path)!r} must stand in braces: {{{path}}}") from None
        raise UserError(f"config file {path} does not exist; config/config.yaml is the one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None
    except YAMLError as error:
        raise UserError(f"config file {path} is not YAML: {_in_one_line(error)}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"config file {path} holds a {type(values).__name__}; it must hold `key: value` pairs")
    return values


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _without_dots(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The values with each dotted key split into nested mappings; it overrides what stands at its place."""
    nested = {key: value for key, value in values.items() if "." not in str(key)}
    for key in (key for key in values if key not in nested):
        if of_list := _IN_LIST.match(key):
            raise UserError(
                f"{where}: `{key}` is one entry of the list `{of_list[1]}`, which can be given as a whole only: "
                f"{of_list[1]}=[…]"
            )
        *path, leaf = key.split(".")
        target = nested
        for depth, name in enumerate(path, start=1):
            inner = target.get(name)
            if inner is not None and not isinstance(inner, Mapping):
                raise UserError(
                    f"{where}: `{key}` cannot be set: `{'.'.join(path[:depth])}` is {inner!r}, which holds no keys"
                )
            target[name] = dict(inner or {})
            target = target[name]
        target[leaf] = values[key]
    return nested


def _with_our_names(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The values with LLaVA-NeXT's names replaced by ours: `data.datasets`, and the keys of its entries."""
    data = values.get("data")
    if not isinstance(data, dict):
        return values
    data = dict(data)
    if "datasets" in data:
        if data.get("sources"):
            raise UserError(f"{where}: `data.datasets` and `data.sources` both name the data; keep one of them")
        data["sources"] = data.pop("datasets")
    if isinstance(data.get("sources"), list):
        data["sources"] = [
            {_DATASET_KEYS.get(key, key): value for key, value in entry.items()} if isinstance(entry, dict) else entry
            for entry in data["sources"]
        ]
    return {**values, "data": data}
