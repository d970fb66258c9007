"""The compilers that torch.compile calls: triton a C compiler, layers on CPUs a C++ compiler."""

import os
import shutil

__all__ = ["COMPILERS", "find_compiler"]

# By the variable that names one, the programs that are looked for where it is not set.
COMPILERS = {"CC": ("gcc", "clang", "cc"), "CXX": ("g++",)}


def find_compiler(variable: str) -> str | None:
    """The path of the compiler that a variable names, e.g. `CC`, or of the first one that is there."""
    named = os.environ.get(variable)
    return next(filter(None, map(shutil.which, [named] if named else COMPILERS[variable])), None)
