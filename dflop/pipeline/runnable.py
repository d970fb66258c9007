"""Whether training can carry out a plan. Some plans can be priced but not trained yet.

A limit is a function from a plan to a sentence that says what keeps it from being trained and what to do instead; None
if nothing does. When training learns to do more, the limit is removed here.
"""

from collections.abc import Callable

from dflop.parallelism import SHARDINGS, Plan

__all__ = ["LIMITS", "why_not_runnable"]


def why_not_runnable(plan: Plan) -> str | None:
    """A sentence on why the plan cannot be trained, with the way out; None when it can be."""
    return next(filter(None, (limit(plan) for limit in LIMITS)), None)


def _some_encoder(plan: Plan) -> str | None:
    """The LLM's first stage takes encoders' features."""
    if len(plan.grids) > 1:
        return None
    return "the plan has 0 encoders and training is for models that have some; use a model with one"


def _whole_or_gathered(plan: Plan) -> str | None:
    """Parameters are whole on every replica (`ShardedAdamW`), or gathered layer by layer (`ParameterShards`)."""
    for grid in plan.grids:
        if grid.num_shards > 1 and not grid.gathers:
            trained = " or ".join(name for name, own in SHARDINGS.items() if own.gathers)
            return (
                f"{grid.module}: sharding={grid.sharding} divides parameters that nothing gathers; use sharding: "
                f"{trained}"
            )
    return None


LIMITS: tuple[Callable[[Plan], str | None], ...] = (_some_encoder, _whole_or_gathered)
