"""Config keys on the workflow's own command line, which knows neither dotted keys nor the types of our values.

`snakemake --config train.lr=1e-3` is parsed by Snakemake before it reads the workflow, and what was read is
passed on to the processes of jobs as text.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dflop.config.layers import read_layer

__all__ = ["with_dotted_keys", "with_texts_read"]

_Parser = Callable[[Iterable[str] | None], dict[str, Any]]
# What Python and YAML write where a text stands for no text.
_NO_TEXTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def with_dotted_keys(parse: _Parser) -> _Parser:
    """A parser of `key=value` entries that takes dotted keys, too, each put over what `parse` makes of the others."""

    def parse_entries(entries: Iterable[str] | None) -> dict[str, Any]:
        entries = list(entries or ())
        dotted = [entry for entry in entries if "." in entry.partition("=")[0]]
        values = parse([entry for entry in entries if entry not in dotted])
        for entry in dotted:
            values = _merged(values, read_layer(entry)[0])
        return values

    return parse_entries


def with_texts_read(values: Any) -> Any:
    """The same with the texts for true, false and null as what they stand for: a job gets its config as texts."""
    if isinstance(values, Mapping):
        return {key: with_texts_read(value) for key, value in values.items()}
    if isinstance(values, list):
        return [with_texts_read(value) for value in values]
    return _NO_TEXTS.get(values, values) if isinstance(values, str) else values


def _merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
