"""Which samples of a batch several LLM replicas compute together, and where shares and whole samples go.

A sample is shared where it is longer than a bucket should be: over the least number of replicas, a power of two up to
the plan's `cp`, with which its shares are not. How long a bucket should be is tried (`FILLS`): as long as the mean, and
less. Each batch is then dealt by longest processing time first, a sample's shares as one block.
"""

import numpy as np

from dflop.base.kernels import kernel
from dflop.plan import Grid
from dflop.shapes import SampleShapes
from dflop.shapes.shares import LEAST_TOKENS

__all__ = ["FILLS", "deal_shares", "degrees_of", "most_shares"]

# The largest share of a mean bucket's load that a share has, in turn.
FILLS = (1.0, 0.5, 0.25, 0.1, 0.05)


def degrees_of(loads: np.ndarray, shapes: SampleShapes, num_buckets: int, cp: int, fill: float) -> np.ndarray:
    """Over how many replicas each sample is computed, [num_samples]: 1, 2, 4, … up to `cp`.

    `loads` [num_samples, num_loads] are the seconds that samples add to buckets; a share has at most `fill` times those
    of a mean bucket where `cp` replicas are enough for it.
    """
    mean = loads.sum(axis=0) / num_buckets
    wanted = (loads / np.where(mean > 0, fill * mean, 1.0)).max(axis=1)
    degree = 2 ** np.ceil(np.log2(np.maximum(1.0, wanted))).astype(np.int64)
    return np.minimum(np.minimum(degree, most_shares(shapes)), cp)


def most_shares(shapes: SampleShapes) -> np.ndarray:
    """Over how many replicas each sample may be computed at most, a power of two."""
    most = 2 ** np.floor(np.log2(np.maximum(1, shapes.llm_tokens // LEAST_TOKENS))).astype(np.int64)
    return np.where(shapes.can_be_divided, most, 1)


def deal_shares(
    loads: np.ndarray,
    row_bytes: np.ndarray,
    degree: np.ndarray,
    llm: Grid,
    num_microbatches: int,
    most_bytes: float = np.inf,
) -> tuple[np.ndarray, np.ndarray]:
    """LLM replica and microbatch of each row, [num_rows] each, of samples in `degree` [num_samples] rows each.

    `loads` is [num_rows, num_loads] and `row_bytes` [num_rows]. The shares of a sample get neighbouring replicas, those
    of an aligned group, in one microbatch. As replicas meet in each layer (`Grid.num_meeting`), a microbatch lasts as
    long for all of them as for the slowest: a sample goes where the sum of these is least, so that long ones share
    microbatches. As long as there is another bucket, none gets more than `most_bytes` in several rows; and none
    stays empty if that can be.
    """
    first = np.cumsum(degree) - degree
    of_samples = np.maximum.reduceat(loads.max(axis=1), first)
    order = np.lexsort((-of_samples, -degree))
    sizes = llm.dp, num_microbatches, llm.num_meeting
    return _deal(np.ascontiguousarray(loads), row_bytes, degree, first, order, sizes, float(most_bytes))


@kernel
def _deal(loads, row_bytes, degree, first, order, sizes, most_bytes):
    num_replicas, num_microbatches, num_meeting = sizes
    num_rows, num_loads = loads.shape
    replica, microbatch = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    held = np.zeros((num_replicas, num_microbatches, num_loads))
    filled = np.zeros((num_replicas, num_microbatches))
    slowest = np.zeros((num_replicas // num_meeting, num_microbatches))
    totals = np.zeros(num_replicas // num_meeting)
    num_empty = num_replicas * num_microbatches
    for number in range(len(order)):
        sample = order[number]
        size, row = degree[sample], first[sample]
        fills_empty = num_empty >= len(order) - number  # the samples that are left just fill the empty buckets
        best, least, least_after, is_full = 0, np.inf, np.inf, True
        for cell in range(num_microbatches * (num_replicas // size)):
            begin, own = cell // num_microbatches * size, cell % num_microbatches
            group, after, exceeds = begin // num_meeting, 0.0, False
            for place in range(size):
                exceeds = exceeds or (fills_empty and filled[begin + place, own] > 0.0)
                held_bytes = filled[begin + place, own]
                exceeds = exceeds or (held_bytes > 0.0 and held_bytes + row_bytes[row + place] > most_bytes)
                for load in range(num_loads):
                    after = max(after, held[begin + place, own, load] + loads[row + place, load])
            total = totals[group] + max(0.0, after - slowest[group, own])
            is_shorter = total < least or (total == least and after < least_after)
            if (exceeds == is_full and is_shorter) or (is_full and not exceeds):
                best, least, least_after, is_full = cell, total, after, exceeds
        begin, own = best // num_microbatches * size, best % num_microbatches
        totals[begin // num_meeting] = least
        slowest[begin // num_meeting, own] = max(slowest[begin // num_meeting, own], least_after)
        for place in range(size):
            replica[row + place], microbatch[row + place] = begin + place, own
            num_empty -= filled[begin + place, own] == 0.0
            filled[begin + place, own] += row_bytes[row + place]
            for load in range(num_loads):
                held[begin + place, own, load] += loads[row + place, load]
    return replica, microbatch
