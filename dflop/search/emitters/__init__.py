"""The frameworks whose flags a plan is printed in, one in each file, which has the name that `--emit` takes.

A new framework is one more file, with its `Framework` as FRAMEWORK.
"""

from dflop.base.tables import found_in_files
from dflop.search.emitted import Framework

__all__ = ["FRAMEWORKS"]

FRAMEWORKS: dict[str, Framework] = found_in_files(__name__, "FRAMEWORK")
