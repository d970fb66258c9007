"""A system in a comparison: the plans that it may have, and how it assigns the samples of a batch.

Systems that many people train with are baselines, too: `dflop plan` prices them beside the chosen plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from dflop.balancing import BatchProblem
from dflop.config import Config, PlanConfig
from dflop.costs import CostModel
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.parallelism import Plan
from dflop.planning import Candidate, SearchResult, search_plans
from dflop.pricing import Assignment, Pricer
from dflop.runtime import UserError

__all__ = ["Batch", "PlanChoice", "System", "bucket_numbers", "fastest_of", "offered"]

# How many of the fastest plans of a space are tried for a system, since its assignments may differ from the search's.
_NUM_OFFERED = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One global batch that a system assigns to the buckets of a plan; random choices are drawn from `rng`."""

    pricer: Pricer
    shapes: SampleShapes
    rng: np.random.Generator

    @property
    def plan(self) -> Plan:
        return self.pricer.plan

    @cached_property
    def problem(self) -> BatchProblem:
        """The balancing problem of the batch, without a limit on tokens."""
        posed = self.pricer.problem(self.shapes)
        return BatchProblem(
            loads_s=posed.loads_s,
            llm_tokens=posed.llm_tokens,
            num_dp_ranks=posed.num_dp_ranks,
            num_microbatches=posed.num_microbatches,
        )

    def of_buckets(self, bucket: np.ndarray) -> Assignment:
        """The assignment of these buckets, [num_samples], numbered `dp_rank * num_microbatches + microbatch`."""
        return self.pricer.assign(self.shapes, *np.divmod(bucket, self.plan.num_microbatches))


class PlanChoice(Protocol):
    """Finds the plans that a system may have, with their prices, the preferred one first.

    With `compares`, several are wanted, since a system's assignments may differ from the search's; without, the first.
    Where no plan fits, it returns none, or raises a UserError that says why.
    """

    def __call__(
        self, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, *, compares: bool = True
    ) -> list[Candidate]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """One way to train, by its published description: `plans` finds its possible plans, `decide` assigns a batch.

    Of several plans, the system gets the one that is fastest with its own `decide`. `baseline` is its name among the
    baselines of `plan.yaml`; None where it is not one of them.
    """

    name: str
    plans: PlanChoice
    decide: Callable[[Batch], Assignment]
    baseline: str | None = None


def fastest_of(
    within: PlanConfig | Callable[[ModelSpec], PlanConfig], *, grouping: str = "balanced", splits_evenly: bool = True
) -> PlanChoice:
    """The choice of the fastest plans within these limits, by our search and our simulator.

    Batches are grouped by `grouping` (`planning.PlanPricer`). The system's own planner could find no faster plans.
    """

    def plans(
        config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, *, compares: bool = True
    ) -> list[Candidate]:
        limits = within if isinstance(within, PlanConfig) else within(spec)
        try:
            found = search_plans(
                config,
                spec,
                costs,
                samples,
                grouping=grouping,
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
