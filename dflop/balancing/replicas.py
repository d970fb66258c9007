"""One global batch dealt to data-parallel replicas and their microbatches, so that no replica waits for another.

Nothing but costs is needed: no cost model, no pipeline. A cell is one (microbatch, replica) pair, numbered
`microbatch * num_replicas + replica`, and every function returns or takes `cell[num_samples]`. All cells of a
microbatch hold equally many samples. What a cell costs is the sum over its samples (packed sequences, encoders that run
image by image), or, `padded`, its number of samples times the dearest of them (a collator that pads to the longest).
"""

import math

import numpy as np

from dflop.balancing.policies import lpt_buckets
from dflop.balancing.problem import BatchProblem

__all__ = ["balanced_cells", "cell_loads", "unbalanced_cells", "waiting_loads"]

# Shares of a column's total are rounded to this grid, on which sums come out the same in whatever order they are taken:
# replicas on unlike machines must never disagree.
GRID = 2.0**40


def unbalanced_cells(num_samples: int, num_replicas: int, batch_size: int) -> np.ndarray:
    """Where torch's DistributedSampler and BatchSampler put the samples of a global batch, taken in shuffled order.

    `num_samples` is a multiple of `num_replicas`. The last microbatch may be smaller than the others, by the same
    number of samples on every replica.
    """
    position = np.arange(num_samples)
    return position // (num_replicas * batch_size) * num_replicas + position % num_replicas


def balanced_cells(costs: np.ndarray, num_replicas: int, batch_size: int, *, padded: bool = False) -> np.ndarray:
    """As many cells as the unbalanced ones, each of the same size, in which replicas wait less for each other.

    All cells are made even where that can be, which keeps memory down, too. Where a sample outweighs an even cell,
    its whole microbatch is filled up to it, so that the other replicas have something to do meanwhile.

    Args:
        costs: `[num_samples, num_columns]`, finite and not negative. Columns of unlike units are fine: each counts in
            proportion to its own sum. `padded` wants a single column.

    Returns:
        `cell[num_samples]`; the unbalanced ones, should either of their `waiting_loads` be smaller.
    """
    num_samples, micro_size = len(costs), num_replicas * batch_size
    shares = _shares(costs)
    num_full = num_samples // micro_size * micro_size
    microbatches = []
    for begin, end in ((0, num_full), (num_full, num_samples)):  # the full microbatches, and the smaller last one
        size = min(batch_size, (end - begin) // num_replicas)
        if size:
            grouped = (_sorted_microbatches if padded else _level_microbatches)(shares[begin:end], num_replicas, size)
            microbatches += [begin + members for members in grouped]
    weights = [_cell_weights(shares[members], padded) for members in microbatches]
    cell = np.empty(num_samples, dtype=np.int64)
    for number, (members, replica) in enumerate(zip(microbatches, _level_replicas(np.array(weights)), strict=True)):
        cell[members] = (number * num_replicas + replica)[:, None]
    unbalanced = unbalanced_cells(num_samples, num_replicas, batch_size)
    ours, theirs = (waiting_loads(cell_loads(shares, some, num_replicas, padded=padded)) for some in (cell, unbalanced))
    return cell if (ours <= theirs).all() else unbalanced


def cell_loads(costs: np.ndarray, cell: np.ndarray, num_replicas: int, *, padded: bool = False) -> np.ndarray:
    """What each cell costs, `[num_microbatches, num_replicas, num_columns]`."""
    loads = np.zeros((int(cell.max()) + 1, costs.shape[1]))
    if padded:
        np.maximum.at(loads, cell, costs)
        loads *= np.bincount(cell)[:, None]
    else:
        np.add.at(loads, cell, costs)
    return loads.reshape(-1, num_replicas, costs.shape[1])


def waiting_loads(loads: np.ndarray) -> np.ndarray:
    """What a step costs while the faster replicas wait, `[2]`, from `[num_microbatches, num_replicas, num_columns]`.

    First with a wait after every microbatch (weights gathered and gradients reduced each time), then with a single one
    at the end of the step (gradients accumulated locally). Columns, being waited for one by one, are added.
    """
    return np.array([loads.max(axis=1).sum(), loads.sum(axis=0).max(axis=0).sum()])


def _shares(costs: np.ndarray) -> np.ndarray:
    """Each cost as a share of its column's sum, in grid steps; zeros for a column of nothing."""
    costs = np.asarray(costs, dtype=np.float64)
    totals = np.array([math.fsum(column) for column in costs.T])
    return np.rint(np.divide(costs, totals, out=np.zeros_like(costs), where=totals > 0) * GRID)


def _sorted_microbatches(shares: np.ndarray, num_replicas: int, size: int) -> list[np.ndarray]:
    """Samples `[num_replicas, size]` of each microbatch, longest first: no other order pads less."""
    order = np.argsort(-shares[:, 0], kind="stable")
    return list(order.reshape(-1, num_replicas, size))


def _level_microbatches(shares: np.ndarray, num_replicas: int, size: int) -> list[np.ndarray]:
    """Samples `[num_replicas, size]` of each microbatch, the replicas of a microbatch as level as can be.

    While some cell cannot but be larger than the mean, a microbatch is made of the dearest samples, as many as the
    replicas can take without exceeding that cell, and of the cheapest. The rest then goes to even cells.
    """
    groups, left = [], np.arange(len(shares))
    while len(left) > num_replicas * size:
        rest = np.sort(shares[left], axis=0)
        least_peak = rest[-1] + rest[: size - 1].sum(axis=0)
        excess = least_peak * len(left) - rest.sum(axis=0) * size
        column = int(excess.argmax())
        if excess[column] <= 0:
            break
        ordered = left[np.argsort(-shares[left, column], kind="stable")]
        dearest, cheapest = (shares[some, column] for some in (ordered, ordered[::-1]))
        taken = num_replicas * size
        # By the number of dearest samples, at most as many as leave the cheapest for the cell of the very dearest.
        totals = (np.cumsum(dearest[:taken]) + np.append(np.cumsum(cheapest[: taken - 1])[::-1], 0))[: taken - size + 1]
        num_dear = max(1, int(np.searchsorted(totals, least_peak[column] * num_replicas, side="right")))
        chosen = np.append(ordered[:num_dear], ordered[len(ordered) - taken + num_dear :])
        groups.append(_even_cells(shares, chosen, num_replicas, size))
        left = ordered[num_dear : len(ordered) - taken + num_dear]
    cells = _even_cells(shares, left, len(left) // size, size)
    order = np.argsort(-shares[cells].sum(axis=(1, 2)), kind="stable")
    return groups + list(cells[order].reshape(-1, num_replicas, size))


def _even_cells(shares: np.ndarray, members: np.ndarray, num_cells: int, size: int) -> np.ndarray:
    """These samples in cells, `[num_cells, size]`, in no particular order."""
    members = np.sort(members)
    # Every sample weighs one token, and a cell holds `size` tokens: exactly as many samples.
    problem = BatchProblem(
        loads_s=_shares(shares[members]),
        llm_tokens=np.ones(len(members), dtype=np.int64),
        num_dp_ranks=num_cells,
        num_microbatches=1,
        max_bucket_tokens=size,
    )
    return members[np.argsort(lpt_buckets(problem), kind="stable")].reshape(num_cells, size)


def _cell_weights(shares: np.ndarray, padded: bool) -> np.ndarray:
    """One number for what each cell costs, `[num_replicas]` from `[num_replicas, size, num_columns]`."""
    return (shares.max(axis=1) * shares.shape[1] if padded else shares.sum(axis=1)).sum(axis=1)


def _level_replicas(weights: np.ndarray) -> np.ndarray:
    """The replica that takes each cell, `[num_microbatches, num_replicas]` as the weights, so that sums are level.

    Microbatch by microbatch, the replica that has least takes most.
    """
    replica = np.empty(weights.shape, dtype=np.int64)
    total = np.zeros(weights.shape[1])
    for load, taker in zip(weights, replica, strict=True):
        taker[np.argsort(-load, kind="stable")] = np.argsort(total, kind="stable")
        total[taker] += load
    return replica
