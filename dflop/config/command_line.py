"""Config keys on the workflow's own command line, which knows neither dotted keys nor the types of our values.

`snakemake --config train.lr=1e-3` is parsed by Snakemake before it reads the workflow, and what was read is
passed on to the processes of jobs as text.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from dflop.config.layers import read_layer

__all__ = ["with_dotted_keys", "with_texts_read"]

_Parser = Callable[[list[str] | None], dict[str, Any]]
# What Python and YAML write where a text stands for no text.
_NO_TEXTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def with_dotted_keys(parse: _Parser) -> _Parser:
    """A parser of `key=value` entries that takes dotted keys, too, by writing them in `parse`'s own form.

    The list itself is changed: Snakemake hands it on to jobs, which know `parse` alone.
    """

    def parse_entries(entries: list[str] | None) -> dict[str, Any]:
        if entries:
            entries[:] = [_undotted(entry) for entry in entries]
        return parse(entries)

    return parse_entries


def with_texts_read(values: Any) -> Any:
    """The same with the texts for true, false and null as what they stand for: a job gets its config as texts."""
    if isinstance(values, Mapping):
        return {key: with_texts_read(value) for key, value in values.items()}
    if isinstance(values, list):
        return [with_texts_read(value) for value in values]
    return _NO_TEXTS.get(values, values) if isinstance(values, str) else values


def _undotted(entry: str) -> str:
    """`train.lr=1e-3` as `train={"lr": "1e-3"}`."""
    if "." not in entry.partition("=")[0]:
        return entry
    ((section, values),) = read_layer(entry)[0].items()
    return f"{section}={json.dumps(values)}"
