"""What a pipeline schedule says of itself.

A schedule fixes in which order each pipeline rank computes its microbatches. All of them are one formula: forwards are
numbered as they come; backward k stands right behind forward `k + ahead`, and, where the backward is split, its weight
part right behind the input part of backward `k + weight_delay`. With chunks, a rank's chunks take turns every `pp`
microbatches.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from dflop.runtime import UserError

if TYPE_CHECKING:
    from dflop.parallelism.plan import Plan

__all__ = ["Schedule"]


class Schedule(ABC):
    """One pipeline schedule. `stage` is a pipeline rank of the LLM, 0 <= stage < pp."""

    name: str
    # Whether a backward's weight gradients are a computation of their own, which nothing but the gradient sync awaits.
    splits_backward = False

    @abstractmethod
    def ahead(self, stage: int, pp: int, num_microbatches: int, num_chunks: int) -> int:
        """How many forwards, those of all chunks counted, come before a backward beyond those before it."""

    def weight_delay(self, place: int) -> int:
        """How many input parts lie between a backward's two parts, on the stage at this place in the chain of all
        stages that have ranks of their own, the longest encoder's before the LLM's."""
        raise NotImplementedError(f"{self.name} does not split the backward")

    def most_ahead_of_first(self, pp: int, num_microbatches: int, num_chunks: int) -> int:
        """Microbatches that the LLM's first stage, or first chunk, has in flight at a time, at most."""
        return min(num_microbatches, self.ahead(0, pp, num_microbatches, num_chunks) + 1)

    def encoder_lead(self, pp: int) -> int:
        """How many forwards more than it must an encoder on ranks of its own runs ahead of the LLM's first stage."""
        return 0

    def chunk_counts(self, pp: int) -> tuple[int, ...]:
        """Numbers of chunks an LLM rank that are worth a look with so many stages; none where it makes no sense."""
        return (1,)

    def microbatches_per_round(self, pp: int) -> int:
        """The number of microbatches is a multiple of this."""
        return 1

    @property
    def allows_checkpointing(self) -> bool:
        return not self.splits_backward

    def check(self, plan: "Plan") -> None:
        """Check what the schedule demands of a plan's numbers.

        Raises:
            UserError: naming the number, and what would do.
        """
        if plan.checkpointing and not self.allows_checkpointing:
            raise UserError(
                f"{self.name} with checkpointing would hold what was computed again until its weights' gradients, and "
                "so what checkpointing is there to free; use schedule: 1f1b, or checkpointing: false"
            )
        if plan.grid("llm").gathers and self.splits_backward:
            raise UserError(
                f"{self.name} puts weight gradients of the LLM off, which with sharding={plan.grid('llm').sharding} "
                "are summed layer by layer; use schedule: 1f1b, or sharding: optimizer"
            )
        self._check_chunks(plan)

    def _check_chunks(self, plan: "Plan") -> None:
        if plan.num_chunks != 1:
            raise UserError(
                f"the plan has num_chunks={plan.num_chunks} with {self.name}; use num_chunks: 1 or "
                "schedule: interleaved_1f1b"
            )
