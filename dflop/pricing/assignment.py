"""Assignments: where each sample of a batch goes, and what follows for each module's microbatches.

Whoever decides gives an LLM replica and a microbatch to each sample; `deal_media` adds the replicas that encode its
media. `cells_of` then sums what every replica of every module has in every microbatch.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflop.costs import Loads
from dflop.data import SampleShapes
from dflop.parallelism import PLACEMENTS, Plan
from dflop.pricing.stage_costs import loads_of
from dflop.runtime.kernels import kernel

__all__ = ["Assignment", "Cells", "cells_of", "deal_media", "edge_tokens", "samples_alone"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where each sample of a batch goes: `llm_dp_rank` and `microbatch` are [num_samples].

    `encoder_rank` [num_samples, num_encoders] is, of each encoder in the plan's order, the dp rank that computes the
    sample's media. `slots` are where encoders compute in the order of a plan that fills bubbles with them
    (`pipeline.filling`), None where its one order, or the colocated one, holds.
    """

    llm_dp_rank: np.ndarray
    microbatch: np.ndarray
    encoder_rank: np.ndarray
    slots: np.ndarray | None = None


class Cells(NamedTuple):
    """What a module has to do: its loads, and the tokens that come into each of its stages or go out.

    Arrays are [dp, num_microbatches], or [num_samples] where each sample is looked at alone.
    """

    loads: Loads
    edge_tokens: np.ndarray


def deal_media(plan: Plan, shapes: SampleShapes, llm_dp_rank: np.ndarray, microbatch: np.ndarray) -> Assignment:
    """Complete an assignment: give each encoder's media to its replicas, largest first to the least loaded.

    Encoders on ranks of their own, or whose replicas share parameters, balance each microbatch. Others on the LLM's
    ranks, which do all their forwards before anything else, balance what they have been given so far. Without bridges,
    they take what their LLM replica does.
    """
    placement = PLACEMENTS[plan.placement]
    encoder_rank = np.empty((len(shapes), len(shapes.encoders)), dtype=np.int64)
    for column, encoder in enumerate(shapes.encoders):
        if not placement.has_bridges:
            encoder_rank[:, column] = llm_dp_rank
            continue
        num_items = shapes.num_items[:, column].astype(np.int64)
        most = num_items.max(initial=0)
        order = np.argsort(microbatch * (most + 1) + most - num_items, kind="stable")
        starts_anew = not placement.shares_ranks or plan.grid(encoder).gathers
        encoder_rank[:, column] = _deal(order, microbatch, num_items, plan.grid(encoder).dp, starts_anew)
    return Assignment(llm_dp_rank=llm_dp_rank, microbatch=microbatch, encoder_rank=encoder_rank)


def cells_of(plan: Plan, shapes: SampleShapes, assignment: Assignment) -> dict[str, Cells]:
    """What every replica of each module has in every microbatch; arrays [dp, num_microbatches]."""
    cells = {}
    for module, alone in samples_alone(plan, shapes).items():
        shape = (plan.grid(module).dp, plan.num_microbatches)
        replica = assignment.llm_dp_rank
        if module != "llm":
            replica = assignment.encoder_rank[:, shapes.encoders.index(module)]
        place = replica * plan.num_microbatches + assignment.microbatch
        *loads, tokens = (
            np.bincount(place, weights=values, minlength=shape[0] * shape[1]).reshape(shape)
            for values in (*alone.loads, alone.edge_tokens)
        )
        cells[module] = Cells(Loads(*loads), tokens)
    return cells


def samples_alone(plan: Plan, shapes: SampleShapes) -> dict[str, Cells]:
    """What each sample brings to each module; arrays [num_samples]."""
    return {
        grid.module: Cells(loads_of(grid.module, shapes), edge_tokens(plan, grid.module, shapes)) for grid in plan.grids
    }


def edge_tokens(plan: Plan, module: str, shapes: SampleShapes) -> np.ndarray:
    """Tokens of each sample that come into a stage of the module or go out, [num_samples].

    Between stages of the LLM these are all of its tokens. What travels inside an encoder is taken to be as much as its
    features: no shape says how much it is.
    """
    if module == "llm" and plan.num_stages("llm") > 1:
        return shapes.llm_tokens
    if not PLACEMENTS[plan.placement].has_bridges:
        return np.zeros_like(shapes.llm_tokens)
    return shapes.kept_tokens.sum(axis=1) if module == "llm" else shapes.kept_by(module)


@kernel
def _deal(order, microbatch, num_items, num_replicas, starts_anew):
    """Each sample's encoder replica: samples come in `order`, by microbatch; `starts_anew` with each of them.

    Of replicas with as much in the microbatch the one is next that has least of all so far: else the same one would
    have the largest sample of every microbatch. The heap holds one number for load, total and replica, in this order
    of weight: it is several times faster with numbers than with tuples.
    """
    encoder_rank = np.zeros(len(order), dtype=np.int64)
    total = np.zeros(num_replicas, dtype=np.int64)
    of_load = (num_items.sum() + 1) * num_replicas
    waiting = [replica for replica in range(num_replicas)]  # noqa: C416
    current = -1
    for sample in order:
        if starts_anew and microbatch[sample] != current:
            waiting = [total[replica] * num_replicas + replica for replica in range(num_replicas)]
            heapq.heapify(waiting)
        current = microbatch[sample]
        replica = waiting[0] % num_replicas
        encoder_rank[sample] = replica
        total[replica] += num_items[sample]
        heapq.heapreplace(waiting, waiting[0] + num_items[sample] * (of_load + num_replicas))
    return encoder_rank
