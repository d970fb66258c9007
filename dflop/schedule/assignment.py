"""Assignments: where each sample of a batch goes, and the loads of each module's microbatches that follow from it.

A policy gives each sample an LLM replica and a microbatch; `deal_media` adds the replicas that encode its media.
`cells_of` then sums the loads of every replica of every module in every microbatch.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflop.base.kernels import kernel
from dflop.costs import Loads
from dflop.plan import PLACEMENTS, Placement, Plan
from dflop.schedule.stage_costs import loads_of
from dflop.shapes import SampleShapes

__all__ = [
    "Assignment",
    "Cells",
    "cells_in",
    "cells_of",
    "deal_items",
    "deal_media",
    "dealing_of",
    "edge_tokens",
    "module_alone",
    "samples_alone",
    "starts_anew_in_microbatches",
    "sums_by_cell",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where each sample of a batch goes: `llm_dp_rank` and `microbatch` are [num_samples].

    `encoder_rank` [num_samples, num_encoders] gives, for each encoder in the plan's order, the dp rank that computes
    the sample's media. In a plan that fills bubbles with encoders, `slots` say where they compute in this batch's order
    (`step.filling`). They are None for the colocated order, and in all other plans, which have one order.
    """

    llm_dp_rank: np.ndarray
    microbatch: np.ndarray
    encoder_rank: np.ndarray
    slots: np.ndarray | None = None


class Cells(NamedTuple):
    """A module's loads, the tokens that cross the edges of its stages (`edge_tokens`), and those of features that come
    to it over bridges.

    Arrays are [dp, num_microbatches], or [num_samples] where each sample stands by itself.
    """

    loads: Loads
    edge_tokens: np.ndarray
    features: np.ndarray


def deal_media(plan: Plan, shapes: SampleShapes, llm_dp_rank: np.ndarray, microbatch: np.ndarray) -> Assignment:
    """Complete an assignment: give each encoder's media to its replicas, largest first to the least loaded.

    An encoder on ranks of its own, or whose replicas share parameters, is balanced in each microbatch. Another encoder
    on the LLM's ranks does all its forwards before anything else, so the sums over the microbatches so far are
    balanced. Without bridges, each encoder replica computes the media of its own LLM replica's samples.
    """
    encoder_rank = np.empty((len(shapes), len(shapes.encoders)), dtype=np.int64)
    for column, encoder in enumerate(shapes.encoders):
        encoder_rank[:, column] = llm_dp_rank
        if dealing := dealing_of(plan, encoder):
            encoder_rank[:, column] = deal_items(shapes.num_items[:, column], microbatch, *dealing)
    return Assignment(llm_dp_rank=llm_dp_rank, microbatch=microbatch, encoder_rank=encoder_rank)


def dealing_of(plan: Plan, encoder: str) -> tuple[int, bool] | None:
    """Among how many replicas a plan deals an encoder's media, and whether anew in each microbatch; None where each
    replica computes those of its own samples."""
    placement, grid = PLACEMENTS[plan.placement], plan.grid(encoder)
    if not placement.has_bridges:
        return None
    return grid.dp, starts_anew_in_microbatches(placement, gathers=grid.gathers)


def starts_anew_in_microbatches(placement: Placement, *, gathers: bool) -> bool:
    """Whether an encoder's load is balanced in each microbatch, and not in sum over the microbatches so far."""
    return not placement.shares_ranks or gathers


def deal_items(num_items: np.ndarray, microbatch: np.ndarray, dp: int, starts_anew: bool) -> np.ndarray:
    """The replica of an encoder, out of `dp`, that computes each sample's media, [num_samples].

    `starts_anew` is that of `starts_anew_in_microbatches`; the other arrays are [num_samples].
    """
    num_items = num_items.astype(np.int64)
    most = num_items.max(initial=0)
    order = np.argsort(microbatch * (most + 1) + most - num_items, kind="stable")
    return _deal(order, microbatch, num_items, dp, starts_anew)


def cells_of(plan: Plan, shapes: SampleShapes, assignment: Assignment) -> dict[str, Cells]:
    """The loads of every replica of each module in every microbatch; arrays [dp, num_microbatches]."""
    cells = {}
    for module, alone in samples_alone(plan, shapes).items():
        replica = assignment.llm_dp_rank
        if module != "llm":
            replica = assignment.encoder_rank[:, shapes.encoders.index(module)]
        cells[module] = cells_in(alone, replica, assignment.microbatch, plan.grid(module).dp, plan.num_microbatches)
    return cells


def cells_in(alone: Cells, replica: np.ndarray, microbatch: np.ndarray, dp: int, num_microbatches: int) -> Cells:
    """A module's loads in every microbatch, arrays [dp, num_microbatches], from those of each sample `alone`."""
    values = np.array([*alone.loads, alone.edge_tokens, alone.features], dtype=float)
    sums = sums_by_cell(replica * num_microbatches + microbatch, values, dp * num_microbatches)
    *loads, tokens, features = sums.reshape(-1, dp, num_microbatches)
    return Cells(Loads(*loads), tokens, features)


def samples_alone(plan: Plan, shapes: SampleShapes) -> dict[str, Cells]:
    """The loads that each sample adds to each module; arrays [num_samples]."""
    how = {"has_bridges": PLACEMENTS[plan.placement].has_bridges, "cuts_llm": plan.num_stages("llm") > 1}
    return {grid.module: module_alone(grid.module, shapes, **how) for grid in plan.grids}


def module_alone(module: str, shapes: SampleShapes, *, has_bridges: bool, cuts_llm: bool) -> Cells:
    """The loads that each sample adds to a module; arrays [num_samples]. `cuts_llm` says that the LLM has more than one
    stage."""
    come = shapes.kept_tokens.sum(axis=1) * (has_bridges and module == "llm")
    tokens = edge_tokens(module, shapes, has_bridges=has_bridges, cuts_llm=cuts_llm)
    return Cells(loads_of(module, shapes), tokens, come)


def edge_tokens(module: str, shapes: SampleShapes, *, has_bridges: bool, cuts_llm: bool) -> np.ndarray:
    """Tokens of each sample that travel over an edge into or out of a stage of the module, [num_samples].

    Between stages of the LLM these are all of the sample's tokens. Between stages of an encoder they are taken to be
    as many as its features, since the shapes do not give their true number.
    """
    if module == "llm" and cuts_llm:
        return shapes.llm_tokens
    if not has_bridges:
        return np.zeros_like(shapes.llm_tokens)
    return shapes.kept_tokens.sum(axis=1) if module == "llm" else shapes.kept_by(module)


@kernel
def sums_by_cell(cell, values, num_cells):
    """Sums of the samples' `values` [num_values, num_samples] in each cell, [num_values, num_cells]."""
    for number in cell:
        assert 0 <= number < num_cells
    sums = np.zeros((len(values), num_cells))
    for row in range(len(values)):
        for sample in range(len(cell)):
            sums[row, cell[sample]] += values[row, sample]
    return sums


@kernel
def _deal(order, microbatch, num_items, num_replicas, starts_anew):
    """Each sample's encoder replica. Samples come in `order`, by microbatch; with `starts_anew`, loads count from 0 in
    each microbatch.

    Of replicas with equal loads in the microbatch, the one with the least total so far is next; otherwise the same
    replica would get the largest sample of every microbatch. The heap's entries are single numbers made of load, total
    and replica, in this order of weight: it is several times faster with numbers than with tuples.
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
