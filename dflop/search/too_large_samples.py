"""Samples that no plan can hold in memory, not even if several replicas share them.

They are left out, so that a single huge sample does not leave a cluster without a plan.
"""

import math

import numpy as np
import polars as pl

from dflop.config import Config
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import SHARDINGS
from dflop.schedule import MOST_LEFT_OUT, shared_bytes, without
from dflop.search.candidate import pricer_of
from dflop.search.host_memory import may_offload
from dflop.search.space import allowed_cp_sizes, enumerate_space, modules_of, plan_of
from dflop.shapes import SampleShapes

__all__ = ["leave_out_what_no_plan_holds"]

# The most kinds of layouts that are tried, beginning with those that split the model into most parts.
_MOST_KINDS = 256


def leave_out_what_no_plan_holds(
    config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes
) -> tuple[SampleShapes, pl.DataFrame]:
    """The samples that plans are searched for, and a row for each of the others (`LEFT_OUT_SCHEMA`).

    The kind of layout that can hold most samples decides. Where even this leaves out more than a tenth, no sample is
    left out: memory is then too small for any plan, and the search has the better message for that.

    Raises:
        UserError: when the space is empty, or a module has no costs.
    """
    costs.require_modules(module.name for module in spec.modules)
    limit_bytes = config.cluster.memory_gib * 2**30
    least_bytes = np.full(len(samples), np.inf)
    recomputes = not config.plan.fixed or config.plan.fixed.checkpointing is not False
    how = {"offloads_optimizer": may_offload(config)}
    spaces = (enumerate_space(config, spec, costs.layouts, {}, cp=cp, **how) for cp in allowed_cp_sizes(config))
    for row in (row for space in spaces for row in _kinds(space).iter_rows(named=True)):
        pricer = pricer_of(plan_of(row, {}, checkpointing=recomputes), config, spec, costs)
        too_large = np.flatnonzero(least_bytes > limit_bytes)
        if (shared_bytes(pricer, samples.take(too_large)) > limit_bytes).all():
            continue  # it holds no sample that was too large so far
        needed_bytes = shared_bytes(pricer, samples)
        num_too_large = int((needed_bytes > limit_bytes).sum())
        if num_too_large < len(too_large):
            least_bytes = needed_bytes
        if not num_too_large:
            break
    if (least_bytes > limit_bytes).sum() > MOST_LEFT_OUT * len(samples):
        least_bytes = np.zeros(len(samples))
    return without(samples, least_bytes, limit_bytes)


def _kinds(rows: pl.DataFrame) -> pl.DataFrame:
    """One row of each kind of layout that may hold a sample that the other kinds cannot."""
    modules = modules_of(rows.columns)
    tp, pp, sharding = ([f"{module}_{size}" for module in modules] for size in ("tp", "pp", "sharding"))
    gathers = [name for name, item in SHARDINGS.items() if item.gathers]
    return (
        rows.with_columns(
            num_parts=pl.col("llm_pp") * math.prod(map(pl.col, tp)),
            num_sharded=pl.sum_horizontal(pl.col(name).is_in(gathers) for name in sharding),
        )
        .sort("num_parts", "num_sharded", "llm_dp", descending=True, maintain_order=True)
        .unique(["placement", *tp, *pp, *sharding], keep="first", maintain_order=True)
        .head(_MOST_KINDS)
    )
