"""The question a scheduler answers: which sample of a global batch goes to which bucket.

A bucket is one (LLM dp rank, microbatch) cell, numbered `dp_rank * num_microbatches + microbatch`. The problem holds
what every sample would cost each module; an answer is an int64 array `bucket[num_samples]`. How long a pipeline takes
over the buckets, and in which order they run, is not decided here.
"""

from dataclasses import dataclass

import numpy as np

from dflop.base import UserError

__all__ = ["BatchProblem", "bucket_loads", "check_assignment", "goal_s", "least_bucket_s"]

# Predicted costs are less exact than this. A tighter goal leaves samples hardly any freedom: with 512 samples in 64
# buckets, the lighter module's largest bucket would end up to 30 % above its mean instead of 1 %.
GOAL_SLACK = 0.01


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchProblem:
    """One global batch and the buckets it must fill.

    Args:
        loads_s: float64 `[num_samples, num_modules]`, forward plus backward seconds that a sample adds to its bucket
            in each module (every encoder, then the LLM). A text-only sample has zero encoder load.
        llm_tokens: int64 `[num_samples]`.
        max_bucket_tokens: the most LLM tokens that fit in a bucket's memory; None for no limit.

    Raises:
        UserError: fewer samples than buckets, or more tokens than the buckets may hold.
        ValueError: arrays that do not describe a batch.
    """

    loads_s: np.ndarray
    llm_tokens: np.ndarray
    num_dp_ranks: int
    num_microbatches: int
    max_bucket_tokens: int | None = None

    def __post_init__(self) -> None:
        loads_s = np.ascontiguousarray(self.loads_s, dtype=np.float64)
        llm_tokens = np.asarray(self.llm_tokens)
        if loads_s.ndim != 2 or loads_s.shape[1] == 0:
            raise ValueError(f"loads_s must be [num_samples, num_modules], not of shape {loads_s.shape}")
        if llm_tokens.shape != loads_s.shape[:1] or llm_tokens.dtype.kind not in "iu":
            raise ValueError(
                f"llm_tokens must be {loads_s.shape[0]} integers, not {llm_tokens.dtype} of shape {llm_tokens.shape}"
            )
        wrong = np.argwhere(~(np.isfinite(loads_s) & (loads_s >= 0)))
        if len(wrong):
            sample, module = (int(index) for index in wrong[0])
            raise ValueError(
                f"sample {sample} has a load of {loads_s[sample, module]} s in module {module}; "
                "loads must be finite and not negative"
            )
        if (llm_tokens < 0).any():
            raise ValueError(f"sample {int(np.argmin(llm_tokens))} has {int(llm_tokens.min())} LLM tokens")
        if self.num_dp_ranks < 1 or self.num_microbatches < 1:
            raise ValueError(
                f"num_dp_ranks={self.num_dp_ranks} and num_microbatches={self.num_microbatches} must be at least 1"
            )
        object.__setattr__(self, "loads_s", loads_s)
        object.__setattr__(self, "llm_tokens", np.ascontiguousarray(llm_tokens, dtype=np.int64))
        self._check_that_buckets_can_be_filled()
        self._check_that_tokens_can_fit()

    @property
    def num_samples(self) -> int:
        return self.loads_s.shape[0]

    @property
    def num_modules(self) -> int:
        return self.loads_s.shape[1]

    @property
    def num_buckets(self) -> int:
        return self.num_dp_ranks * self.num_microbatches

    def _check_that_buckets_can_be_filled(self) -> None:
        if self.num_samples >= self.num_buckets:
            return
        ways_out = [f"train.global_batch_size >= {self.num_buckets}"]
        if self.num_samples >= self.num_dp_ranks:
            ways_out.insert(0, f"num_microbatches <= {self.num_samples // self.num_dp_ranks}")
        raise UserError(
            f"a global batch of {self.num_samples} samples cannot fill {self.num_buckets} buckets "
            f"({self.num_dp_ranks} LLM dp ranks x {self.num_microbatches} microbatches); use {' or '.join(ways_out)}"
        )

    def _check_that_tokens_can_fit(self) -> None:
        if self.max_bucket_tokens is None:
            return
        longest = int(np.argmax(self.llm_tokens))
        if self.llm_tokens[longest] > self.max_bucket_tokens:
            raise UserError(
                f"sample {longest} of the batch has {self.llm_tokens[longest]} LLM tokens, but memory allows "
                f"{self.max_bucket_tokens} a microbatch; lower data.max_llm_tokens to {self.max_bucket_tokens}, "
                "or give the LLM a plan with more memory per rank"
            )
        total, room = int(self.llm_tokens.sum()), self.num_buckets * self.max_bucket_tokens
        if total > room:
            raise UserError(
                f"the batch has {total} LLM tokens, but {self.num_buckets} buckets of at most "
                f"{self.max_bucket_tokens} tokens hold {room}; use a larger num_microbatches or a smaller "
                "train.global_batch_size"
            )


def bucket_loads(problem: BatchProblem, bucket: np.ndarray) -> np.ndarray:
    """Seconds of every bucket in every module, `[num_buckets, num_modules]`."""
    columns = [np.bincount(bucket, weights=column, minlength=problem.num_buckets) for column in problem.loads_s.T]
    return np.stack(columns, axis=1)


def least_bucket_s(problem: BatchProblem) -> float:
    """A lower bound of any assignment's largest bucket, in seconds: a module's mean bucket or its largest sample."""
    mean_s = problem.loads_s.sum(axis=0) / problem.num_buckets
    return float(np.maximum(mean_s, problem.loads_s.max(axis=0)).max())


def goal_s(problem: BatchProblem) -> float:
    """Seconds of a largest bucket that is small enough: 1 % above the lower bound."""
    return least_bucket_s(problem) * (1 + GOAL_SLACK)


def check_assignment(problem: BatchProblem, bucket: np.ndarray) -> None:
    """Check that every sample is in exactly one bucket, no bucket is empty and none has too many tokens.

    Every policy's result passes through here.

    Raises:
        ValueError: naming what is violated, and where.
    """
    if bucket.shape != (problem.num_samples,) or bucket.dtype.kind != "i":
        raise ValueError(
            f"an assignment of {problem.num_samples} samples needs as many integers, "
            f"not {bucket.dtype} of shape {bucket.shape}"
        )
    outside = np.flatnonzero((bucket < 0) | (bucket >= problem.num_buckets))
    if len(outside):
        raise ValueError(
            f"sample {outside[0]} is in bucket {bucket[outside[0]]}, but buckets end at {problem.num_buckets - 1}"
        )
    empty = np.flatnonzero(np.bincount(bucket, minlength=problem.num_buckets) == 0)
    if len(empty):
        raise ValueError(f"bucket {empty[0]} is empty")
    if problem.max_bucket_tokens is not None:
        tokens = np.zeros(problem.num_buckets, dtype=np.int64)
        np.add.at(tokens, bucket, problem.llm_tokens)
        if tokens.max() > problem.max_bucket_tokens:
            raise ValueError(
                f"bucket {int(tokens.argmax())} has {tokens.max()} LLM tokens, more than {problem.max_bucket_tokens}"
            )
