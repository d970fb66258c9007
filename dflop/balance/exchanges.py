"""Exchanges: samples of an assignment move to another bucket, or change places, until none of it helps.

The kernels take arrays: seconds `loads_s` [num_samples, num_modules], `weight` [num_modules] to add them by, tokens
[num_samples], what buckets already hold `filled_s` [num_buckets, num_modules], and change `bucket` [num_samples].
"""

import numpy as np

from dflop.base.kernels import kernel

__all__ = ["MAX_COMPARISONS", "MIN_GAIN", "exchange_samples"]

# A gain must exceed rounding noise, or two equal states could alternate for ever.
MIN_GAIN = 1e-9
# Work limit of one descent in pairs of samples compared, about 5 ns each: a count and not a clock keeps results equal
# on every rank and machine.
MAX_COMPARISONS = 20_000_000


@kernel
def exchange_samples(loads_s, weight, llm_tokens, bucket, filled_s, cap, goal):
    """Change `bucket` in place by moves and swaps. They lower the largest bucket until it meets the goal, and even out
    all buckets (lower the sum of squared weighted loads).

    Evening out comes first: once buckets are exactly level in the busiest module, hardly any exchange is possible.
    """
    num_samples, num_modules = loads_s.shape
    num_buckets = len(filled_s)
    load = filled_s.copy()
    tokens = np.zeros(num_buckets, dtype=np.int64)
    count = np.zeros(num_buckets, dtype=np.int64)
    for i in range(num_samples):
        tokens[bucket[i]] += llm_tokens[i]
        count[bucket[i]] += 1
        for k in range(num_modules):
            load[bucket[i], k] += loads_s[i, k]
    clock = np.ones(1, dtype=np.int64)
    stamps = clock, np.zeros(num_buckets, dtype=np.int64), np.full(num_samples, -1)
    left = MAX_COMPARISONS
    while left > 0:
        # Half of the remaining comparisons, so that some are left to relieve the largest bucket of a huge batch, too.
        spent, evened = _even_out(
            loads_s, weight, llm_tokens, bucket, load, tokens, count, stamps, cap, goal, left // 2
        )
        left -= spent
        spent, lowered = _relieve_largest(
            loads_s, weight, llm_tokens, bucket, load, tokens, count, stamps, cap, goal, left
        )
        left -= spent
        if not (lowered or evened):
            return


@kernel
def _relieve_largest(loads_s, weight, llm_tokens, bucket, load, tokens, count, stamps, cap, goal, budget):
    """Take the best exchange out of the largest bucket, again and again, until it meets the goal or none lowers it."""
    num_samples, num_buckets = len(bucket), len(load)
    spent, lowered = 0, False
    while spent < budget:
        a, ceiling = 0, -1.0
        for b in range(num_buckets):
            peak = load[b].max()
            if peak > ceiling:
                a, ceiling = b, peak
        if ceiling <= goal:
            break
        best_peak, best_squares, best_i, best_j, best_b = ceiling * (1 - MIN_GAIN), np.inf, -1, -1, -1
        for i in range(num_samples):
            if bucket[i] != a:
                continue
            spent += num_samples + num_buckets
            # j runs over the samples to swap with, then, as -1, over the buckets to move to.
            for candidate in range(num_samples + num_buckets):
                j = candidate if candidate < num_samples else -1
                b = bucket[j] if j >= 0 else candidate - num_samples
                if b == a or (j < 0 and count[a] == 1):
                    continue
                peak, squares = _after_exchange(loads_s, weight, load, i, j, a, b)
                if peak > best_peak or (peak == best_peak and squares >= best_squares):
                    continue
                if _tokens_fit(llm_tokens, tokens, i, j, a, b, cap):
                    best_peak, best_squares, best_i, best_j, best_b = peak, squares, i, j, b
        if best_i < 0:
            break
        _exchange(loads_s, llm_tokens, bucket, load, tokens, count, stamps, best_i, best_j, best_b)
        lowered = True
    return spent, lowered


@kernel
def _even_out(loads_s, weight, llm_tokens, bucket, load, tokens, count, stamps, cap, goal, budget):
    """Take the exchanges that lower the squares and stay below goal or largest bucket, until a sweep finds none.

    An exchange that did not help does not help later either, unless one of its two buckets has changed since. So a
    sweep only tries exchanges with such a bucket again. Late sweeps are short, and the result is the same.
    """
    clock, changed_at, seen_at = stamps
    num_samples, num_buckets = len(bucket), len(load)
    ceiling = max(load.max(), goal) * (1 - MIN_GAIN)
    spent, evened, changed = 0, False, True
    while changed and spent < budget:
        changed = False
        for i in range(num_samples):
            spent += num_samples - i + num_buckets
            seen, seen_at[i] = seen_at[i], clock[0]
            for candidate in range(i + 1, num_samples + num_buckets):
                a = bucket[i]
                j = candidate if candidate < num_samples else -1
                b = bucket[j] if j >= 0 else candidate - num_samples
                if changed_at[b] <= seen and changed_at[a] <= seen:
                    continue
                if b == a or (j < 0 and count[a] == 1):
                    continue
                peak, squares = _after_exchange(loads_s, weight, load, i, j, a, b)
                if squares < -MIN_GAIN and peak < ceiling and _tokens_fit(llm_tokens, tokens, i, j, a, b, cap):
                    _exchange(loads_s, llm_tokens, bucket, load, tokens, count, stamps, i, j, b)
                    changed = True
        evened = evened or changed
    return spent, evened


@kernel(inline="always")
def _after_exchange(loads_s, weight, load, i, j, a, b):
    """If sample i went from bucket a to b, and j (-1: nothing) from b to a: the larger peak of both buckets, and the
    change of the sum of squares."""
    peak, squares = 0.0, 0.0
    for k in range(load.shape[1]):
        shift = loads_s[i, k]
        if j >= 0:
            shift -= loads_s[j, k]
        peak = max(peak, load[a, k] - shift, load[b, k] + shift)
        squares += 2 * shift * (load[b, k] - load[a, k] + shift) * weight[k] * weight[k]
    return peak, squares


@kernel(inline="always")
def _tokens_fit(llm_tokens, tokens, i, j, a, b, cap):
    shift = llm_tokens[i]
    if j >= 0:
        shift -= llm_tokens[j]
    return tokens[a] - shift <= cap and tokens[b] + shift <= cap


@kernel
def _exchange(loads_s, llm_tokens, bucket, load, tokens, count, stamps, i, j, b):
    a = bucket[i]
    clock, changed_at, _ = stamps
    clock[0] += 1
    changed_at[a] = changed_at[b] = clock[0]
    _transfer(loads_s, llm_tokens, bucket, load, tokens, count, i, b)
    if j >= 0:
        _transfer(loads_s, llm_tokens, bucket, load, tokens, count, j, a)


@kernel
def _transfer(loads_s, llm_tokens, bucket, load, tokens, count, i, b):
    a = bucket[i]
    bucket[i] = b
    count[a] -= 1
    count[b] += 1
    tokens[a] -= llm_tokens[i]
    tokens[b] += llm_tokens[i]
    for k in range(load.shape[1]):
        load[a, k] -= loads_s[i, k]
        load[b, k] += loads_s[i, k]
