"""How evenly batch samplers load the ranks on real lengths, and what a step of the balanced one costs.

    python tests/benchmarks/sampler.py [--shapes FOLDER] [--steps 50]

FOLDER holds tables (CSV) with the columns `text_tokens_qwen25` and `ov_visual_tokens`, whose sum is a sample's length;
without it only the time is measured, on drawn lengths. Compared are torch's DistributedSampler, the two samplers of the
Hugging Face Trainer that look at lengths (`group_by_length`, and `batch_rebalance`, which levels a quadratic cost of
padded batches instead) and BalancedBatchSampler in all its ways. A table is printed and
`results/benchmarks/sampler.json` written.
"""

import argparse
import json
import platform
import sys
import time
from functools import partial
from itertools import islice, product
from pathlib import Path

import numpy as np
import polars as pl
import psutil
import torch
from torch.utils.data import BatchSampler, DistributedSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from dflop import BalancedBatchSampler
from dflop.balance import balanced_cells

# Ranks, batch size and accumulation steps; samples and cells.
LAYOUTS = [(16, 8, 1), (16, 2, 4), (8, 1, 8)]
TIMED = [(128, 16), (512, 64), (8192, 1024)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, help="a folder of tables of real shapes")
    parser.add_argument("--steps", type=int, default=50, help="the most steps of an epoch that are looked at")
    arguments = parser.parse_args()
    lengths = read_lengths(arguments.shapes) if arguments.shapes else None
    figures = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
        "imbalance": [] if lengths is None else measure_imbalance(lengths, arguments.steps),
        "time": measure_time(np.random.default_rng(0).lognormal(6, 1, 100_000) if lengths is None else lengths),
    }
    print(f"{figures['machine']}: {figures['command']}\n")
    if lengths is None:
        print("imbalance: left out, no --shapes\n")
    else:
        print(f"{len(lengths)} lengths, mean {lengths.mean():.0f}, largest {lengths.max():.0f}\n")
        print_imbalance(figures["imbalance"])
    for row in figures["time"]:
        print(f"{row['num_samples']:>5} samples to {row['num_cells']:>4} cells: {row['ms']:8.2f} ms a step")
    out = Path("results/benchmarks/sampler.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")


def read_lengths(folder: Path) -> np.ndarray:
    """`[num_samples]`, of all tables that have both columns."""
    columns = ["text_tokens_qwen25", "ov_visual_tokens"]
    tables = [pl.read_csv(path, columns=columns).sum_horizontal() for path in sorted(folder.glob("*.csv"))]
    if not tables:
        sys.exit(f"no .csv in {folder}")
    return np.concatenate([table.to_numpy() for table in tables]).astype(np.int64)


def measure_imbalance(lengths: np.ndarray, num_steps: int) -> list[dict]:
    rows = []
    for num_replicas, batch_size, accumulation in LAYOUTS:
        most = num_steps * accumulation
        samplers = {
            "torch": torch_batches,
            "hf group_by_length": grouped_batches,
            "hf batch_rebalance": rebalanced_batches,
        }
        for padded, sync in product((False, True), ("microbatch", "step")):
            name = f"{'padded' if padded else 'added up'}, {sync}"
            samplers[name] = partial(balanced_batches, padded=padded, sync=sync)
        torch_cost = None
        for name, make in samplers.items():
            batches = make(lengths, num_replicas, batch_size, accumulation, most)
            row = {"ranks": num_replicas, "batch_size": batch_size, "accumulation": accumulation, "sampler": name}
            row |= imbalance(lengths, batches, accumulation)
            torch_cost = torch_cost or {key: cost for key, cost in row.items() if key.endswith("_cost")}
            row |= {f"{key}_to_torch": row[key] / cost for key, cost in torch_cost.items()}
            rows.append(row)
    return rows


def imbalance(lengths: np.ndarray, batches: list[list[list[int]]], accumulation: int) -> dict[str, float]:
    """Of `batches[rank][number]`: largest rank over mean rank, a mean over steps; and a sample's cost with waiting.

    Both where ranks wait for each other in each microbatch, and where they do once a step.
    """
    num_batches = len(batches[0]) // accumulation * accumulation
    found = {}
    for kind in ("sum", "padded"):
        loads = np.array(
            [
                [
                    lengths[batch].sum() if kind == "sum" else lengths[batch].max() * len(batch)
                    for batch in own[:num_batches]
                ]
                for own in batches
            ],
            dtype=np.float64,
        ).reshape(len(batches), -1, accumulation)
        mean = loads.sum(axis=2).mean(axis=0)
        num_samples = sum(len(batch) for own in batches for batch in own[:num_batches])
        waited = {"microbatch": loads.max(axis=0).sum(axis=1), "step": loads.sum(axis=2).max(axis=0)}
        for sync, cost in waited.items():
            found[f"{kind}_{sync}"] = float((cost / mean).mean())
            found[f"{kind}_{sync}_cost"] = float(cost.sum() / num_samples)
    return found


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


def rebalanced_batches(lengths, num_replicas, batch_size, accumulation, most):
    size = num_replicas * batch_size * accumulation
    options = {"effective_batch_size": size, "dp_size": num_replicas, "grad_accum": accumulation, "seed": 0}
    samplers = [BatchRebalanceSampler(lengths.tolist(), rank=rank, **options) for rank in range(num_replicas)]
    return [list(islice(sampler, most)) for sampler in samplers]


def balanced_batches(lengths, num_replicas, batch_size, accumulation, most, padded, sync):
    options = {"num_accumulation_steps": accumulation, "drop_last": True, "padded": padded, "sync": sync}
    samplers = [
        BalancedBatchSampler(lengths, batch_size, num_replicas, rank, **options) for rank in range(num_replicas)
    ]
    return [list(islice(sampler, most)) for sampler in samplers]


def print_imbalance(rows: list[dict]) -> None:
    print(
        "Cost of a sample with all waiting, torch = 1, and in brackets the largest rank over the mean one. Lengths are"
    )
    print("added up, or batches padded to their longest; ranks wait in each microbatch (FSDP) or once a step (DDP with")
    print("no_sync). A balanced sampler is meant for the column of its name.\n")
    columns = {f"{kind}_{sync}": f"{kind}, {sync}" for kind in ("sum", "padded") for sync in ("microbatch", "step")}
    print(f"{'ranks x size x accum':>20}  {'sampler':<22}" + "".join(f"{title:>20}" for title in columns.values()))
    for row in rows:
        layout = f"{row['ranks']} x {row['batch_size']} x {row['accumulation']}"
        cells = [f"{row[f'{key}_cost_to_torch']:.2f} ({row[key]:.3f})" for key in columns]
        print(f"{layout:>20}  {row['sampler']:<22}" + "".join(f"{cell:>20}" for cell in cells))
    print()


def measure_time(lengths: np.ndarray) -> list[dict]:
    """Milliseconds a step of one core's time, the median over ten global batches, after compiling."""
    rows = []
    for num_samples, num_cells in TIMED:
        draw, seconds = np.random.default_rng(0), []
        for _ in range(11):
            costs = draw.choice(lengths, num_samples)[:, None]
            begin = time.thread_time()
            balanced_cells(costs, num_cells, num_samples // num_cells)
            seconds.append(time.thread_time() - begin)
        rows.append({"num_samples": num_samples, "num_cells": num_cells, "ms": 1e3 * float(np.median(seconds[1:]))})
    return rows


if __name__ == "__main__":
    main()
