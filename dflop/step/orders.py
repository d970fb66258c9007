"""Orders: which computation follows which, on all workers of a pipeline stage.

The plan's schedule decides how far a rank runs ahead, and its placement where the encoders' computations stand.
An encoder on ranks of its own stands before the LLM in the chain. How far it runs ahead follows from the order
of the LLM's first stage, so that neither waits for a computation that the other does only later.
"""

from functools import lru_cache

import numpy as np

from dflop.base.kernels import kernel
from dflop.plan.passes import BACKWARD, FORWARD, WEIGHT
from dflop.plan.placements import PLACEMENTS
from dflop.plan.plan import Plan
from dflop.plan.schedules import SCHEDULES
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.step.nodes import StageReplicas, stages_of

__all__ = ["group_orders", "splits_backward"]


def group_orders(plan: Plan, trained: TrainedSet = EVERYTHING, slots: np.ndarray | None = None) -> list[np.ndarray]:
    """The computations of every group of workers (`StageReplicas.group`), each [num_computations, 3]: pass, stage and
    microbatch.

    Frozen encoders have no backward. In placements that fill bubbles, `slots` say where encoders compute in the
    order of one batch (`Placement.with_encoders_at`).
    """
    stages, placement, schedule = stages_of(plan), PLACEMENTS[plan.placement], SCHEDULES[plan.schedule]
    places = list(range(len(stages)))
    llm = [place for place in places if stages[place].module == "llm"]
    encoders = places[: -len(llm)]
    depths = {grid.module: grid.pp for grid in plan.grids[:-1] if trained.has_backward(grid.module)}
    num_before = 0 if placement.shares_ranks else max(depths.values(), default=0)
    pipeline = _pipeline(
        plan.grid("llm").pp,
        plan.num_microbatches,
        plan.schedule,
        plan.num_chunks,
        llm[0],
        num_before,
        splits=splits_backward(plan, "llm"),
    )
    if not placement.shares_ranks:
        lead = _lead(pipeline[0], llm[0]) + schedule.encoder_lead(plan.grid("llm").pp)
        return [
            *(_encoder_order(plan, stages[place], place, lead, num_before, trained) for place in encoders),
            *pipeline,
        ]
    forwards, backwards = (
        np.array(
            [(which, place, microbatch) for microbatch in range(plan.num_microbatches) for place in own], dtype=np.int64
        ).reshape(-1, 3)
        for which, own in (
            (FORWARD, encoders),
            (BACKWARD, [place for place in encoders if stages[place].module in depths]),
        )
    )
    if slots is not None:
        return placement.with_encoders_at(slots, pipeline, forwards, backwards)
    return placement.with_encoders(pipeline, llm[0], forwards, backwards)


def splits_backward(plan: Plan, module: str) -> bool:
    """Whether the module's backward is split into an input part and a weight part.

    An encoder that shares ranks does not split it, since no other rank waits for its input part. A module whose
    replicas share parameters does not split it either, since it sums its gradients layer by layer.
    """
    if not SCHEDULES[plan.schedule].splits_backward or plan.grid(module).gathers:
        return False
    return module == "llm" or not PLACEMENTS[plan.placement].shares_ranks


@lru_cache(maxsize=256)
def _pipeline(
    pp: int, num_microbatches: int, schedule: str, num_chunks: int, first: int, num_before: int, *, splits: bool
) -> list[np.ndarray]:
    """The LLM's own order on each of its pipeline ranks: rank r has the stages `first + r`, `first + r + pp`, …

    `splits` is whether the backward is split.
    """
    orders, about = [], SCHEDULES[schedule]
    for rank in range(pp):
        ahead = about.ahead(rank, pp, num_microbatches, num_chunks)
        delay = about.weight_delay(num_before + rank) if splits else -1
        passes, number = _interleave(num_microbatches * num_chunks, ahead, delay)
        orders.append(_in_rounds(passes, number, pp, num_chunks, first + rank))
    return orders


@kernel
def _in_rounds(passes, number, pp, num_chunks, first):
    """Chunks take turns every `pp` microbatches, the last one first on the way back."""
    order = np.empty((len(passes), 3), np.int64)
    for place in range(len(passes)):
        rounds, turn = divmod(number[place], pp * num_chunks)
        chunk = turn // pp if passes[place] == FORWARD else num_chunks - 1 - turn // pp
        order[place] = passes[place], first + chunk * pp, rounds * pp + turn % pp
    return order


def _encoder_order(
    plan: Plan, stage: StageReplicas, place: int, lead: int, num_before: int, trained: TrainedSet
) -> np.ndarray:
    pp = plan.grid(stage.module).pp
    if not trained.has_backward(stage.module):
        passes, number = np.full(plan.num_microbatches, FORWARD), np.arange(plan.num_microbatches)
    else:
        place_in_chain = num_before - pp + stage.pp_stage
        splits = splits_backward(plan, stage.module)
        delay = SCHEDULES[plan.schedule].weight_delay(place_in_chain) if splits else -1
        passes, number = _interleave(plan.num_microbatches, lead + pp - stage.pp_stage - 1, delay)
    return np.column_stack([passes, np.full_like(passes, place), number])


@kernel
def _interleave(num_passes, ahead, delay):
    """Passes and their numbers in order: backward k right behind forward `k + ahead`, weight part k `delay` later, and
    none where `delay` is negative."""
    kinds = 2 if delay < 0 else 3
    passes, number = np.empty(kinds * num_passes, np.int64), np.empty(kinds * num_passes, np.int64)
    count = 0
    for turn in range(num_passes + ahead + max(0, delay)):
        for which, own in ((FORWARD, turn), (BACKWARD, turn - ahead), (WEIGHT, turn - ahead - delay)):
            if 0 <= own < num_passes and which < kinds:
                passes[count], number[count] = which, own
                count += 1
    return passes, number


def _lead(order: np.ndarray, stage: int) -> int:
    """The most forwards of `stage` that stand before any backward of it, less the backwards before that one.

    A stage that feeds this one and runs so far ahead is one forward ahead of it throughout.
    """
    passes = order[order[:, 1] == stage, 0]
    is_backward = passes == BACKWARD
    forwards_before = np.cumsum(passes == FORWARD)[is_backward]
    return int((forwards_before - np.arange(len(forwards_before))).max())
