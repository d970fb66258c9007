"""What a policy is, and the batches that plans are priced on, as a policy sees them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from dflop.balance.packing import largest_first, quick_buckets
from dflop.balance.problem import BatchProblem

__all__ = ["DrawnBatch", "Packing", "Policy"]


class DrawnBatch:
    """A global batch for which samples' loads [num_samples, num_modules] and LLM tokens are known, but no plan.

    Loads are shares of the batch's seconds in each whole module. Random choices are drawn from `seed`.
    """

    def __init__(self, loads_s: np.ndarray, llm_tokens: np.ndarray, seed: Sequence[int], num_kept: int) -> None:
        """`even_buckets` keeps its last `num_kept` results."""
        self.loads_s, self.llm_tokens, self.seed = loads_s, llm_tokens, seed
        self.even_buckets = lru_cache(maxsize=num_kept)(self._even_buckets)

    def __len__(self) -> int:
        return len(self.llm_tokens)

    @property
    def rng(self) -> np.random.Generator:
        """A generator with the same draws each time."""
        return np.random.default_rng(self.seed)

    @cached_property
    def _ordered(self) -> tuple[np.ndarray, np.ndarray]:
        return largest_first(self.loads_s)

    def _even_buckets(self, num_buckets: int) -> tuple[np.ndarray, np.ndarray]:
        """Bucket of each sample, and the buckets, the largest first; shared by all plans with as many buckets."""
        bucket = quick_buckets(self.loads_s, num_buckets, self._ordered)
        load = np.bincount(bucket, weights=self.loads_s.sum(axis=1), minlength=num_buckets)
        return bucket, np.argsort(-load, kind="stable")


class Packing(NamedTuple):
    """Buckets [num_samples], and the shares of the mean bucket that they aim at (`lpt_buckets`); None: equal ones."""

    bucket: np.ndarray
    share: np.ndarray | None = None


class Policy(ABC):
    """One way to group samples. Buckets are numbered `dp_rank * num_microbatches + microbatch`."""

    name: str
    # Whether a scheduler may run the microbatches of a packing in another order.
    may_reorder = False
    # Whether a scheduler goes on from the fastest packing with a search by simulated step times.
    searches = False
    # Whether CBC improves the fastest packing before that search.
    solves = False

    @abstractmethod
    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        """The bucket of each sample, [num_samples]; no bucket is empty.

        Raises:
            UserError: no way was found to respect `max_bucket_tokens`.
        """

    def packings(
        self, problem: BatchProblem, rng: np.random.Generator, ideal_shares: Callable[[], np.ndarray]
    ) -> dict[str, Packing]:
        """The packings that a scheduler starts from, by the names that schedules give them.

        `ideal_shares` [num_microbatches, num_modules] are the sizes of microbatches that suit the plan's pipeline.
        """
        return {self.name: Packing(self.buckets(problem, rng))}

    def quick(self, drawn: DrawnBatch, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """LLM replica and microbatch of each sample, [num_samples] each, to price a plan of which only these two
        numbers are known. Thousands of plans are priced, so a policy with slow `buckets` needs its own quick form."""
        problem = BatchProblem(
            loads_s=drawn.loads_s, llm_tokens=drawn.llm_tokens, num_dp_ranks=dp, num_microbatches=num_microbatches
        )
        return np.divmod(self.buckets(problem, drawn.rng), num_microbatches)

    @property
    def without_cbc(self) -> "Policy":
        """The policy whose answers do not depend on how much time CBC gets."""
        return self
