"""Tables of objects that are defined in one file each."""

import importlib
import pkgutil
from typing import Any

__all__ = ["found_in_files", "table_of"]


def table_of(package: str, name: str) -> dict[str, Any]:
    """The objects called `name` in the files of a package, such as "SCHEDULE" in "dflop.plan.schedules", by
    their attribute `name`, in the order of the files."""
    return {item.name: item for item in found_in_files(package, name).values()}


def found_in_files(package: str, name: str) -> dict[str, Any]:
    """The objects called `name` in the files of a package, by the files' names, in their order."""
    files = pkgutil.iter_modules(importlib.import_module(package).__path__)
    modules = {file.name: importlib.import_module(f"{package}.{file.name}") for file in files}
    return {file: getattr(module, name) for file, module in modules.items() if hasattr(module, name)}
