"""Tables of objects that stand in one file each."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

__all__ = ["each_named"]


def each_named(pattern: str) -> Iterator[Any]:
    """The objects that a pattern such as "dflop.parallelism.schedules.*.SCHEDULE" names, by file.

    Written so, they count as code behind a command that uses the table.
    """
    package, name = pattern.split(".*.")
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        own = importlib.import_module(f"{package}.{module.name}")
        if hasattr(own, name):
            yield getattr(own, name)
