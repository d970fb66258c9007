"""Tables of objects that are defined in one file each."""

import importlib
import pkgutil
from typing import Any

__all__ = ["table_of"]


def table_of(package: str, name: str) -> dict[str, Any]:
    """The objects called `name` in the files of a package, such as "SCHEDULE" in "dflop.parallelism.schedules", by
    their attribute `name`, in the order of the files."""
    files = pkgutil.iter_modules(importlib.import_module(package).__path__)
    modules = [importlib.import_module(f"{package}.{file.name}") for file in files]
    found = [getattr(module, name) for module in modules if hasattr(module, name)]
    return {item.name: item for item in found}
