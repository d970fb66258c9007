"""Orders: which computation follows which, on all workers of a pipeline stage.

The plan's schedule decides how far a rank runs ahead, and its placement where the encoders' computations stand.
An encoder on ranks of its own stands before the LLM in the chain. How far it runs ahead follows from the order
of the LLM's first stage, so that neither waits for a computation that the other does only later.
"""

from functools import lru_cache

import numpy as np

from dflop.base.kernels import kernel
from dflop.plan.passes import BACKWARD, FORWARD
from dflop.plan.placements import PLACEMENTS
from dflop.plan.plan import Plan
from dflop.plan.schedules import SCHEDULES
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.step.nodes import StageReplicas, stages_of

__all__ = ["group_orders"]


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
    pipeline = _pipeline(plan.grid("llm").pp, plan.num_microbatches, plan.schedule, plan.num_chunks, llm[0])
    if not placement.shares_ranks:
        lead = _lead(pipeline[0], llm[0]) + schedule.encoder_lead(plan.grid("llm").pp)
        return [
            *(_encoder_order(plan, stages[place], place, lead, trained) for place in encoders),
            *pipeline,
        ]
    forwards, backwards = (
        np.array(
            [(which, place, microbatch) for microbatch in range(plan.num_microbatches) for place in own], dtype=np.int64
        ).reshape(-1, 3)
        for which, own in (
            (FORWARD, encoders),
            (BACKWARD, [place for place in encoders if trained.has_backward(stages[place])]),
        )
    )
    if slots is not None:
        return placement.with_encoders_at(slots, pipeline, forwards, backwards)
    return placement.with_encoders(pipeline, llm[0], forwards, backwards)


@lru_cache(maxsize=256)
def _pipeline(pp: int, num_microbatches: int, schedule: str, num_chunks: int, first: int) -> list[np.ndarray]:
    """The LLM's own order on each of its pipeline ranks: rank r has the stages `first + r`, `first + r + pp`, …"""
    orders, about = [], SCHEDULES[schedule]
    for rank in range(pp):
        ahead = about.ahead(rank, pp, num_microbatches, num_chunks)
        passes, number = _interleave(num_microbatches * num_chunks, ahead)
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


def _encoder_order(plan: Plan, stage: StageReplicas, place: int, lead: int, trained: TrainedSet) -> np.ndarray:
    if not trained.has_backward(stage):
        passes, number = np.full(plan.num_microbatches, FORWARD), np.arange(plan.num_microbatches)
    else:
        passes, number = _interleave(plan.num_microbatches, lead + plan.grid(stage.module).pp - stage.pp_stage - 1)
    return np.column_stack([passes, np.full_like(passes, place), number])


@kernel
def _interleave(num_passes, ahead):
    """Passes and their numbers in order: backward k right behind forward `k + ahead`."""
    passes, number = np.empty(2 * num_passes, np.int64), np.empty(2 * num_passes, np.int64)
    count = 0
    for turn in range(num_passes + ahead):
        for which, own in ((FORWARD, turn), (BACKWARD, turn - ahead)):
            if 0 <= own < num_passes:
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
