"""Whether training can carry out a plan: the limits that executors declare, gathered.

A folder with code that carries out plans declares the plans that this code cannot do in a file `limits.py`, which needs
no torch. Only this module reads these files. It finds them by name, since planning may not import training.
"""

from functools import cache
from types import ModuleType

from dflop.parallelism import Plan, modules_named

__all__ = ["why_not_runnable"]


def why_not_runnable(plan: Plan) -> str | None:
    """A sentence on why the plan cannot be trained, with the way out; None when it can be."""
    said = (limit(plan) for own in _declared() for limit in own.LIMITS)
    return next((why for why in said if why), None)


@cache
def _declared() -> tuple[ModuleType, ...]:
    return tuple(modules_named("dflop.*.limits.LIMITS"))
