"""Orders: which computation follows which, on all workers of a pipeline stage.

All schedules are one formula. Forwards are numbered as they come; backward k stands right behind forward
`k + ahead`, and, where the backward is split, the weight part of k right behind the input part of `k + delay`:

| schedule           | ahead of stage s of p               | source                                |
|--------------------|-------------------------------------|---------------------------------------|
| `gpipe`            | all microbatches                    | Huang et al. 2019                     |
| `1f1b`             | p - s - 1                           | Narayanan et al. 2021, section 2.2.1  |
| `interleaved_1f1b` | 2 (p - s - 1) + (v - 1) p, v chunks | Narayanan et al. 2021, section 2.2.2  |
| `zb_h1`            | p - s - 1, with delay s             | Qi et al. 2023, ZB-H1                 |

An encoder on ranks of its own stands before the LLM in the chain; how far it runs ahead follows from the order
of the LLM's first stage, so that neither waits for what the other would do later.
"""

from collections.abc import Collection

import numpy as np
from numba import njit

from dflop.pipeline.layout import Stage, stages_of
from dflop.pipeline.plan import Plan

__all__ = ["BACKWARD", "FORWARD", "WEIGHT", "group_orders", "has_backward", "splits_backward"]

# Passes. BACKWARD is the whole of it, or the input part where the stage splits it.
FORWARD, BACKWARD, WEIGHT = 0, 1, 2


def group_orders(plan: Plan, frozen: Collection[str] = ()) -> list[np.ndarray]:
    """The computations of every group of workers (`Stage.group`), [num_computations, 3]: pass, stage, microbatch.

    Encoders in `frozen` have no backward. Of the placements that share ranks, a colocated worker first does its
    encoders' forwards, then its part of the LLM's pipeline, then its encoders' backwards; a monolithic one of the
    first stage puts its encoders before the LLM's forward and behind the LLM's backward of the same microbatch.
    """
    stages = stages_of(plan)
    places = list(range(len(stages)))
    llm = [place for place in places if stages[place].module == "llm"]
    encoders = places[: -len(llm)]
    trained = {grid.module: grid.pp for grid in plan.grids[:-1] if has_backward(grid.module, frozen)}
    num_before = max(trained.values(), default=0) if plan.placement == "disjoint" else 0
    pipeline = [_llm_order(plan, stage, llm[0], num_before) for stage in range(plan.grid("llm").pp)]
    if plan.placement == "disjoint":
        # Chunks take the encoders' output in rounds: half a round more bridges the time between two of them. In
        # simulations of 2 to 8 stages that made steps 1 to 12 % shorter, and still more ahead brought nothing.
        lead = _lead(pipeline[0], llm[0]) + (plan.grid("llm").pp // 2 if plan.num_chunks > 1 else 0)
        return [
            *(_encoder_order(plan, stages[place], place, lead, num_before, frozen) for place in encoders),
            *pipeline,
        ]
    forwards = np.array([(FORWARD, place, microbatch) for microbatch in _microbatches(plan) for place in encoders])
    backwards = np.array(
        [
            (BACKWARD, place, microbatch)
            for microbatch in _microbatches(plan)
            for place in encoders
            if stages[place].module in trained
        ]
    )
    forwards, backwards = forwards.reshape(-1, 3), backwards.reshape(-1, 3).astype(np.int64)
    if plan.placement == "colocated":
        return [np.concatenate([forwards, order, backwards]) for order in pipeline]
    return [_with_encoders(pipeline[0], llm[0], forwards, backwards), *pipeline[1:]]


def has_backward(module: str, frozen: Collection[str]) -> bool:
    """A frozen encoder has none; a frozen LLM still passes gradients on."""
    return module == "llm" or module not in frozen


def splits_backward(plan: Plan, module: str) -> bool:
    """Whether weight gradients are computed apart; an encoder that shares ranks has nobody that waits for its own."""
    return plan.schedule == "zb_h1" and (module == "llm" or plan.placement == "disjoint")


def _microbatches(plan: Plan) -> range:
    return range(plan.num_microbatches)


def _llm_order(plan: Plan, stage: int, first: int, num_before: int) -> np.ndarray:
    """Of the worker that has the LLM's stages `first + stage`, `first + stage + pp`, …"""
    pp, num_chunks = plan.grid("llm").pp, plan.num_chunks
    num_passes = plan.num_microbatches * num_chunks
    ahead = {
        "gpipe": num_passes,
        "interleaved_1f1b": 2 * (pp - stage - 1) + (num_chunks - 1) * pp,
    }.get(plan.schedule, pp - stage - 1)
    delay = num_before + stage if splits_backward(plan, "llm") else -1
    return _in_rounds(*_interleave(num_passes, ahead, delay), pp, num_chunks, first + stage)


@njit(cache=True)
def _in_rounds(passes, number, pp, num_chunks, first):
    """Chunks take turns every `pp` microbatches, the last one first on the way back."""
    order = np.empty((len(passes), 3), np.int64)
    for place in range(len(passes)):
        rounds, turn = divmod(number[place], pp * num_chunks)
        chunk = turn // pp if passes[place] == FORWARD else num_chunks - 1 - turn // pp
        order[place] = passes[place], first + chunk * pp, rounds * pp + turn % pp
    return order


def _encoder_order(
    plan: Plan, stage: Stage, place: int, lead: int, num_before: int, frozen: Collection[str]
) -> np.ndarray:
    pp = plan.grid(stage.module).pp
    if not has_backward(stage.module, frozen):
        passes, number = np.full(plan.num_microbatches, FORWARD), np.arange(plan.num_microbatches)
    else:
        delay = num_before - pp + stage.pp_stage if splits_backward(plan, stage.module) else -1
        passes, number = _interleave(plan.num_microbatches, lead + pp - stage.pp_stage - 1, delay)
    return np.column_stack([passes, np.full_like(passes, place), number])


@njit(cache=True)
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
    """How many forwards of `stage` at most stand before a backward of it, beyond those before the backwards so far.

    Whoever feeds the stage and runs so far ahead is one forward ahead of it throughout.
    """
    passes = order[order[:, 1] == stage, 0]
    is_backward = passes == BACKWARD
    forwards_before = np.cumsum(passes == FORWARD)[is_backward]
    return int((forwards_before - np.arange(len(forwards_before))).max())


def _with_encoders(order: np.ndarray, first: int, forwards: np.ndarray, backwards: np.ndarray) -> np.ndarray:
    """The first stage's order with the encoders' computations around those of its first chunk."""
    parts = []
    for item in order:
        own = item[1] == first
        if own and item[0] == FORWARD:
            parts.append(forwards[forwards[:, 2] == item[2]])
        parts.append(item[None])
        if own and item[0] == BACKWARD:
            parts.append(backwards[backwards[:, 2] == item[2]])
    return np.concatenate(parts)
