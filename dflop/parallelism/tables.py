"""Tables of objects that are defined in one file each."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["each_named", "modules_named"]


def each_named(pattern: str) -> Iterator[Any]:
    """The objects that a pattern such as "dflop.parallelism.schedules.*.SCHEDULE" names, in the order of their files.

    Callers write the pattern as one string, so that `runtime.code_behind` counts these objects as code behind a command
    that uses the table.
    """
    name = pattern.rpartition(".")[2]
    for own in modules_named(pattern):
        yield getattr(own, name)


def modules_named(pattern: str) -> Iterator[ModuleType]:
    """The modules that have an object named by such a pattern."""
    modules, _, name = pattern.rpartition(".")
    package, _, rest = modules.partition(".*")
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        below = Path(found.module_finder.path, found.name, *rest.split(".")[1:])
        if rest and not below.with_suffix(".py").is_file():
            continue  # only folders that have this file are imported
        own = importlib.import_module(f"{package}.{found.name}{rest}")
        if hasattr(own, name):
            yield own
