"""DFLOP as it is published: a layout for each module by a rule at mean shapes, and batches by a min-max ILP.

"DFLOP: a data-driven framework for multimodal LLM training pipeline optimization", SIGMOD '26, arXiv 2603.25120. The
plan is the one with the least `(m + pp_v + pp_l - 1) * max(stage)` at mean shapes. The ILP minimises the largest bucket
over all modules within a time limit, and falls back to the longest processing time first. It does not choose the order
of microbatches.
"""

from dflop.balancing import CbcProcess, quick_buckets
from dflop.comparison.system import Batch, System
from dflop.config import Config
from dflop.costs import CostModel
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.parallelism import Plan
from dflop.planning import GroupedBatches, plan_by_published_rule
from dflop.pricing import Assignment

__all__ = ["SYSTEM"]

_TIME_LIMIT_S = 1.0


def _plans(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> list[Plan]:
    found = plan_by_published_rule(config, spec, costs, GroupedBatches(config, spec, costs, samples))
    return [found.plan] if found else []


def _decide(batch: Batch) -> Assignment:
    start = quick_buckets(batch.problem.loads_s, batch.problem.num_buckets)
    with CbcProcess() as cbc:
        return batch.of_buckets(cbc.solve(batch.problem, start, time_limit_s=_TIME_LIMIT_S).bucket)


SYSTEM = System(name="DFLOP as published", plans=_plans, decide=_decide)
