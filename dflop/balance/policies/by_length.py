"""By length: samples of similar length share a microbatch, as with `group_by_length` of the Hugging Face Trainer.

It groups within a global batch, so that each step trains on the same samples as with the other policies.
"""

import numpy as np

from dflop.balance.policies.policy import DrawnBatch, Policy
from dflop.balance.problem import BatchProblem

__all__ = ["POLICY"]


class ByLength(Policy):
    name = "by_length"

    def buckets(self, problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
        replica, microbatch = _like_lengths(problem.llm_tokens, problem.num_dp_ranks, problem.num_microbatches)
        return replica * problem.num_microbatches + microbatch

    def quick(self, drawn: DrawnBatch, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        return _like_lengths(drawn.llm_tokens, dp, num_microbatches)


def _like_lengths(lengths: np.ndarray, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
    """Replica and microbatch of each sample, so that a microbatch has samples of similar length.

    Buckets get equally many samples, to within one. The longest samples come first. Within a microbatch, samples are
    dealt to the replicas in alternating directions.
    """
    order = np.argsort(-lengths, kind="stable")
    turn = np.arange(len(order)) * num_microbatches // len(order)
    rank, microbatch = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=np.int64)
    microbatch[order] = turn
    round_, place = np.divmod(np.arange(len(order)) - np.searchsorted(turn, turn), dp)
    rank[order] = np.where(round_ % 2 == 0, place, dp - 1 - place)
    return rank, microbatch


POLICY = ByLength()
