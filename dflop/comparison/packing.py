"""Packing methods of other systems, for comparisons only. Loads are [num_samples], and so are the returned buckets."""

import heapq
from itertools import count

import numpy as np

__all__ = ["contiguous", "differencing", "longest_first"]


def longest_first(
    loads: np.ndarray, num_buckets: int, held: np.ndarray | None = None, *, equally_many: bool = False
) -> np.ndarray:
    """The longest processing time first (Graham 1969): each sample, in descending order, goes to the emptiest bucket.

    `held` [num_buckets] are loads that buckets already hold. With `equally_many`, no bucket gets more than an equal
    number of samples (rounded up). Without `held`, no bucket is left empty if there are enough samples with loads.
    """
    most = -(-len(loads) // num_buckets) if equally_many else len(loads)
    sums = np.zeros(num_buckets) if held is None else held
    heap = [(float(load), number) for number, load in enumerate(sums)]
    heapq.heapify(heap)
    num_held = np.zeros(num_buckets, dtype=np.int64)
    bucket = np.empty(len(loads), dtype=np.int64)
    for sample in np.argsort(-loads, kind="stable").tolist():
        load, number = heapq.heappop(heap)
        bucket[sample] = number
        num_held[number] += 1
        if num_held[number] < most:
            heapq.heappush(heap, (load + float(loads[sample]), number))
    return bucket


def contiguous(loads: np.ndarray, num_buckets: int) -> np.ndarray:
    """Samples in their order, cut into consecutive buckets so that the largest is minimal and none is empty."""
    low, high = max(float(loads.max()), float(loads.sum()) / num_buckets), float(loads.sum())
    for _ in range(60):
        middle = (low + high) / 2
        if _cut(loads, num_buckets, middle)[-1] < num_buckets:
            high = middle
        else:
            low = middle
    return _cut(loads, num_buckets, high)


def _cut(loads: np.ndarray, num_buckets: int, most: float) -> np.ndarray:
    """Buckets filled one after the other, none above `most`: as many as that takes, and at least `num_buckets`."""
    bucket, number, held = np.empty(len(loads), dtype=np.int64), 0, 0.0
    for sample, load in enumerate(loads.tolist()):
        must_begin = sample > 0 and len(loads) - sample == num_buckets - number - 1
        if must_begin or (held and held + load > most):
            number, held = number + 1, 0.0
        bucket[sample], held = number, held + load
    return bucket


def differencing(loads: np.ndarray, num_buckets: int) -> np.ndarray:
    """The largest differencing method (Karmarkar and Karp 1982).

    Of all partial partitions, the two with the largest spread are joined, the large buckets of one with the small ones
    of the other, until one partition is left.
    """
    ticket = count()
    # A partial partition is its buckets that hold something, the largest first: loads beside the least one's, samples.
    heap = [(-load, next(ticket), [(load, [sample])]) for sample, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, buckets = heapq.heappop(heap)
        _, _, others = heapq.heappop(heap)
        num_shared = max(0, len(buckets) + len(others) - num_buckets)
        place, other = len(buckets) - num_shared, len(others) - num_shared
        pairs = zip(buckets[place:], reversed(others[other:]), strict=True)
        joined = buckets[:place]
        joined += [(load + more, samples + added) for (load, samples), (more, added) in pairs]
        joined += reversed(others[:other])
        joined.sort(key=lambda bucket: -bucket[0])
        if len(joined) == num_buckets:
            joined = [(load - joined[-1][0], samples) for load, samples in joined]
        heapq.heappush(heap, (-joined[0][0], next(ticket), joined))
    bucket = np.empty(len(loads), dtype=np.int64)
    for number, (_, samples) in enumerate(heap[0][2]):
        bucket[samples] = number
    return bucket
