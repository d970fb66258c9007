"""A system in a comparison: the plans that it may have, and its policy for the samples of a batch.

Systems that many people train with are baselines, too: `dflop plan` prices them beside the chosen plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dflop.balance import LPT, Policy
from dflop.base import UserError
from dflop.config import Config, PlanConfig
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.search import Candidate, SearchResult, search_plans
from dflop.shapes import SampleShapes

__all__ = ["PlanChoice", "System", "bucket_numbers", "fastest_of", "offered"]

# How many of the fastest plans of a space are tried for a system, since its assignments may differ from the search's.
_NUM_OFFERED = 4


class PlanChoice(Protocol):
    """Finds the plans that a system may have, with their prices, the preferred one first.

    With `compares` it returns several plans, because the system's own assignments may change their order; without, the
    first is enough. If no plan fits, it returns none, or raises a UserError that says why.
    """

    def __call__(
        self, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, *, compares: bool = True
    ) -> list[Candidate]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """One way to train, by its published description: `plans` finds its possible plans, `policy` groups a batch.

    Of several plans, the system gets the one that is fastest with its own `policy`. `baseline` is its name among the
    baselines of `plan.yaml`; None where it is not one of them. `recomputes` says whether it may recompute more layers
    where its batches do not fit. `moves_samples` says whether samples change places until a batch fits. A system that
    balances could look at memory, too, so this is in its favour; random batches stay as they are drawn.
    """

    name: str
    plans: PlanChoice
    policy: Policy
    baseline: str | None = None
    recomputes: Callable[[Config], bool] = lambda _: True
    moves_samples: bool = True


def fastest_of(
    within: PlanConfig | Callable[[ModelSpec], PlanConfig],
    *,
    policy: Policy = LPT,
    splits_evenly: bool = True,
    keeps_attention: bool = False,
) -> PlanChoice:
    """The choice of the fastest plans within these limits, by our search and our simulator.

    Batches are grouped by the quick form of `policy`. The system's own planner could find no faster plans. Layers are
    recomputed as a whole, with `keeps_attention` also but for attention.
    """

    def plans(
        config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, *, compares: bool = True
    ) -> list[Candidate]:
        limits = within if isinstance(within, PlanConfig) else within(spec)
        costs = costs if keeps_attention else replace(costs, attention_bytes={})
        try:
            found = search_plans(
                config,
                spec,
                costs,
                samples,
                policy=policy,
                within=limits,
                splits_evenly=splits_evenly,
                compares=compares,
            )
        except UserError:
            return []
        return offered(found)

    return plans


def offered(found: SearchResult) -> list[Candidate]:
    """The fastest plans of a search, which are tried for a system."""
    return found.candidates[:_NUM_OFFERED]


def bucket_numbers(rank: np.ndarray, microbatch: np.ndarray, num_microbatches: int) -> np.ndarray:
    """The buckets [num_samples] of samples by their LLM replicas and microbatches."""
    return rank * num_microbatches + microbatch
