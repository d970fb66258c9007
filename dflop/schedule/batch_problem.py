"""A batch as a plan's balancing problem, and a lower bound of its step time over all assignments."""

from collections.abc import Mapping

import numpy as np

from dflop.balance import BatchProblem
from dflop.base import UserError
from dflop.costs import CostModel, StageKind
from dflop.models import ModelSpec
from dflop.plan import PLACEMENTS, Plan
from dflop.schedule.plan_memory import PlanMemory
from dflop.schedule.stage_costs import StageCosts, loads_of
from dflop.shapes import SampleShapes

__all__ = ["balanced_loads_s", "least_step_s", "loads_without_plan", "pose_problem", "seconds_of_columns"]

# More seconds than any sample takes in a stage: an hour.
_MOST_SAMPLE_S = 3600.0


def pose_problem(stage_costs: StageCosts, memory: PlanMemory, shapes: SampleShapes) -> BatchProblem:
    """The batch as a balancing problem: the seconds that each sample adds to its bucket on each module's slowest stage.

    The token limit of a bucket is what memory allows when all buckets are full alike. Where the batch cannot keep this
    limit, there is none: a bucket may hold more if others hold less. Whether that fits is then checked on the whole
    assignment (`memory_limit`).

    Raises:
        UserError: the costs of a sample cannot be true, the samples are too few for the buckets, or the parameters
            alone do not fit into memory.
    """
    plan = stage_costs.plan
    llm, num_tokens = plan.grid("llm"), max(1, int(shapes.llm_tokens.sum()))
    of_modules = {
        grid.module: stage_costs.additive_loads_s(grid.module, loads_of(grid.module, shapes)) for grid in plan.grids
    }
    for module, stages_s in of_modules.items():
        _check_costs(module, shapes, stages_s.max(axis=0))
    items_per_token = {}
    if PLACEMENTS[plan.placement].shares_ranks:
        items_per_token = dict(zip(shapes.encoders, (shapes.num_items.sum(axis=0) / num_tokens).tolist(), strict=True))
    cap = memory.max_bucket_tokens(items_per_token, float(shapes.target_tokens.sum() / num_tokens))
    is_even = shapes.llm_tokens.max(initial=0) <= cap and num_tokens <= cap * llm.dp * plan.num_microbatches
    return BatchProblem(
        loads_s=balanced_loads_s(plan, of_modules),
        llm_tokens=shapes.llm_tokens,
        num_dp_ranks=llm.dp,
        num_microbatches=plan.num_microbatches,
        max_bucket_tokens=cap if is_even else None,
    )


def loads_without_plan(shapes: SampleShapes, spec: ModelSpec, costs: CostModel) -> np.ndarray:
    """Seconds that each sample adds to each whole module, as shares of the batch's, [num_samples, num_modules].

    They depend on no plan, so plans are priced on batches that are grouped by them.
    """
    columns = []
    for module in spec.modules:
        whole = StageKind.whole(module.name, min(costs.layouts[module.name]), module.num_layers)
        seconds = costs.additive_loads_s(whole, loads_of(module.name, shapes))
        columns.append(seconds / max(seconds.sum(), 1e-300))
    return np.column_stack(columns)


def balanced_loads_s(plan: Plan, of_modules: Mapping[str, np.ndarray]) -> np.ndarray:
    """Seconds that samples add to buckets, [num_samples, num_loads], given those on each module's stages, [pp,
    num_samples].

    The columns are those of `seconds_of_columns`. All buckets of a microbatch share an encoder's replicas, so its load
    counts by the ratio of the LLM's replicas to its own.
    """
    columns = seconds_of_columns(plan, of_modules)
    if PLACEMENTS[plan.placement].has_bridges:
        columns[:, :-1] *= [plan.grid("llm").dp / encoder.dp for encoder in plan.grids[:-1]]
    return columns


def seconds_of_columns(plan: Plan, of_modules: Mapping[str, np.ndarray]) -> np.ndarray:
    """Seconds that samples take on one rank, [num_samples, num_loads], given those on each module's stages, [pp,
    num_samples].

    There is a column for each encoder and one for the LLM. Without bridges, encoders are on the ranks of the LLM's
    first stage: then there is one column for everything that these ranks compute, and one for the LLM.
    """
    encoders, llm_s = plan.grids[:-1], of_modules["llm"]
    if PLACEMENTS[plan.placement].has_bridges or not encoders:
        columns = [of_modules[encoder.module].max(axis=0) for encoder in encoders]
    else:
        columns = [sum(of_modules[encoder.module][0] for encoder in encoders) + llm_s[0]]
    return np.column_stack([*columns, llm_s.max(axis=0)])


def least_step_s(stage_costs: StageCosts, shapes: SampleShapes) -> float:
    """A lower bound, in seconds, of the step time of any schedule of this batch.

    It is the largest of each stage's work divided by its number of replicas, and each stage's work on its largest
    sample. Where encoders use all of the LLM's ranks, it is also at least all work divided by all ranks. Where they
    share the ranks of its first stage only, the work of all modules on these ranks counts as that of one stage.
    """
    plan, bounds, works_s, samples_s = stage_costs.plan, [], [], []
    for grid in plan.grids:
        loads = loads_of(grid.module, shapes)
        works_s.append(stage_costs.least_work_s(grid.module, loads))
        samples_s.append(stage_costs.additive_loads_s(grid.module, loads, least=True))
        bounds += [works_s[-1].max() / grid.dp, samples_s[-1].max()]
    placement = PLACEMENTS[plan.placement]
    if placement.uses_all_ranks:
        rank_s = sum(grid.tp * work_s.sum() for grid, work_s in zip(plan.grids, works_s, strict=True))
        bounds.append(rank_s / plan.world_size)
    elif placement.shares_ranks:
        first_s = sum(work_s[0] for work_s in works_s)
        bounds += [first_s / plan.grid("llm").dp, sum(sample_s[0] for sample_s in samples_s).max()]
    return float(max(bounds))


def _check_costs(module: str, shapes: SampleShapes, loads_s: np.ndarray) -> None:
    """Refuse a sample with negative seconds in a stage, more than `_MOST_SAMPLE_S`, or 0 seconds in the LLM."""
    is_llm = module == "llm"
    is_wrong = ~((loads_s >= 0) & (loads_s <= _MOST_SAMPLE_S)) | (is_llm & (loads_s == 0))
    if is_wrong.any():
        sample = int(is_wrong.argmax())
        raise UserError(
            f"the costs say that sample {shapes.sample_id[sample]!r} ({shapes.num_items[sample].sum()} items, "
            f"{shapes.llm_tokens[sample]} LLM tokens) takes a stage of {module} {loads_s[sample]:.3g} s, which "
            f"must be {'above' if is_llm else 'at least'} 0 and at most {_MOST_SAMPLE_S:.0f}; measure them again "
            "(delete costs/ of the run, or `dflop profile-costs` and `dflop fit-costs`)"
        )
