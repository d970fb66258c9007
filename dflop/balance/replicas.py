"""One step's samples dealt to data-parallel replicas and their microbatches, so that no replica waits for another.

Only costs are needed: no cost model, no pipeline. A cell is one (microbatch, replica) pair, numbered
`microbatch * num_replicas + replica`; an assignment is `cell[num_samples]`. Every cell of a microbatch holds the same
number of samples. A cell costs the sum over its samples (packed sequences, encoders that run image by image), or, with
`padded`, its number of samples times the dearest of them (a collator that pads a batch to its longest sample).

`sync` says how often replicas wait for each other, and so what counts:

- `microbatch`: in every microbatch, as FSDP and ZeRO do, which gather weights layer by layer. A step costs the largest
  cell of each microbatch, added up.
- `step`: once, after the last microbatch, as DDP does under `no_sync`. A step costs the largest sum of a replica's
  cells.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflop.balance.packing import lpt_buckets
from dflop.balance.problem import BatchProblem
from dflop.base import UserError

__all__ = [
    "ByteLimit",
    "DoesNotFit",
    "Sync",
    "balanced_cells",
    "cell_loads",
    "cost_shares",
    "even_cells",
    "is_within",
    "level_replicas",
    "unbalanced_cells",
    "waiting_loads",
]

Sync = Literal["microbatch", "step"]

# Shares of a column's total are rounded to this grid, on which sums come out the same in whatever order they are taken:
# replicas on unlike machines must never disagree.
GRID = 2.0**40


class DoesNotFit(Exception):
    """No assignment was found that keeps every cell within the byte limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteLimit:
    """The most bytes of a cell, and the bytes that each sample adds to its cell: int64 `[num_samples]`."""

    sample_bytes: np.ndarray
    max_bytes: int

    def of(self, members: np.ndarray) -> "ByteLimit":
        return ByteLimit(sample_bytes=self.sample_bytes[members], max_bytes=self.max_bytes)

    def holds(self, members: np.ndarray) -> bool:
        """Whether each of these cells, `[…, size]` samples, is within the limit."""
        return bool((self.sample_bytes[members].sum(axis=-1) <= self.max_bytes).all())


def unbalanced_cells(num_samples: int, num_replicas: int, batch_size: int) -> np.ndarray:
    """Where torch's DistributedSampler and BatchSampler put the samples of a step, taken in shuffled order.

    `num_samples` is a multiple of `num_replicas`. The last microbatch may be smaller than the others, by the same
    number of samples on every replica.
    """
    position = np.arange(num_samples)
    return position // (num_replicas * batch_size) * num_replicas + position % num_replicas


def balanced_cells(
    costs: np.ndarray,
    num_replicas: int,
    batch_size: int,
    *,
    padded: bool = False,
    sync: Sync = "microbatch",
    limit: ByteLimit | None = None,
) -> np.ndarray:
    """As many cells as the unbalanced ones, of the same sizes, in which replicas wait less for each other.

    Args:
        costs: `[num_samples, num_columns]`, finite and not negative. Columns may have unlike units: each counts in
            proportion to its own sum. `padded` wants a single column.
        limit: for cells whose samples' bytes add up; `padded` cells cannot be kept below one by regrouping.

    Returns:
        `cell[num_samples]`: the unbalanced ones where they cost no more and are within the limit.

    Raises:
        DoesNotFit: no assignment was found within the limit.
    """
    assert limit is None or not padded
    shares = cost_shares(costs)
    if sync == "step" and padded:
        microbatches = _padded_steps(shares, num_replicas, batch_size)
    elif sync == "step":
        microbatches = _level_steps(shares, num_replicas, batch_size, limit)
    else:
        microbatches = _each_microbatch(shares, num_replicas, batch_size, padded, limit)
    cell = np.empty(len(costs), dtype=np.int64)
    for number, members in enumerate(microbatches):
        cell[members] = (number * num_replicas + np.arange(num_replicas))[:, None]
    unbalanced = unbalanced_cells(len(costs), num_replicas, batch_size)
    ours, theirs = (
        waiting_loads(cell_loads(shares, some, num_replicas, padded=padded), sync) for some in (cell, unbalanced)
    )
    return cell if ours <= theirs or not is_within(unbalanced, limit) else unbalanced


def cell_loads(costs: np.ndarray, cell: np.ndarray, num_replicas: int, *, padded: bool = False) -> np.ndarray:
    """The cost of each cell, `[num_microbatches, num_replicas, num_columns]`."""
    loads = np.zeros((int(cell.max()) + 1, costs.shape[1]))
    if padded:
        np.maximum.at(loads, cell, costs)
        loads *= np.bincount(cell)[:, None]
    else:
        np.add.at(loads, cell, costs)
    return loads.reshape(-1, num_replicas, costs.shape[1])


def waiting_loads(loads: np.ndarray, sync: Sync) -> float:
    """The cost of a step, including waits, for cells that cost `[num_microbatches, num_replicas, num_columns]`.

    Columns are waited for one by one, so they are added.
    """
    waited = loads.sum(axis=0, keepdims=True) if sync == "step" else loads
    return float(waited.max(axis=1).sum())


def is_within(cell: np.ndarray, limit: ByteLimit | None, *, padded: bool = False) -> bool:
    """Whether each cell is within the limit: the sum of its samples' bytes, or its number times the largest."""
    if limit is None:
        return True
    held = np.zeros(int(cell.max()) + 1, dtype=np.int64)
    if padded:
        np.maximum.at(held, cell, limit.sample_bytes)
        held *= np.bincount(cell)
    else:
        np.add.at(held, cell, limit.sample_bytes)
    return bool(held.max() <= limit.max_bytes)


def cost_shares(costs: np.ndarray) -> np.ndarray:
    """Each cost as a share of its column's sum, in grid steps; zeros for a column of nothing."""
    costs = np.asarray(costs, dtype=np.float64)
    totals = np.array([math.fsum(column) for column in costs.T])
    return np.rint(np.divide(costs, totals, out=np.zeros_like(costs), where=totals > 0) * GRID)


def _each_microbatch(
    shares: np.ndarray, num_replicas: int, batch_size: int, padded: bool, limit: ByteLimit | None
) -> list[np.ndarray]:
    """Samples `[num_replicas, size]` of each microbatch, for replicas that wait in every one.

    A last microbatch that is smaller than the others keeps the samples that torch gives it.
    """
    num_samples, micro_size = len(shares), num_replicas * batch_size
    num_full = num_samples // micro_size * micro_size
    microbatches = []
    for begin, end in ((0, num_full), (num_full, num_samples)):
        if size := min(batch_size, (end - begin) // num_replicas):
            part = np.arange(begin, end)
            if padded:
                # Cells of samples of like cost, the dearest first: no other cells pad less.
                grouped = np.argsort(-shares[part, 0], kind="stable").reshape(-1, num_replicas, size)
            else:
                grouped = _level_microbatches(shares[part], num_replicas, size, limit and limit.of(part))
            microbatches += [begin + members for members in grouped]
    weights = np.array([_cell_weights(shares[members], padded) for members in microbatches])
    return [members[places] for members, places in zip(microbatches, level_replicas(weights), strict=True)]


def _level_microbatches(shares: np.ndarray, num_replicas: int, size: int, limit: ByteLimit | None) -> list[np.ndarray]:
    """Samples `[num_replicas, size]` of each microbatch, the cells of a microbatch as level as can be."""
    groups, left = [], np.arange(len(shares))
    try:
        while (taken := _around_the_dearest(shares, left, num_replicas, size)) is not None:
            chosen, left = taken
            groups.append(even_cells(shares, chosen, num_replicas, size, limit))
        cells = even_cells(shares, left, len(left) // size, size, limit)
    except DoesNotFit:
        # The dear samples may be too large together: all cells are made at once, which leaves more freedom.
        groups, cells = [], even_cells(shares, np.arange(len(shares)), len(shares) // size, size, limit)
    order = np.argsort(-shares[cells].sum(axis=(1, 2)), kind="stable")
    return groups + list(cells[order].reshape(-1, num_replicas, size))


def _around_the_dearest(
    shares: np.ndarray, left: np.ndarray, num_replicas: int, size: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """The samples of one microbatch around the dearest sample in `left`, and the remaining samples.

    The cell of the dearest sample may exceed the mean cell even when filled with the cheapest samples. Then the other
    replicas wait for it anyway. So the microbatch takes as many dear samples as the replicas can compute in that time,
    and the cheapest ones to fill up. Returns None if no cell is too large in this way.
    """
    taken = num_replicas * size
    if len(left) <= taken:
        return None
    rest = np.sort(shares[left], axis=0)
    least_peak = rest[-1] + rest[: size - 1].sum(axis=0)
    excess = least_peak * len(left) - rest.sum(axis=0) * size
    column = int(excess.argmax())
    if excess[column] <= 0:
        return None
    ordered = left[np.argsort(-shares[left, column], kind="stable")]
    dearest, cheapest = (shares[some, column] for some in (ordered, ordered[::-1]))
    # By the number of dearest samples, at most as many as leave the cheapest for the cell of the very dearest.
    totals = (np.cumsum(dearest[:taken]) + np.append(np.cumsum(cheapest[: taken - 1])[::-1], 0))[: taken - size + 1]
    num_dear = max(1, int(np.searchsorted(totals, least_peak[column] * num_replicas, side="right")))
    middle = slice(num_dear, len(ordered) - taken + num_dear)
    return np.delete(ordered, middle), ordered[middle]


def _level_steps(shares: np.ndarray, num_replicas: int, batch_size: int, limit: ByteLimit | None) -> list[np.ndarray]:
    """Samples `[num_replicas, size]` of each microbatch, for replicas that wait once: their sums are level.

    A replica's own samples are spread over its microbatches by size, which keeps its memory even.
    """
    num_each = len(shares) // num_replicas
    num_full = num_each // batch_size
    owned = even_cells(shares, np.arange(len(shares)), num_replicas, num_each)
    sizes = (shares.sum(axis=1) if limit is None else limit.sample_bytes)[owned]
    owned = np.take_along_axis(owned, np.argsort(-sizes, axis=1, kind="stable"), axis=1)
    # A last microbatch that is smaller takes its samples at even distances, from the largest to the smallest.
    in_last = np.linspace(0, num_each - 1, num_each - num_full * batch_size).astype(np.int64)
    full = np.delete(owned, in_last, axis=1).reshape(num_replicas, batch_size, num_full)
    full[:, 1::2] = full[:, 1::2, ::-1]  # dealt to and fro, so that no microbatch has the larger one each time
    microbatches = list(full.transpose(2, 0, 1))
    if len(in_last):
        microbatches.append(owned[:, in_last])
    if limit is None or all(map(limit.holds, microbatches)):
        return microbatches
    return _each_microbatch(shares, num_replicas, batch_size, False, limit)


def _padded_steps(shares: np.ndarray, num_replicas: int, batch_size: int) -> list[np.ndarray]:
    """Samples `[num_replicas, size]` of each microbatch, for replicas that wait once and pad each batch.

    Samples of like cost share a cell, which pads least; replicas then get cells whose costs add up to like sums. A last
    microbatch that is smaller takes the dearest samples: small cells pad least where costs differ most.
    """
    num_each = len(shares) // num_replicas
    num_full, size_last = divmod(num_each, batch_size)
    ordered = np.argsort(-shares[:, 0], kind="stable")
    num_last = num_replicas * size_last
    sums, microbatches = np.zeros(num_replicas), []
    if num_full:
        cells = ordered[num_last:].reshape(-1, batch_size)
        loads = batch_size * shares[cells[:, 0]]
        owned = even_cells(loads, np.arange(len(cells)), num_replicas, num_full)
        sums = loads[owned, 0].sum(axis=1)
        microbatches = list(cells[owned].transpose(1, 0, 2))
    if size_last:
        cells = np.empty((num_replicas, size_last), dtype=np.int64)
        cells[np.argsort(sums, kind="stable")] = ordered[:num_last].reshape(num_replicas, size_last)
        microbatches.append(cells)
    return microbatches


def even_cells(
    shares: np.ndarray, members: np.ndarray, num_cells: int, size: int, limit: ByteLimit | None = None
) -> np.ndarray:
    """The samples `members` in cells of even cost, `[num_cells, size]`, in no particular order.

    Raises:
        DoesNotFit: no cells were found that are all within the limit.
    """
    members = np.sort(members)
    # The only limit of the policy is one on tokens. With one token a sample and at most `size` tokens a cell, each cell
    # gets exactly `size` samples. A byte limit is added to this: a sample then counts as one token more than the most
    # bytes of a cell, plus its own bytes.
    tokens, most = np.ones(len(members), dtype=np.int64), size
    if limit is not None:
        tokens = tokens * (limit.max_bytes + 1) + limit.sample_bytes[members]
        most = size * (limit.max_bytes + 1) + limit.max_bytes
    try:
        problem = BatchProblem(
            loads_s=cost_shares(shares[members]),
            llm_tokens=tokens,
            num_dp_ranks=num_cells,
            num_microbatches=1,
            max_bucket_tokens=most,
        )
        cell = lpt_buckets(problem)
    except UserError as error:
        raise DoesNotFit from error
    return members[np.argsort(cell, kind="stable")].reshape(num_cells, size)


def _cell_weights(shares: np.ndarray, padded: bool) -> np.ndarray:
    """One cost for each cell, summed over columns: `[num_replicas]` from `[num_replicas, size, num_columns]`."""
    return (shares.max(axis=1) * shares.shape[1] if padded else shares.sum(axis=1)).sum(axis=1)


def level_replicas(weights: np.ndarray) -> np.ndarray:
    """Which cell of its microbatch each replica takes, `[num_microbatches, num_replicas]`, so that sums are level.

    Microbatch by microbatch, the replica that has least takes most.
    """
    taken = np.empty(weights.shape, dtype=np.int64)
    total = np.zeros(weights.shape[1])
    for load, cells in zip(weights, taken, strict=True):
        cells[np.argsort(total, kind="stable")] = np.argsort(-load, kind="stable")
        total += load[cells]
    return taken
