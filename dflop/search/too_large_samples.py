"""Samples that no plan can hold in memory, and the share of samples that one plan cannot hold.

Samples that no plan can hold are left out, so that a single huge sample does not leave a cluster without a plan.
"""

import math
from typing import NamedTuple

import numpy as np
import polars as pl

from dflop.config import Config
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import SHARDINGS, Plan
from dflop.schedule import MOST_LEFT_OUT, alone_bytes, without
from dflop.search.candidate import pricer_of
from dflop.search.space import enumerate_space, modules_of, plan_of
from dflop.shapes import SampleShapes

__all__ = ["BeyondDevice", "beyond_device", "leave_out_what_no_plan_holds"]

# The most kinds of layouts that are tried, beginning with those that split the model into most parts.
_MOST_KINDS = 256


class BeyondDevice(NamedTuple):
    """The share of samples, and of LLM tokens, in samples that a plan's devices cannot hold even alone in a microbatch.

    Context parallelism would be for these samples.
    """

    of_samples: float
    of_tokens: float

    def __str__(self) -> str:
        if not self.of_samples:
            return "context parallelism would concern no sample"
        return (
            f"context parallelism would concern {_percent(self.of_samples)} of the samples, with "
            f"{_percent(self.of_tokens)} of the LLM tokens: this plan's devices cannot hold them even alone"
        )


def beyond_device(plan: Plan, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> BeyondDevice:
    """The shares of `samples` that the plan's devices cannot hold. Give all samples, including those left out."""
    pricer = pricer_of(plan, config, spec, costs)
    is_beyond = alone_bytes(pricer, samples) > pricer.memory.limit_bytes
    tokens = samples.llm_tokens.astype(float)
    return BeyondDevice(float(is_beyond.mean()), float(tokens[is_beyond].sum() / max(1.0, tokens.sum())))


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
    for row in _kinds(enumerate_space(config, spec, costs.layouts, {})).iter_rows(named=True):
        pricer = pricer_of(plan_of(row, {}, checkpointing=recomputes), config, spec, costs)
        too_large = np.flatnonzero(least_bytes > limit_bytes)
        if (alone_bytes(pricer, samples.take(too_large)) > limit_bytes).all():
            continue  # it holds no sample that was too large so far
        needed_bytes = alone_bytes(pricer, samples)
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


def _percent(share: float) -> str:
    """A share above 0 as text, which never reads as 0."""
    return f"{share:.2%}" if share >= 5e-5 else "less than 0.01%"
