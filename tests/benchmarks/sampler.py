"""How evenly batch samplers load the ranks on real lengths, and what a step of ours costs.

    python tests/benchmarks/sampler.py [--shapes FOLDER] [--steps 30] [--draws 3]

FOLDER holds tables (CSV) with the columns `text_tokens_qwen25` and `ov_visual_tokens`, whose sum is a sample's length;
without it only the time is measured, on drawn lengths. Compared are torch's DistributedSampler, the two samplers of the
Hugging Face Trainer that look at lengths (`group_by_length`, and `batch_rebalance` with its own quadratic cost and with
a linear one) and BalancedBatchSampler, at last with steps of like samples, out of as many as `group_by_length` sorts. A
batch costs its lengths' sum, or, padded, its longest times their number. Every layout computes as many samples as 64
ranks do in `--steps`; a draw is another shuffle of the lengths.

No sampler is below the bound: nothing is padded, and no rank waits. None that leaves every step its samples is below
the bound of these steps. Padded, it is the least that any dealing takes, where a rank has one batch or there are two
ranks; else it knows the least padding in as many batches, and the dearest sample.
A table is printed and `results/benchmarks/sampler.json` written.
"""

import argparse
import json
import platform
import sys
import time
from bisect import bisect_left
from functools import cache, partial
from itertools import combinations, islice, product
from pathlib import Path
from typing import get_args

import numpy as np
import polars as pl
import psutil
import torch
from torch.utils.data import BatchSampler, DistributedSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from dflop import BalancedBatchSampler
from dflop.balance.replicas import Sync, balanced_cells
from dflop.balance.unequal import unequal_cells

# Ranks, batch size and accumulation steps.
LAYOUTS = [(ranks, size, steps) for ranks in (2, 16, 64) for size, steps in ((8, 1), (4, 2), (2, 4))]
TIMED = {
    128: [(16, 8, 1), (16, 4, 2)],
    512: [(64, 8, 1), (64, 2, 4), (1, 4, 128)],
    8192: [(1024, 8, 1), (1024, 4, 2), (256, 8, 4), (64, 8, 16)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, help="a folder of tables of real shapes")
    parser.add_argument("--steps", type=int, default=30, help="steps of 64 ranks that are looked at")
    parser.add_argument("--draws", type=int, default=3, help="how often the lengths are shuffled, at least twice")
    arguments = parser.parse_args()
    lengths = read_lengths(arguments.shapes) if arguments.shapes else None
    figures = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
        "imbalance": [] if lengths is None else measure_imbalance(lengths, arguments.steps, arguments.draws),
        "time": measure_time(np.random.default_rng(0).lognormal(6, 1, 100_000) if lengths is None else lengths),
    }
    print(f"{figures['machine']}: {figures['command']}\n")
    if lengths is None:
        print("imbalance: left out, no --shapes\n")
    else:
        print(f"{len(lengths)} lengths, mean {lengths.mean():.0f}, largest {lengths.max():.0f}\n")
        print_imbalance(figures["imbalance"])
    for row in figures["time"]:
        print(f"{row['num_samples']:>5} samples: {row['least_ms']:.1f} to {row['most_ms']:.0f} ms a step")
    out = Path("results/benchmarks/sampler.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")


def read_lengths(folder: Path) -> np.ndarray:
    """`[num_samples]`, of all tables that have both columns."""
    columns = ["text_tokens_qwen25", "ov_visual_tokens"]
    tables = [pl.read_csv(path, columns=columns).sum_horizontal() for path in sorted(folder.glob("*.csv"))]
    if not tables:
        sys.exit(f"no .csv in {folder}")
    # Tables are of one kind of sample each, and a run mixes them.
    return np.random.default_rng(0).permutation(np.concatenate([table.to_numpy() for table in tables]).astype(np.int64))


def measure_imbalance(lengths: np.ndarray, num_steps: int, num_draws: int) -> list[dict]:
    shuffles = [np.random.default_rng(draw).permutation(lengths) for draw in range(num_draws)]
    rows = []
    for num_replicas, batch_size, accumulation in LAYOUTS:
        most = num_steps * max(LAYOUTS)[0] // num_replicas * accumulation
        draws = []
        for shuffled in shuffles:
            layout = (shuffled, num_replicas, batch_size, accumulation, most)
            theirs = {name: make(*layout) for name, make in THEIRS.items()}
            draws.append([ratios(layout, theirs, *how) for how in product((False, True), get_args(Sync))])
        for (padded, sync), *of_draws in zip(product((False, True), get_args(Sync)), *draws, strict=True):
            row = {"ranks": num_replicas, "batch_size": batch_size, "accumulation": accumulation}
            row |= {"padded": padded, "sync": sync}
            rows.append(row | {name: [draw[name] for draw in of_draws] for name in of_draws[0]})
    return rows


def ratios(layout: tuple, theirs: dict[str, list], padded: bool, sync: str) -> dict[str, float]:
    """Of each sampler and bound: the cost of a token with all waiting, torch's random batches = 1."""
    lengths, num_replicas, batch_size, accumulation, most = layout
    batches = theirs | {name: make(*layout, padded=padded, sync=sync) for name, make in OURS.items()}
    costs = {name: cost(lengths, some, accumulation, padded, sync) for name, some in batches.items()}
    own = np.array(batches["torch"])[:, : most // accumulation * accumulation]
    steps = (
        own.reshape(num_replicas, -1, accumulation * batch_size).swapaxes(0, 1).reshape(-1, own[:, :accumulation].size)
    )
    least = sum(least_cost(lengths[step], num_replicas, accumulation, padded, sync) for step in steps)
    costs |= {"bound of these steps": least / lengths[steps].sum(), "bound": 1 / num_replicas}
    return {name: value / costs["torch"] for name, value in costs.items()}


def least_cost(lengths: np.ndarray, num_replicas: int, accumulation: int, padded: bool, sync: str) -> float:
    """No dealing of these samples takes less, in tokens of a rank's time."""
    ordered = -np.sort(-lengths)
    if not padded:
        return max(ordered[0], ordered.sum() / num_replicas)
    if accumulation == 1:
        # Each batch takes as many of the longest that are left as a limit allows: the least limit that takes all.
        return 1 + bisect_left(
            range(1, len(ordered) * ordered[0]), True, key=lambda most: fits(ordered, num_replicas, most)
        )
    if num_replicas == 2:
        return least_of_two(ordered, accumulation, sync)
    return max(ordered[0], least_padded(ordered, num_replicas * accumulation) / num_replicas)


def fits(ordered: np.ndarray, num_batches: int, most: int) -> bool:
    taken = 0
    for _ in range(num_batches):
        if taken < len(ordered):
            taken += int(most // ordered[taken])
    return taken >= len(ordered)


def least_of_two(ordered: np.ndarray, accumulation: int, sync: str) -> float:
    """Of two ranks: all cuts into batches, runs of `ordered`, and all ways to deal these."""
    ends = all_ends(len(ordered), 2 * accumulation)
    begins = np.pad(ends[:, :-1], ((0, 0), (1, 0)))
    loads = ordered[begins] * (ends - begins)
    if sync == "microbatch":
        return np.sort(loads)[:, 1::2].sum(axis=1).min()
    firsts = (loads[:, chosen].sum(axis=1) for chosen in combinations(range(2 * accumulation), accumulation))
    return min(np.maximum(first, loads.sum(axis=1) - first).min() for first in firsts)


@cache
def all_ends(num_samples: int, num_batches: int) -> np.ndarray:
    """`[cut, batch]`."""
    inner = np.array(list(combinations(range(1, num_samples), num_batches - 1)))
    return np.pad(inner, ((0, 0), (0, 1)), constant_values=num_samples)


def least_padded(ordered: np.ndarray, num_batches: int) -> float:
    """The least sum of padded batches: runs of `ordered`, longest first, none empty."""
    end = np.arange(len(ordered) + 1)
    # `[begin, end]`: a run's cost.
    runs = np.where(end > end[:-1, None], ordered[:, None] * (end - end[:-1, None]), np.inf)
    least = np.where(end == 0, 0, np.inf)
    for _ in range(num_batches):
        least = (least[:-1, None] + runs).min(axis=0)
    return float(least[-1])


def cost(lengths: np.ndarray, batches: list[list[list[int]]], accumulation: int, padded: bool, sync: str) -> float:
    """Of `batches[rank][number]`: what a token costs with all waiting, in tokens of a rank's time."""
    num_batches = len(batches[0]) // accumulation * accumulation
    loads = np.array(
        [
            [len(batch) * lengths[batch].max() if padded else lengths[batch].sum() for batch in own[:num_batches]]
            for own in batches
        ],
        dtype=np.float64,
    ).reshape(len(batches), -1, accumulation)
    waited = loads.max(axis=0).sum() if sync == "microbatch" else loads.sum(axis=2).max(axis=0).sum()
    return float(waited / sum(lengths[batch].sum() for own in batches for batch in own[:num_batches]))


def torch_batches(lengths, num_replicas, batch_size, accumulation, most):
    samplers = [DistributedSampler(lengths, num_replicas, rank, drop_last=True) for rank in range(num_replicas)]
    return [list(islice(BatchSampler(sampler, batch_size, True), most)) for sampler in samplers]


def grouped_batches(lengths, num_replicas, batch_size, accumulation, most):
    """As the Trainer has it: batches are cut from one order, and rank r takes every num_replicas-th."""
    generator = torch.Generator().manual_seed(0)
    sampler = LengthGroupedSampler(batch_size * accumulation, lengths=lengths.tolist(), generator=generator)
    batches = list(islice(BatchSampler(sampler, batch_size, True), most * num_replicas))
    whole = len(batches) // num_replicas * num_replicas
    return [batches[rank:whole:num_replicas] for rank in range(num_replicas)]


def rebalanced_batches(lengths, num_replicas, batch_size, accumulation, most, quadratic=None):
    """Each rank works out the batches of all; here one does, and hands them to the others."""
    sampler = BatchRebalanceSampler(
        lengths.tolist(), num_replicas * batch_size * accumulation, num_replicas, accumulation
    )
    if quadratic is not None:
        sampler.QUADRATIC_COST_COEF = quadratic
    steps = []
    sampler._yield_global_batch = lambda indices: [steps.append(sampler._assign(indices, lengths[indices].tolist()))]
    all(zip(range(most // accumulation), sampler, strict=False))
    return [[batch for step in steps for batch in step[rank]] for rank in range(num_replicas)]


def balanced_batches(
    lengths, num_replicas, batch_size, accumulation, most, *, equal_sizes=False, groups=False, **options
):
    """Each rank works out the batches of all; here one does, and hands them to the others."""
    sampler = BalancedBatchSampler(
        lengths,
        batch_size,
        num_replicas,
        0,
        num_accumulation_steps=accumulation,
        drop_last=True,
        megabatch_steps=max(1, round(50 / num_replicas)) if groups else 1,
        **options,
    )
    order, cells_of = sampler._order(), balanced_cells if equal_sizes else unequal_cells
    batches = [[] for _ in range(num_replicas)]
    for step in range(min(most, len(sampler)) // accumulation):
        samples = sampler._samples_of(step, order)
        cell = cells_of(lengths[samples][:, None], num_replicas, batch_size, **options)
        for number in range(num_replicas * accumulation):
            batches[number % num_replicas].append(samples[cell == number])
    return batches


THEIRS = {
    "torch": torch_batches,
    "group_by_length": grouped_batches,
    "batch_rebalance": rebalanced_batches,
    "its linear cost": partial(rebalanced_batches, quadratic=0.0),
}
OURS = {
    "ours, equal sizes": partial(balanced_batches, equal_sizes=True),
    "ours": balanced_batches,
    "ours, like steps": partial(balanced_batches, groups=True),
}


def print_imbalance(rows: list[dict]) -> None:
    print("Cost of a token with all waiting, torch's random batches = 1: mean and standard deviation over draws.\n")
    names = [*THEIRS, *OURS, "bound of these steps", "bound"]
    print(f"| ranks x size x accumulation | batches | ranks wait | {' | '.join(names)} |")
    print("|---|---|---|" + "---|" * len(names))
    for row in rows:
        layout = f"{row['ranks']} x {row['batch_size']} x {row['accumulation']}"
        waits = "each microbatch" if row["sync"] == "microbatch" else "once a step"
        cells = " | ".join(f"{np.mean(row[name]):.3f} ± {np.std(row[name], ddof=1):.3f}" for name in names)
        print(f"| {layout} | {'padded' if row['padded'] else 'add up'} | {waits} | {cells} |")
    print()


def measure_time(lengths: np.ndarray) -> list[dict]:
    """Milliseconds of one core's time a step, the least and the most over layouts, batches and ways to wait: of each
    the median over three global batches, after compiling."""
    rows = []
    for num_samples, layouts in TIMED.items():
        found = []
        for (num_replicas, batch_size, _), padded, sync in product(layouts, (False, True), get_args(Sync)):
            draw, seconds = np.random.default_rng(0), []
            for _ in range(4):
                costs = draw.choice(lengths, num_samples)[:, None]
                begin = time.thread_time()
                unequal_cells(costs, num_replicas, batch_size, padded=padded, sync=sync)
                seconds.append(time.thread_time() - begin)
            found.append(1e3 * float(np.median(seconds[1:])))
        rows.append({"num_samples": num_samples, "least_ms": min(found), "most_ms": max(found)})
    return rows


if __name__ == "__main__":
    main()
