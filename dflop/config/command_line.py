"""Config keys on Snakemake's command line, which knows neither dotted keys nor the types of our values.

Snakemake parses `snakemake --config train.lr=1e-3` before it reads the workflow. It hands the parsed values to the
processes of its jobs as text.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from dflop.config.layers import read_layer

__all__ = ["with_dotted_keys", "with_texts_read"]

_Parser = Callable[[list[str] | None], dict[str, Any]]
# How Python and YAML spell true, false and null, and the value that each spelling means.
_VALUES_BY_SPELLING = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def with_dotted_keys(parse: _Parser) -> _Parser:
    """A parser of `key=value` entries that takes dotted keys, too, by writing them in `parse`'s own form.

    The list of entries is changed in place: Snakemake hands it on to its jobs, which use `parse` itself.
    """

    def parse_entries(entries: list[str] | None) -> dict[str, Any]:
        if entries:
            entries[:] = [_undotted(entry) for entry in entries]
        return parse(entries)

    return parse_entries


def with_texts_read(values: Any) -> Any:
    """The values with texts such as "true", "False" and "null" replaced by True, False and None.

    A job of the workflow gets the values of its config as texts.
    """
    if isinstance(values, Mapping):
        return {key: with_texts_read(value) for key, value in values.items()}
    if isinstance(values, list):
        return [with_texts_read(value) for value in values]
    return _VALUES_BY_SPELLING.get(values, values) if isinstance(values, str) else values


def _undotted(entry: str) -> str:
    """`train.lr=1e-3` as `train={"lr": "1e-3"}`."""
    if "." not in entry.partition("=")[0]:
        return entry
    ((section, values),) = read_layer(entry)[0].items()
    return f"{section}={json.dumps(values)}"
