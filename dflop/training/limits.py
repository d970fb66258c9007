"""What training cannot carry out of what a plan can say: each limit stands here for what of it has the limit.

A limit gives a sentence on what keeps a plan from being trained, and the way out, or None. Planning finds `LIMITS` by
name (`pipeline.runnable`), so this file imports no torch. Who teaches training more takes a limit away here, and plans
that needed it are trained.
"""

from collections.abc import Callable

from dflop.parallelism import SHARDINGS, Plan

__all__ = ["LIMITS"]


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
