"""DFLOP as it is published: a layout for each module by a rule at mean shapes, and batches by a min-max ILP.

"DFLOP: a data-driven framework for multimodal LLM training pipeline optimization", SIGMOD '26, arXiv 2603.25120. The
plan is the one with the least `(m + pp_v + pp_l - 1) * max(stage)` at mean shapes over disjoint grids; the stages of
all encoders count. The ILP minimises the largest bucket over all modules within a time limit, and falls back to the
longest processing time first. It does not choose the order of microbatches.
"""

import numpy as np
import polars as pl

from dflop.balance import LPT, BatchProblem, CbcProcess, Policy, quick_buckets
from dflop.base import UserError
from dflop.comparison.system import System
from dflop.config import Config, PlanConfig
from dflop.costs import CostModel, Loads, StageKind
from dflop.models import ModelSpec
from dflop.plan import DISJOINT, PLAIN_SCHEDULE, PLAIN_SHARDING
from dflop.plan.layout_key import LayoutKey
from dflop.schedule import BYTES_PER_VALUE, loads_of
from dflop.search import Candidate, GroupedBatches, PlanPricer, enumerate_space, plan_of
from dflop.search.levels import Recomputed
from dflop.search.memory_bounds import LeastMemory
from dflop.search.row_bounds import MARGIN
from dflop.search.space import llm_layers
from dflop.shapes import SampleShapes

__all__ = ["SYSTEM"]

_TIME_LIMIT_S = 1.0
_WITHIN = PlanConfig(placements=[DISJOINT.name], schedules=[PLAIN_SCHEDULE], shardings=[PLAIN_SHARDING])


def _plans(
    config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, *, compares: bool = True
) -> list[Candidate]:
    """The plan that fits and has the least value by the rule, also with `compares`."""
    batches = GroupedBatches(config, spec, costs, samples)
    try:
        rows = enumerate_space(config, spec, costs.layouts, {}, _WITHIN)
    except UserError:
        return []
    recomputing = pl.DataFrame({"checkpointing": [False, True]})  # the rule recomputes all layers or none
    rows = rows.join(recomputing, how="cross", maintain_order="left_right")
    stage_s = np.max([_mean_stage_s(rows, spec, costs, batches, module.name) for module in spec.modules], axis=0)
    num_stages = sum(rows[f"{module.name}_pp"] for module in spec.modules)
    places = rows["num_microbatches"] + num_stages - 1
    budget = config.cluster.memory_gib * 2**30
    trained, value_bytes = config.model.trained, BYTES_PER_VALUE[config.train.precision]
    memory = LeastMemory(spec, costs, batches, {}, LPT, trained, value_bytes)
    for place in np.argsort(places.to_numpy() * stage_s, kind="stable"):
        row = rows.row(int(place), named=True)
        recomputes, layers = row["checkpointing"], llm_layers(row, {}, spec.module("llm").num_layers)
        of_llm = memory.of_llm(row, Recomputed.whole(layers if recomputes else (0,) * len(layers)))
        if memory.least_bytes(row, of_llm, recomputes=recomputes) > budget * MARGIN:
            continue  # quicker to know than what the plan needs
        pricer = PlanPricer(plan_of(row, {}, checkpointing=recomputes), config, spec, costs, batches, LPT)
        if pricer.needed_bytes(np.nextafter(budget, np.inf)) <= budget:
            return [pricer.candidate()]
    return []


def _mean_stage_s(
    rows: pl.DataFrame, spec: ModelSpec, costs: CostModel, batches: GroupedBatches, module: str
) -> np.ndarray:
    """Forward plus backward seconds of one of a module's stages on the mean microbatch, [num_rows]."""
    loads_by_batch = [loads_of(module, shapes) for shapes in batches.shapes]
    loads = [np.mean([load.sum() for load in column]) for column in zip(*loads_by_batch, strict=True)]
    seconds = np.zeros(len(rows))
    keys = (*LayoutKey.columns(f"{module}_"), "checkpointing")
    for (*sizes, checkpointing), group in rows.with_row_index("place").group_by(*keys):
        buckets = (group[f"{module}_dp"] * group["num_microbatches"]).to_numpy()
        num_layers = spec.module(module).num_layers
        whole = StageKind.whole(
            module, LayoutKey(*sizes), num_layers, num_recomputed=num_layers if checkpointing else 0
        )
        both = costs.stage_time(whole, Loads(*(load / buckets for load in loads)))
        seconds[group["place"].to_numpy()] = (both[0] + both[1]) / group[f"{module}_pp"].to_numpy()
    return seconds


class _MinMaxIlp(Policy):
    name = "min_max_ilp"

    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        start = quick_buckets(problem.loads_s, problem.num_buckets)
        with CbcProcess() as cbc:
            return cbc.solve(problem, start, time_limit_s=_TIME_LIMIT_S).bucket


SYSTEM = System(
    name="DFLOP as published",
    baseline="published rule at mean shapes, balanced batches",
    plans=_plans,
    policy=_MinMaxIlp(),
)
