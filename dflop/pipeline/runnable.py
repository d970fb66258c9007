"""Whether training can carry out a plan: what executors declare of themselves, gathered.

A folder whose code carries out plans declares what it cannot do beside that code, in a file `limits.py` that needs no
torch. This is the one place that asks them, by name: planning stands above training, and asks without importing it.
"""

from functools import cache
from types import ModuleType

from dflop.parallelism import Plan, modules_named

__all__ = ["why_not_runnable"]


def why_not_runnable(plan: Plan) -> str | None:
    """A sentence on what keeps the plan from being trained, and the way out; None when nothing does."""
    said = (limit(plan) for own in _declared() for limit in own.LIMITS)
    return next((why for why in said if why), None)


@cache
def _declared() -> tuple[ModuleType, ...]:
    return tuple(modules_named("dflop.*.limits.LIMITS"))
