"""What a system is, for a comparison: the plans that it may have, and how it shares out a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflop.balancing import BatchProblem
from dflop.config import Config, PlanConfig
from dflop.costs import CostModel
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.parallelism import Plan
from dflop.planning import search_plans
from dflop.pricing import Assignment, Pricer
from dflop.runtime import UserError

__all__ = ["Batch", "PlanChoice", "System", "bucket_numbers", "fastest_of"]

# Of the fastest plans of a space so many are offered to a system, which may share out batches in another way.
_NUM_OFFERED = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One global batch that a system shares out by a plan; who draws, draws from `rng`."""

    pricer: Pricer
    shapes: SampleShapes
    rng: np.random.Generator

    @property
    def plan(self) -> Plan:
        return self.pricer.plan

    @cached_property
    def problem(self) -> BatchProblem:
        """What each sample adds to its bucket in seconds of each module, without a cap on tokens."""
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


# The plans that a system may have, the one that it would rather have first; none where nothing fits.
PlanChoice = Callable[[Config, ModelSpec, CostModel, SampleShapes], list[Plan]]


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """One way to train, by its published description: `plans` are those it may have, and `decide` shares out a batch.

    Of several plans it gets the one that is fastest with its own `decide`.
    """

    name: str
    plans: PlanChoice
    decide: Callable[[Batch], Assignment]


def fastest_of(
    within: PlanConfig | Callable[[ModelSpec], PlanConfig], *, grouping: str = "balanced", splits_evenly: bool = True
) -> PlanChoice:
    """The fastest plans within these limits, with batches grouped so (`planning.PlanPricer`), by our search and our
    simulator: no slower than what the system's own planner finds."""

    def plans(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> list[Plan]:
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
                compares=True,
            )
        except UserError:
            return []
        return [own.plan for own in found.candidates[:_NUM_OFFERED]]

    return plans


def bucket_numbers(rank: np.ndarray, microbatch: np.ndarray, num_microbatches: int) -> np.ndarray:
    """Buckets of samples on these replicas and in these microbatches, [num_samples]."""
    return rank * num_microbatches + microbatch
