"""Which samples of a batch several LLM replicas compute together, and where shares and whole samples go.

A sample is shared where it is longer than a bucket should be: over the least number of replicas, a power of two up to
the plan's `cp`, with which its shares are not. How long a bucket should be is tried (`FILLS`): as long as the mean, and
less. Each batch is then dealt by longest processing time first, a sample's shares as one block.
"""

import numpy as np

from dflop.base.kernels import kernel
from dflop.shapes.shares import LEAST_TOKENS

__all__ = ["FILLS", "deal_shares", "degrees_of"]

# The largest share of a mean bucket's load that a share has, in turn.
FILLS = (1.0, 0.5, 0.25)


def degrees_of(loads: np.ndarray, llm_tokens: np.ndarray, num_buckets: int, cp: int, fill: float) -> np.ndarray:
    """Over how many replicas each sample is computed, [num_samples]: 1, 2, 4, … up to `cp`.

    `loads` [num_samples, num_loads] are the seconds that samples add to buckets; a share has at most `fill` times those
    of a mean bucket where `cp` replicas are enough for it.
    """
    mean = loads.sum(axis=0) / num_buckets
    wanted = (loads / np.where(mean > 0, fill * mean, 1.0)).max(axis=1)
    degree = 2 ** np.ceil(np.log2(np.maximum(1.0, wanted))).astype(np.int64)
    most = 2 ** np.floor(np.log2(np.maximum(1, llm_tokens // LEAST_TOKENS))).astype(np.int64)
    return np.minimum(np.minimum(degree, most), cp)


def deal_shares(
    loads: np.ndarray, degree: np.ndarray, num_replicas: int, num_microbatches: int
) -> tuple[np.ndarray, np.ndarray]:
    """LLM replica and microbatch of each row, [num_rows] each, of samples in `degree` [num_samples] rows each.

    `loads` is [num_rows, num_loads]. The shares of a sample get neighbouring replicas, those of an aligned group, in
    one microbatch.
    """
    first = np.cumsum(degree) - degree
    of_samples = np.maximum.reduceat(loads.max(axis=1), first)
    order = np.lexsort((-of_samples, -degree))
    return _deal(np.ascontiguousarray(loads), degree, first, order, num_replicas, num_microbatches)


@kernel
def _deal(loads, degree, first, order, num_replicas, num_microbatches):
    num_rows, num_loads = loads.shape
    replica, microbatch = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    held = np.zeros((num_replicas, num_microbatches, num_loads))
    for sample in order:
        size, row = degree[sample], first[sample]
        best, least, least_sum = 0, np.inf, np.inf
        for cell in range(num_microbatches * (num_replicas // size)):
            begin, own = cell // num_microbatches * size, cell % num_microbatches
            highest, total = 0.0, 0.0
            for place in range(size):
                for load in range(num_loads):
                    after = held[begin + place, own, load] + loads[row + place, load]
                    highest, total = max(highest, after), total + after
            if highest < least or (highest == least and total < least_sum):
                best, least, least_sum = cell, highest, total
        begin, own = best // num_microbatches * size, best % num_microbatches
        for place in range(size):
            replica[row + place], microbatch[row + place] = begin + place, own
            for load in range(num_loads):
                held[begin + place, own, load] += loads[row + place, load]
    return replica, microbatch
