"""The layout that the user trains with today, as `plan.today` of the config gives it, with batches as they are drawn.

A placement, schedule or sharding that it leaves open is that of most frameworks: the encoder in the LLM's first stage,
1F1B, sharded optimiser states. Of the remaining plans, the fastest counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import polars as pl

from dflop.base import UserError
from dflop.comparison.system import System, offered
from dflop.comparison.systems import megatron
from dflop.config import Config, PlanConfig
from dflop.costs import CostModel
from dflop.models import ModelSpec, check_modules
from dflop.plan import Plan
from dflop.plan.layout_key import LayoutKey
from dflop.search import TODAY, Candidate, GroupedBatches, PlanPricer, enumerate_space, plan_of, search_plans
from dflop.shapes import SampleShapes

__all__ = ["SYSTEM", "todays_layout_note"]

# Where none of the plans that `plan.today` leaves open fits: for how many of them the needed memory is computed.
_MOST_NEEDS = 64


def todays_layout_note(config: Config, spec: ModelSpec, layouts: Mapping[str, Sequence[LayoutKey]]) -> str | None:
    """Why no plan for the devices agrees with `plan.today`; None where one does, whether or not it fits.

    `layouts` are those of a layer that there are costs for, by module.

    Raises:
        UserError: `plan.today` names a module that the model does not have.
    """
    if not config.plan.today:
        return None
    check_modules(spec, config.plan.today.modules, "plan.today")
    try:
        _rows(config, spec, layouts)
    except UserError as error:
        return f"{error}. Today's layout is left out of the comparison"
    return None


def _rows(
    config: Config, spec: ModelSpec, layouts: Mapping[str, Sequence[LayoutKey]]
) -> tuple[PlanConfig, pl.DataFrame]:
    """The limits that `plan.today` sets, and the rows of the space within them."""
    within = replace(megatron.WITHIN, fixed=config.plan.today)
    return within, enumerate_space(config, spec, layouts, {}, within, "plan.today")


def _plans(
    config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, *, compares: bool = True
) -> list[Candidate]:
    """The fastest of the plans that `plan.today` leaves open.

    Raises:
        UserError: when none of them fits into memory, with the bytes that the smallest needs, or none is for the
            devices.
    """
    within, rows = _rows(config, spec, costs.layouts)
    how = {"policy": megatron.POLICY, "within": within, "splits_evenly": True, "compares": compares}
    try:
        return offered(search_plans(config, spec, costs, samples, **how))
    except UserError:  # the space is not empty, so nothing in it fits
        plan, needed_bytes = _nearest(rows, config, spec, costs, GroupedBatches(config, spec, costs, samples))
        raise UserError(
            f"does not fit: {plan} needs {needed_bytes / 2**30:.3g} GiB a device ({needed_bytes:,.0f} bytes) of "
            f"`cluster.memory_gib` = {config.cluster.memory_gib:.4g}"
        ) from None


def _nearest(
    rows: pl.DataFrame, config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches
) -> tuple[Plan, float]:
    """The plan that needs least memory, and its bytes. Of many rows, only those with most microbatches are tried."""
    needs = []
    recomputes = config.plan.today.checkpointing is not False
    most = rows.sort("num_microbatches", descending=True, maintain_order=True).head(_MOST_NEEDS)
    for row in most.iter_rows(named=True):
        plan = plan_of(row, {}, checkpointing=recomputes)
        needs.append((PlanPricer(plan, config, spec, costs, batches, megatron.POLICY).needed_bytes(), plan))
    needed_bytes, plan = min(needs, key=lambda need: need[0])
    return plan, needed_bytes


SYSTEM = System(
    name="today's layout, random",
    baseline=TODAY,
    plans=_plans,
    policy=megatron.POLICY,
    recomputes=lambda config: config.plan.today.checkpointing is None,
    moves_samples=False,
)
