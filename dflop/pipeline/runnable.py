"""What training can carry out of what a plan can say, in one place.

More can be planned and priced than trained. The executor (`run`) carries out every instruction; what the trained
stages and their process groups can do stands here, so that planning knows it without torch. Who teaches training more
changes `TRAINED`, and nothing else decides what is runnable.
"""

from dataclasses import dataclass

from dflop.parallelism.placements import PLACEMENTS
from dflop.parallelism.plan import Plan
from dflop.parallelism.schedules import SCHEDULES
from dflop.pipeline.instructions import Op
from dflop.pipeline.orders import splits_backward

__all__ = ["TRAINED", "Abilities", "why_not_runnable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """The instructions that are carried out, and the most of each that a plan may have."""

    ops: frozenset[Op]
    nodes_a_rank: int
    ranks_a_node: int
    num_encoders: int
    encoder_stages: int


TRAINED = Abilities(
    ops=frozenset(Op) - {Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT},
    nodes_a_rank=1,
    ranks_a_node=1,
    num_encoders=1,
    encoder_stages=1,
)


def why_not_runnable(plan: Plan, trained: Abilities = TRAINED) -> str | None:
    """A sentence on what keeps the plan from being trained, and the way out; None when nothing does."""
    encoders, placement = plan.grids[:-1], PLACEMENTS[plan.placement]
    if placement.shares_ranks and len(encoders) + plan.num_chunks > trained.nodes_a_rank:
        others = " or ".join(name for name, other in PLACEMENTS.items() if not other.shares_ranks)
        return f"{plan.placement} plans can be priced, but not trained yet; use placement: {others}"
    if not _demands(plan) <= trained.ops or plan.num_chunks > trained.nodes_a_rank:
        plain = sorted(name for name, other in SCHEDULES.items() if not other.splits_backward and not _chunks(name))
        return f"{plan.schedule} can be priced, but not trained yet; use schedule: {' or '.join(plain)}"
    if len(encoders) > trained.num_encoders or not encoders:
        return f"the plan has {len(encoders)} encoders, and training knows one; use one encoder and the LLM"
    for grid in plan.grids:
        if grid.tp > trained.ranks_a_node:
            return f"{grid.module}: tp={grid.tp}, but tensor parallelism cannot be trained yet; use tp: 1"
    for encoder in encoders:
        if encoder.pp > trained.encoder_stages:
            return f"{encoder.module}: pp={encoder.pp}, but encoders are trained in one stage; use pp: 1"
    return None


def _demands(plan: Plan) -> set[Op]:
    """The computations that the plan's programs hold beyond a forward."""
    splits = any(splits_backward(plan, grid.module) for grid in plan.grids)
    return {Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT} if splits else {Op.BACKWARD}


def _chunks(schedule: str) -> bool:
    """Whether a schedule needs several chunks a rank."""
    return 1 not in SCHEDULES[schedule].chunk_counts(2)
