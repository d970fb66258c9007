"""The interface of a pipeline schedule, which fixes in which order each pipeline rank computes its microbatches.

All schedules are instances of one formula. Forwards are numbered in order. Backward k comes right after forward
`k + ahead`. With chunks, a rank's chunks take turns every `pp` microbatches.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from dflop.base import UserError

if TYPE_CHECKING:
    from dflop.plan.plan import Plan

__all__ = ["Schedule"]


class Schedule(ABC):
    """One pipeline schedule. `stage` is a pipeline rank of the LLM, 0 <= stage < pp."""

    name: str

    @abstractmethod
    def ahead(self, stage: int, pp: int, num_microbatches: int, num_chunks: int) -> int:
        """The k-th backward comes after the `k + ahead`-th forward; forwards of all of a rank's chunks are counted."""

    def most_ahead_of_first(self, pp: int, num_microbatches: int, num_chunks: int) -> int:
        """The largest number of microbatches that the LLM's first stage (or first chunk) has in flight at a time."""
        return min(num_microbatches, self.ahead(0, pp, num_microbatches, num_chunks) + 1)

    def encoder_lead(self, pp: int) -> int:
        """By how many forwards more than needed an encoder on its own ranks runs ahead of the LLM's first stage."""
        return 0

    def chunk_counts(self, pp: int) -> tuple[int, ...]:
        """How many chunks of layers an LLM rank may have in the search, e.g. (2, 4); empty if the schedule makes no
        sense with `pp` stages."""
        return (1,)

    def microbatches_per_round(self, pp: int) -> int:
        """The number of microbatches must be a multiple of this."""
        return 1

    def check(self, plan: "Plan") -> None:
        """Check that the schedule allows a plan's numbers.

        Raises:
            UserError: naming the number that it does not allow, and one that it does.
        """
        if plan.num_chunks != 1:
            raise UserError(
                f"the plan has num_chunks={plan.num_chunks} with {self.name}; use num_chunks: 1 or "
                "schedule: interleaved_1f1b"
            )
