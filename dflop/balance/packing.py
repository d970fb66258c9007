"""Packings that answer within milliseconds: random buckets, and balanced ones (LPT).

Both take a `BatchProblem` and return `bucket[num_samples]`. The balanced packing first lowers the largest bucket
(seconds, over all modules) as far as `goal_s`, then evens out every module. It is a heuristic without a guarantee:
with eight samples a bucket it nearly always meets the goal, with two it may end 5 to 10 % above the bound. It does not
look at the order of a pipeline or at step times.
"""

import heapq

import numpy as np

from dflop.balance.exchanges import exchange_samples
from dflop.balance.problem import BatchProblem, check_assignment, goal_s
from dflop.base import UserError
from dflop.base.kernels import kernel

__all__ = [
    "dealt_at_random",
    "descend",
    "filled_s",
    "largest_first",
    "lpt_buckets",
    "quick_buckets",
    "random_buckets",
    "small_at_both_ends",
]

NO_CAP = np.iinfo(np.int64).max
# Above this number of (load, bucket) pairs, each sample goes to the least loaded bucket, not to the best fitting one.
_MOST_PLACES = 1_000_000


def random_buckets(problem: BatchProblem, rng: np.random.Generator) -> np.ndarray:
    """Equally many randomly drawn samples for each bucket, to within one, as in training without a scheduler.

    Samples change places only where a bucket would hold more tokens than memory allows.

    Raises:
        UserError: no way was found to respect `max_bucket_tokens`.
    """
    bucket = dealt_at_random(problem.num_samples, problem.num_buckets, rng)
    return _checked(problem, _within_token_cap(problem, bucket))


def dealt_at_random(num_samples: int, num_buckets: int, rng: np.random.Generator) -> np.ndarray:
    """The bucket of each sample, drawn at random; buckets get equally many samples, to within one."""
    bucket = np.empty(num_samples, dtype=np.int64)
    bucket[rng.permutation(num_samples)] = np.arange(num_samples) % num_buckets
    return bucket


def small_at_both_ends(load: np.ndarray) -> np.ndarray:
    """Small loads first and last, large ones in the middle: `order[place]` is an index into `load`."""
    ascending = np.argsort(load, kind="stable")
    return np.concatenate([ascending[::2], ascending[1::2][::-1]])


def lpt_buckets(problem: BatchProblem, share: np.ndarray | None = None) -> np.ndarray:
    """Longest processing time first over all modules at once, then moves and swaps of samples until none helps.

    `share` [num_microbatches, num_modules] asks for microbatches of unlike sizes, each a multiple of the module's mean
    bucket; the difference to the largest counts as already filled. Equal problems give equal answers on every machine.
    512 samples in 64 buckets take about 10 ms.

    Raises:
        UserError: no way was found to respect `max_bucket_tokens`.
    """
    weight = _module_weights(problem)
    order = np.argsort(-(problem.loads_s * weight).max(axis=1), kind="stable")
    bucket = _place(problem.loads_s, weight, problem.llm_tokens, order, filled_s(problem, share), _token_cap(problem))
    return descend(problem, _within_token_cap(problem, bucket), share)


def largest_first(loads_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loads [num_samples, num_modules] as multiples of each module's mean, and the samples, the largest first."""
    mean_s = loads_s.mean(axis=0)
    weighted = np.divide(loads_s, mean_s, out=np.zeros_like(loads_s), where=mean_s > 0)
    return weighted, np.argsort(-weighted.max(axis=1), kind="stable")


def quick_buckets(
    loads_s: np.ndarray, num_buckets: int, ordered: tuple[np.ndarray, np.ndarray] | None = None
) -> np.ndarray:
    """Longest processing time first, without the descent: fast enough to compare thousands of plans.

    Args:
        loads_s: float64 `[num_samples, num_modules]`, seconds that a sample adds to its bucket in each module.
        ordered: `largest_first` of the loads, if that is known.

    100,000 samples in 10,000 buckets take about 20 ms. No bucket is empty; tokens are not looked at.
    """
    assert len(loads_s) >= num_buckets
    weighted, order = ordered or largest_first(loads_s)
    if weighted.size * num_buckets > _MOST_PLACES:
        return _place_on_least(weighted, order, num_buckets)
    return _place_anywhere(weighted, order, num_buckets)


def descend(problem: BatchProblem, bucket: np.ndarray, share: np.ndarray | None = None) -> np.ndarray:
    """Move and swap samples of a valid assignment until the largest bucket meets `goal_s` and modules are even.

    `share` is that of `lpt_buckets`; with it the goal is that of the largest share. The largest bucket ends below the
    goal, or no larger than it was. Returns a new array.
    """
    bucket = np.array(bucket, dtype=np.int64)
    exchange_samples(
        problem.loads_s,
        _module_weights(problem),
        problem.llm_tokens,
        bucket,
        filled_s(problem, share),
        _token_cap(problem),
        goal_s(problem) * (1.0 if share is None else float(share.max())),
    )
    return _checked(problem, bucket)


def _checked(problem: BatchProblem, bucket: np.ndarray) -> np.ndarray:
    check_assignment(problem, bucket)
    return bucket


def _token_cap(problem: BatchProblem) -> int:
    return NO_CAP if problem.max_bucket_tokens is None else problem.max_bucket_tokens


def _module_weights(problem: BatchProblem) -> np.ndarray:
    """One over the mean bucket of each module, so that modules of unlike size can be added; 0 for an idle module."""
    mean_s = problem.loads_s.sum(axis=0) / problem.num_buckets
    return np.divide(1.0, mean_s, out=np.zeros_like(mean_s), where=mean_s > 0)


def filled_s(problem: BatchProblem, share: np.ndarray | None) -> np.ndarray:
    """Seconds that each bucket counts as holding before it gets any sample, [num_buckets, num_modules].

    With `share` (`lpt_buckets`) that is its difference to a bucket of the largest share; without, it is 0.
    """
    if share is None:
        return np.zeros((problem.num_buckets, problem.num_modules))
    mean_s = problem.loads_s.sum(axis=0) / problem.num_buckets
    return np.tile((share.max() - share) * mean_s, (problem.num_dp_ranks, 1))


def _within_token_cap(problem: BatchProblem, bucket: np.ndarray) -> np.ndarray:
    cap = _token_cap(problem)
    if _shed_tokens(problem.llm_tokens, bucket, problem.num_buckets, cap):
        return bucket
    # Packing by tokens alone ignores time but is the most likely to fit; the descent mends the time afterwards.
    tokens = problem.llm_tokens.astype(np.float64)[:, None]
    order = np.argsort(-problem.llm_tokens, kind="stable")
    bucket = _place(tokens, np.ones(1), problem.llm_tokens, order, np.zeros((problem.num_buckets, 1)), cap)
    if _shed_tokens(problem.llm_tokens, bucket, problem.num_buckets, cap):
        return bucket
    fill = problem.llm_tokens.sum() / (problem.num_buckets * cap)
    raise UserError(
        f"no assignment was found that keeps each of {problem.num_buckets} buckets within {cap} LLM tokens "
        f"(the batch fills {fill:.0%} of that room); use a larger num_microbatches or a smaller "
        "train.global_batch_size"
    )


@kernel
def _place(loads_s, weight, llm_tokens, order, filled_s, cap):
    """Give each sample, in `order`, to the bucket whose largest module then is smallest; ties go to the emptier one.

    A sample that fits nowhere goes to the bucket with the fewest tokens, above the cap.
    """
    num_samples, num_modules = loads_s.shape
    num_buckets = len(filled_s)
    load = filled_s.copy()
    tokens = np.zeros(num_buckets, dtype=np.int64)
    count = np.zeros(num_buckets, dtype=np.int64)
    bucket = np.empty(num_samples, dtype=np.int64)
    num_empty = num_buckets
    for position in range(num_samples):
        i = order[position]
        only_empty = num_empty == num_samples - position
        best, best_peak, best_squares = -1, np.inf, np.inf
        for b in range(num_buckets):
            if (only_empty and count[b] > 0) or tokens[b] + llm_tokens[i] > cap:
                continue
            peak, squares = 0.0, 0.0
            for k in range(num_modules):
                after = (load[b, k] + loads_s[i, k]) * weight[k]
                peak = max(peak, after)
                squares += after * after - (load[b, k] * weight[k]) ** 2
            if peak < best_peak or (
                peak == best_peak and (squares < best_squares or (squares == best_squares and count[b] < count[best]))
            ):
                best, best_peak, best_squares = b, peak, squares
        if best < 0:
            best = np.argmin(tokens)
        bucket[i] = best
        num_empty -= count[best] == 0
        count[best] += 1
        tokens[best] += llm_tokens[i]
        for k in range(num_modules):
            load[best, k] += loads_s[i, k]
    return bucket


@kernel
def _place_anywhere(weighted, order, num_buckets):
    """`_place` with weights of 1, without filled buckets and without a cap: several times as fast."""
    num_samples, num_modules = weighted.shape
    load = np.zeros((num_buckets, num_modules))
    count = np.zeros(num_buckets, dtype=np.int64)
    bucket = np.empty(num_samples, dtype=np.int64)
    num_used = 0  # buckets get their first sample in order, since empty ones are alike
    for position in range(num_samples):
        i = order[position]
        best, best_peak, best_squares = min(num_used, num_buckets - 1), np.inf, np.inf
        only_empty = num_buckets - num_used == num_samples - position
        for b in range(0 if only_empty else min(num_used + 1, num_buckets)):
            peak = 0.0
            for k in range(num_modules):
                peak = max(peak, load[b, k] + weighted[i, k])
            if peak > best_peak:
                continue
            squares = 0.0
            for k in range(num_modules):
                after = load[b, k] + weighted[i, k]
                squares += after * after - load[b, k] * load[b, k]
            if peak < best_peak or squares < best_squares or (squares == best_squares and count[b] < count[best]):
                best, best_peak, best_squares = b, peak, squares
        bucket[i] = best
        num_used += best == num_used
        count[best] += 1
        for k in range(num_modules):
            load[best, k] += weighted[i, k]
    return bucket


@kernel
def _place_on_least(weighted, order, num_buckets):
    """Give each sample, in `order`, to the bucket whose largest module is smallest before it comes."""
    num_samples, num_modules = weighted.shape
    load = np.zeros((num_buckets, num_modules))
    bucket = np.empty(num_samples, dtype=np.int64)
    peaks = [(0.0, b) for b in range(num_buckets)]
    for position in range(num_samples):
        i = order[position]
        b = position if position < num_buckets else peaks[0][1]
        bucket[i] = b
        peak = 0.0
        for k in range(num_modules):
            load[b, k] += weighted[i, k]
            peak = max(peak, load[b, k])
        if position < num_buckets:
            peaks[b] = (peak, b)
            if position == num_buckets - 1:
                heapq.heapify(peaks)
        else:
            heapq.heapreplace(peaks, (peak, b))
    return bucket


@kernel
def _shed_tokens(llm_tokens, bucket, num_buckets, cap):
    """Move or swap samples out of the buckets above the cap, in place; False where that gets stuck."""
    num_samples = len(bucket)
    tokens = np.zeros(num_buckets, dtype=np.int64)
    count = np.zeros(num_buckets, dtype=np.int64)
    for i in range(num_samples):
        tokens[bucket[i]] += llm_tokens[i]
        count[bucket[i]] += 1
    while True:
        a = np.argmax(tokens)
        if tokens[a] <= cap:
            return True
        best_excess, best_i, best_j, best_b = tokens[a] - cap, -1, -1, -1
        for i in range(num_samples):
            if bucket[i] != a:
                continue
            if count[a] > 1:
                for b in range(num_buckets):
                    excess = max(tokens[a] - llm_tokens[i] - cap, 0) + max(tokens[b] + llm_tokens[i] - cap, 0)
                    excess -= max(tokens[b] - cap, 0)
                    if b != a and excess < best_excess:
                        best_excess, best_i, best_j, best_b = excess, i, -1, b
            for j in range(num_samples):
                b = bucket[j]
                shift = llm_tokens[i] - llm_tokens[j]
                if b == a or shift <= 0:
                    continue
                excess = max(tokens[a] - shift - cap, 0) + max(tokens[b] + shift - cap, 0) - max(tokens[b] - cap, 0)
                if excess < best_excess:
                    best_excess, best_i, best_j, best_b = excess, i, j, b
        if best_i < 0:
            return False
        shift = llm_tokens[best_i]
        bucket[best_i] = best_b
        if best_j >= 0:
            shift -= llm_tokens[best_j]
            bucket[best_j] = a
        else:
            count[a] -= 1
            count[best_b] += 1
        tokens[a] -= shift
        tokens[best_b] += shift
