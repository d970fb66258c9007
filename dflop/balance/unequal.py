"""One step's samples dealt to data-parallel replicas in batches of unequal numbers of samples.

Eight texts of 100 tokens cost as much as one clip of 800: a batch may hold either. The step keeps its samples and its
number of batches, and no batch is empty. Words, costs and waits are those of `replicas`, which deals equal numbers.

Padded batches are runs of the samples in order of cost: no other batches pad less. So the question is where to cut.
Where replicas wait in every microbatch, the order is cut so that the largest batches of all microbatches add up to
little. Where they wait once a step, it is cut into batches that pad little, and replicas get batches of like sums.
"""

from contextlib import suppress

import numpy as np

from dflop.balance.packing import lpt_buckets
from dflop.balance.problem import BatchProblem
from dflop.balance.replicas import (
    ByteLimit,
    DoesNotFit,
    Sync,
    balanced_cells,
    cell_loads,
    cost_shares,
    even_cells,
    is_within,
    level_replicas,
    unbalanced_cells,
    waiting_loads,
)
from dflop.base import UserError
from dflop.base.kernels import kernel

__all__ = ["unequal_cells"]

# Places where a microbatch may begin, before they are moved sample by sample: so many for two microbatches.
NUM_CUTS = 48
# Limits of a batch's cost that are tried where replicas wait once a step, in eighths of the smallest possible one.
LIMITS = (9, 10, 12, 16, 32)
# A step that costs at most this many times the mean replica is even enough.
WELL_EVEN = 1.01
NO_LIMIT = np.iinfo(np.int64).max


def unequal_cells(
    costs: np.ndarray,
    num_replicas: int,
    batch_size: int,
    *,
    padded: bool = False,
    sync: Sync = "microbatch",
    limit: ByteLimit | None = None,
) -> np.ndarray:
    """As many cells as `balanced_cells` makes, of any sizes, in which replicas wait no longer, or 1 % longer at most.

    Args:
        costs: as in `balanced_cells`.
        batch_size: samples in a batch in the mean: it decides how many microbatches there are.
        limit: of a cell's bytes: the sum of its samples', or, with `padded`, its number of samples times the largest.

    Returns:
        `cell[num_samples]`, with at least one sample in each cell.

    Raises:
        DoesNotFit: no assignment was found within the limit.
    """
    found = [unbalanced_cells(len(costs), num_replicas, batch_size)]
    num_microbatches = int(found[0].max()) // num_replicas + 1
    shares = cost_shares(costs)
    if padded:
        largest = cell_loads(shares, found[0], num_replicas, padded=True).max()
        found += _padded(shares[:, 0], num_replicas, num_microbatches, sync, limit, int(largest))
    else:
        found += _summed(shares, num_replicas, num_microbatches, sync, limit)
    waits = [_waits(shares, cell, num_replicas, padded, sync, limit) for cell in found]
    # Sums come near to even, or else equal sizes may be evener; their work is spared where there is nothing to gain.
    if padded or min(waits) > WELL_EVEN * shares.sum() / num_replicas:
        with suppress(DoesNotFit):
            sums = None if padded else limit
            found.append(balanced_cells(costs, num_replicas, batch_size, padded=padded, sync=sync, limit=sums))
            waits.append(_waits(shares, found[-1], num_replicas, padded, sync, limit))
    if min(waits) == np.inf:
        raise DoesNotFit
    return found[int(np.argmin(waits))]


def _waits(
    shares: np.ndarray, cell: np.ndarray, num_replicas: int, padded: bool, sync: Sync, limit: ByteLimit | None
) -> float:
    """What a step costs with all waiting; infinite beyond the limit."""
    if not is_within(cell, limit, padded=padded):
        return np.inf
    return waiting_loads(cell_loads(shares, cell, num_replicas, padded=padded), sync)


def _summed(
    shares: np.ndarray, num_replicas: int, num_microbatches: int, sync: Sync, limit: ByteLimit | None
) -> list[np.ndarray]:
    """Assignments for cells whose costs add up."""
    if sync == "step" and num_microbatches > 1:
        level = _level_sums(shares, num_replicas, num_microbatches, limit)
        if is_within(level, limit):
            return [level]
    found = [_beside_the_dearest(shares, num_replicas, num_microbatches, limit, giants=False)]
    if num_microbatches > 1 and (shares.max(axis=0) * num_replicas * num_microbatches > shares.sum(axis=0)).any():
        found.append(_beside_the_dearest(shares, num_replicas, num_microbatches, limit, giants=True))
    return [cell for cell in found if cell is not None]


def _beside_the_dearest(
    shares: np.ndarray, num_replicas: int, num_microbatches: int, limit: ByteLimit | None, *, giants: bool
) -> np.ndarray | None:
    """Level cells; with `giants`, a sample that exceeds the mean cell has other dear samples computed beside it.

    None where no cells were found within the limit.
    """
    cell = np.empty(len(shares), dtype=np.int64)
    left, microbatch = np.arange(len(shares)), 0
    try:
        while giants and microbatch < num_microbatches - 1:
            num_cells = (num_microbatches - microbatch) * num_replicas
            excess = shares[left].max(axis=0) * num_cells - shares[left].sum(axis=0)
            column = int(excess.argmax())
            if excess[column] <= 0:
                break
            chosen = _that_fill(shares[left, column], num_replicas, len(left) - num_cells + num_replicas)
            cell[left[chosen]] = _lpt(shares, left[chosen], num_replicas, limit) + microbatch * num_replicas
            left, microbatch = np.delete(left, chosen), microbatch + 1
        rest = _lpt(shares, left, (num_microbatches - microbatch) * num_replicas, limit)
    except UserError:
        return None
    weights = np.bincount(rest, weights=shares[left].sum(axis=1))
    place = np.empty(len(weights), dtype=np.int64)
    place[np.argsort(-weights, kind="stable")] = np.arange(len(weights))
    cell[left] = place[rest] + microbatch * num_replicas
    return _with_level_replicas(shares, cell, num_replicas, padded=False)


def _that_fill(costs: np.ndarray, num_replicas: int, most: int) -> np.ndarray:
    """Places of up to `most` samples, dear ones first, that together cost `num_replicas` times the dearest or less."""
    order = np.argsort(-costs, kind="stable")
    room, chosen = costs[order[0]] * num_replicas, np.zeros(len(costs), dtype=bool)
    for place in order:
        if costs[place] <= room and most:
            room, most = room - costs[place], most - 1
            chosen[place] = True
    missing = max(0, num_replicas - int(chosen.sum()))  # each replica needs one
    return np.append(np.flatnonzero(chosen), order[~chosen[order]][len(costs) - int(chosen.sum()) - missing :])


def _lpt(shares: np.ndarray, members: np.ndarray, num_cells: int, limit: ByteLimit | None) -> np.ndarray:
    """The cell of each of `members`, level in cost, none empty."""
    return lpt_buckets(
        BatchProblem(
            loads_s=cost_shares(shares[members]),
            llm_tokens=np.zeros(len(members), dtype=np.int64) if limit is None else limit.sample_bytes[members],
            num_dp_ranks=num_cells,
            num_microbatches=1,
            max_bucket_tokens=None if limit is None else limit.max_bytes,
        )
    )


def _level_sums(
    shares: np.ndarray, num_replicas: int, num_microbatches: int, limit: ByteLimit | None
) -> np.ndarray | None:
    """Replicas of level sums; each spreads its samples over its batches by size, to and fro."""
    replica = _lpt(shares, np.arange(len(shares)), num_replicas, None)
    weights = shares.sum(axis=1)
    counts = np.bincount(replica, minlength=num_replicas)
    while counts.min() < num_microbatches:  # a giant may be alone: it gets the cheapest samples of others
        spare = np.flatnonzero(counts[replica] > num_microbatches)
        moved = spare[weights[spare].argmin()]
        counts[replica[moved]] -= 1
        replica[moved] = counts.argmin()
        counts[replica[moved]] += 1
    cell = np.empty(len(shares), dtype=np.int64)
    sizes = weights if limit is None else limit.sample_bytes
    for number in range(num_replicas):
        owned = np.flatnonzero(replica == number)
        owned = owned[np.argsort(-sizes[owned], kind="stable")]
        round_, place = np.divmod(np.arange(len(owned)), num_microbatches)
        microbatch = np.where(round_ % 2 == 0, place, num_microbatches - 1 - place)
        cell[owned] = microbatch * num_replicas + number
    return cell


def _padded(
    cost: np.ndarray, num_replicas: int, num_microbatches: int, sync: Sync, limit: ByteLimit | None, largest: int
) -> list[np.ndarray]:
    """Assignments for cells that cost their number of samples times the dearest.

    `largest` is the cost of torch's largest cell, above which no cell is made where a smaller one can be.
    """
    order = np.argsort(-cost, kind="stable")
    ordered = np.maximum(cost[order], 1).astype(np.int64)
    held = np.zeros(len(cost), dtype=np.int64) if limit is None else limit.sample_bytes[order]
    most = NO_LIMIT if limit is None else limit.max_bytes
    num_cells = num_replicas * num_microbatches
    runs = [_cut_runs(ordered, held, most, num_replicas, num_microbatches)]
    if sync == "step" and num_microbatches > 1:
        least = _least_limit(ordered, held, most, 0, len(ordered), num_cells)
        limits = {max(least, min(least * eighths // 8, largest)) for eighths in LIMITS}
        runs += [_pad_least(ordered, held, most, most_cost, num_cells) for most_cost in sorted(limits)]
    found = []
    for ends in runs:
        if not len(ends):
            continue
        begins = np.append(0, ends[:-1])
        loads = ordered[begins] * (ends - begins)
        place = np.arange(num_cells)
        if sync == "step" and num_microbatches > 1:
            owned = even_cells(loads[:, None].astype(np.float64), place, num_replicas, num_microbatches)
            place = np.empty_like(place)
            place[owned] = np.arange(num_microbatches) * num_replicas + np.arange(num_replicas)[:, None]
        cell = np.empty(len(cost), dtype=np.int64)
        cell[order] = np.repeat(place, ends - begins)
        found.append(cell if sync == "step" else _with_level_replicas(cost[:, None], cell, num_replicas, padded=True))
    return found


def _with_level_replicas(shares: np.ndarray, cell: np.ndarray, num_replicas: int, *, padded: bool) -> np.ndarray:
    """The same cells, dealt to the replicas of their microbatch so that the replicas' sums are level."""
    weights = cell_loads(shares, cell, num_replicas, padded=padded).sum(axis=2)
    taken = level_replicas(weights)
    replica = np.empty_like(taken)
    np.put_along_axis(replica, taken, np.broadcast_to(np.arange(num_replicas), taken.shape), axis=1)
    return cell // num_replicas * num_replicas + replica.reshape(-1)[cell]


@kernel
def _reach(cost, held, most, begin, end, num_cells, limit):
    """The first sample beyond `num_cells` batches from `begin` on that cost at most `limit`, each as long as can be."""
    position = begin
    for cell in range(num_cells):
        if position >= end:
            break
        room = min(limit // cost[position], end - position - (num_cells - cell - 1))
        widest, count = np.int64(0), 0
        if most == NO_LIMIT:
            count = room
        while count < room:
            widest = max(widest, held[position + count])
            if widest * (count + 1) > most:
                break
            count += 1
        if count < 1:
            return position
        position += count
    return position


@kernel
def _least_limit(cost, held, most, begin, end, num_cells):
    """The smallest cost within which `num_cells` batches hold samples `begin` to `end`; -1 if bytes forbid it."""
    total = np.int64(0)
    for position in range(begin, end):
        total += cost[position]
    low = max(cost[begin], total // num_cells)
    high = cost[begin] * (end - begin)
    if _reach(cost, held, most, begin, end, num_cells, high) < end:
        return np.int64(-1)
    while low < high:
        middle = (low + high) // 2
        if _reach(cost, held, most, begin, end, num_cells, middle) < end:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _cut_runs(cost, held, most, num_replicas, num_microbatches):
    """Ends of the batches, `[num_microbatches * num_replicas]`, microbatch by microbatch; empty if bytes forbid it.

    `cost` [num_samples] descends and is at least 1; a batch costs its first times its number, and holds the largest of
    its `held` as often, `most` bytes at the most.
    """
    num_samples = len(cost)
    first = np.zeros(num_microbatches + 1, dtype=np.int64)
    first[num_microbatches] = num_samples
    if num_microbatches > 1:
        _choose_cuts(cost, held, most, num_replicas, first)
    ends = np.empty(num_microbatches * num_replicas, dtype=np.int64)
    for microbatch in range(num_microbatches):
        begin, end = first[microbatch], first[microbatch + 1]
        limit = _least_limit(cost, held, most, begin, end, num_replicas)
        if limit < 0:
            return ends[:0]
        for replica in range(num_replicas):
            begin = _reach(cost, held, most, begin, end - (num_replicas - replica - 1), 1, limit)
            ends[microbatch * num_replicas + replica] = begin
    return ends


@kernel
def _choose_cuts(cost, held, most, num_replicas, first):
    """Where microbatches begin, `first[num_microbatches + 1]`, in place: by a table of cuts, then sample by sample."""
    num_samples, num_microbatches = first[-1], len(first) - 1
    num_cuts = max(num_microbatches, min(NUM_CUTS * num_microbatches // 2, num_samples // num_replicas))
    cuts = np.empty(num_cuts + 1, dtype=np.int64)
    for cut in range(num_cuts + 1):
        cuts[cut] = cut * num_samples // num_cuts
    price = np.full((num_cuts + 1, num_cuts + 1), np.inf)
    for a in range(num_cuts):
        for b in range(a + 1, num_cuts + 1):
            if cuts[b] - cuts[a] >= num_replicas:
                limit = _least_limit(cost, held, most, cuts[a], cuts[b], num_replicas)
                if limit < 0:
                    break
                price[a, b] = limit
    best = np.full((num_microbatches + 1, num_cuts + 1), np.inf)
    before = np.zeros((num_microbatches + 1, num_cuts + 1), dtype=np.int64)
    best[0, 0] = 0
    for microbatch in range(1, num_microbatches + 1):
        for b in range(1, num_cuts + 1):
            for a in range(b):
                value = best[microbatch - 1, a] + price[a, b]
                if value < best[microbatch, b]:
                    best[microbatch, b], before[microbatch, b] = value, a
    cut = num_cuts
    for microbatch in range(num_microbatches, 0, -1):
        first[microbatch] = cuts[cut]
        cut = before[microbatch, cut]
    step = max(1, num_samples // num_cuts)
    while step >= 1:
        moved = False
        for microbatch in range(1, num_microbatches):
            for shift in (-step, step):
                low, here, high = first[microbatch - 1], first[microbatch], first[microbatch + 1]
                there = here + shift
                if there - low < num_replicas or high - there < num_replicas:
                    continue
                old_low = _least_limit(cost, held, most, low, here, num_replicas)
                old_high = _least_limit(cost, held, most, here, high, num_replicas)
                new_low = _least_limit(cost, held, most, low, there, num_replicas)
                new_high = _least_limit(cost, held, most, there, high, num_replicas)
                old = np.inf if min(old_low, old_high) < 0 else float(old_low + old_high)
                if min(new_low, new_high) >= 0 and new_low + new_high < old:
                    first[microbatch] = there
                    moved = True
        if not moved:
            step //= 2


@kernel
def _pad_least(cost, held, most, limit, num_cells):
    """Ends of `num_cells` batches, none above `limit`, whose costs add up to the least that was found.

    A price for each batch is searched at which the best number of batches is `num_cells` (a Lagrange multiplier). Where
    no price gives just this number, the next smaller one is taken, and batches are cut where most is saved.
    """
    num_samples = len(cost)
    window = 16 * (num_samples // num_cells) + 16
    low, high = 0.0, float(cost[0]) * window
    best = np.full(num_samples + 1, np.inf)
    count = np.zeros(num_samples + 1, dtype=np.int64)
    begin_of = np.zeros(num_samples + 1, dtype=np.int64)
    ends = np.empty(num_cells, dtype=np.int64)
    found = 0
    while high - low >= 1 and found < num_cells:
        price = (low + high) / 2
        best[1:] = np.inf
        best[0], count[0] = 0.0, 0
        for begin in range(num_samples):
            if best[begin] == np.inf:
                continue
            widest = np.int64(0)
            for end in range(begin + 1, min(num_samples, begin + window) + 1):
                number = end - begin
                widest = max(widest, held[end - 1])
                if number > 1 and (cost[begin] * number > limit or widest * number > most):
                    break
                value = best[begin] + cost[begin] * number + price
                if value < best[end]:
                    best[end], count[end], begin_of[end] = value, count[begin] + 1, begin
        if count[num_samples] > num_cells:
            low = price
            continue
        high = price
        if count[num_samples] > found:
            found, end = count[num_samples], num_samples
            for cell in range(found - 1, -1, -1):
                ends[cell] = end
                end = begin_of[end]
    if not found:
        return ends[:0]
    while found < num_cells:
        widest_cell, gain, cut = -1, np.int64(-1), 0
        for cell in range(found):
            begin = ends[cell - 1] if cell else 0
            for middle in range(begin + 1, ends[cell]):
                saved = (cost[begin] - cost[middle]) * (ends[cell] - middle)
                if saved > gain:
                    widest_cell, gain, cut = cell, saved, middle
        for cell in range(found, widest_cell, -1):
            ends[cell] = ends[cell - 1]
        ends[widest_cell] = cut
        found += 1
    return ends
