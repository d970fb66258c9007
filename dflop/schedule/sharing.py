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
# The replicas in a block, unless a sample has more shares. Where more replicas meet in each layer, a block has up to
# twice as many.
_BLOCK = 16


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
    """The scan of all cells for each sample is what takes time: 34 million of 8,192 samples and 1,024 replicas with
    four microbatches. So the block of replicas whose least held cells are best is looked at first, and others only
    where theirs could be better than the best cell so far. Of equally good cells the first counts."""
    num_replicas, num_microbatches, num_meeting = sizes
    num_rows, num_loads = loads.shape
    size_of_block = max(_BLOCK, degree.max(), min(num_meeting, 2 * _BLOCK))
    num_blocks = (num_replicas + size_of_block - 1) // size_of_block
    replica, microbatch = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    held = np.zeros((num_replicas, num_microbatches, num_loads))
    filled = np.zeros((num_replicas, num_microbatches))
    slowest = np.zeros((num_replicas // num_meeting, num_microbatches))
    totals = np.zeros(num_replicas // num_meeting)
    # Of each block: the least held and filled, the least total and the slowest of its groups.
    least_held = np.zeros((num_blocks, num_microbatches, num_loads))
    least_filled = np.zeros((num_blocks, num_microbatches))
    least_totals, most_slowest = np.zeros(num_blocks), np.zeros((num_blocks, num_microbatches))
    # Of each block and microbatch: no cell is better for the sample than one with these would be.
    exceeding = np.zeros((num_blocks, num_microbatches), dtype=np.bool_)
    totals_after, held_after = np.zeros((num_blocks, num_microbatches)), np.zeros((num_blocks, num_microbatches))
    largest = np.zeros(num_loads)
    num_empty = num_replicas * num_microbatches
    for number in range(len(order)):
        sample = order[number]
        size, row = degree[sample], first[sample]
        fills_empty = num_empty >= len(order) - number  # the samples that are left just fill the empty buckets
        least_bytes = row_bytes[row : row + size].min()
        for load in range(num_loads):
            largest[load] = loads[row : row + size, load].max()
        best_block, best = 0, (True, np.inf, np.inf, num_replicas, 0)
        for block in range(num_blocks):
            for own in range(num_microbatches):
                after = 0.0
                for load in range(num_loads):
                    after = max(after, least_held[block, own, load] + largest[load])
                total = least_totals[block] + max(0.0, after - most_slowest[block, own])
                held_bytes = least_filled[block, own]
                exceeds = held_bytes > 0.0 and (fills_empty or held_bytes + least_bytes > most_bytes)
                exceeding[block, own], totals_after[block, own], held_after[block, own] = exceeds, total, after
                if _is_better((exceeds, total, after, block, own), best):
                    best_block, best = block, (exceeds, total, after, block, own)
        best = True, np.inf, np.inf, num_replicas, 0
        for turn in range(-1, num_blocks):
            block = best_block if turn < 0 else turn
            if turn == best_block:
                continue
            end = min(num_replicas, (block + 1) * size_of_block)
            for own in range(num_microbatches):
                exceeds, total, after = exceeding[block, own], totals_after[block, own], held_after[block, own]
                if not _is_better((exceeds, total, after, block * size_of_block, own), best):
                    continue
                for begin in range(block * size_of_block, end - size + 1, size):
                    group = begin // num_meeting
                    after, exceeds = 0.0, False
                    for place in range(size):
                        held_bytes = filled[begin + place, own]
                        exceeds = exceeds or (fills_empty and held_bytes > 0.0)
                        exceeds = exceeds or (held_bytes > 0.0 and held_bytes + row_bytes[row + place] > most_bytes)
                        for load in range(num_loads):
                            after = max(after, held[begin + place, own, load] + loads[row + place, load])
                    total = totals[group] + max(0.0, after - slowest[group, own])
                    if _is_better((exceeds, total, after, begin, own), best):
                        best = exceeds, total, after, begin, own
        _, least, least_after, begin, own = best
        group = begin // num_meeting
        totals[group] = least
        slowest[group, own] = max(slowest[group, own], least_after)
        for place in range(size):
            replica[row + place], microbatch[row + place] = begin + place, own
            num_empty -= filled[begin + place, own] == 0.0
            filled[begin + place, own] += row_bytes[row + place]
            for load in range(num_loads):
                held[begin + place, own, load] += loads[row + place, load]
        for block in range(begin // size_of_block, (begin + size - 1) // size_of_block + 1):
            place, end = block * size_of_block, min(num_replicas, (block + 1) * size_of_block)
            least_filled[block, own] = filled[place:end, own].min()
            for load in range(num_loads):
                least_held[block, own, load] = held[place:end, own, load].min()
        for block in range(group * num_meeting // size_of_block, ((group + 1) * num_meeting - 1) // size_of_block + 1):
            one, end = block * size_of_block // num_meeting, min(num_replicas, (block + 1) * size_of_block)
            other = (end - 1) // num_meeting + 1
            least_totals[block] = totals[one:other].min()
            most_slowest[block, own] = slowest[one:other, own].max()
    return replica, microbatch


@kernel
def _is_better(cell, best):
    """Whether one of two cells is better for a sample: one that does not exceed memory, or adds less to the step, or
    then holds less, or comes first. A cell is (exceeds, total, after, first replica, microbatch)."""
    exceeds, total, after, begin, own = cell
    is_full, least, least_after, best_begin, best_own = best
    if exceeds != is_full:
        return is_full
    if total != least:
        return total < least
    if after != least_after:
        return after < least_after
    return begin < best_begin or (begin == best_begin and own < best_own)
