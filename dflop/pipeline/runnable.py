"""Training can carry out less than a plan can say; what it cannot stands here, and nowhere else.

Planning asks this without torch. Who teaches training more takes a limit away here, and plans that needed it are
trained.
"""

from dflop.parallelism.plan import Plan

__all__ = ["why_not_runnable"]


def why_not_runnable(plan: Plan) -> str | None:
    """A sentence on what keeps the plan from being trained, and the way out; None when nothing does."""
    encoders = [grid.module for grid in plan.grids[:-1]]
    if len(encoders) != 1:
        return (
            f"the plan has {len(encoders)} encoders ({', '.join(encoders) or 'none'}), and training decodes for one, "
            "pictures and clips; use a model with one"
        )
    return None
