"""Seconds of DDP steps on two processes, with the samplers of `sampler.py` in turns.

    python tests/benchmarks/sampler_clock.py --shapes FOLDER

A tiny Llama trains on texts of real lengths over sixteen. Batches are padded to their longest, or a batch's samples are
computed one by one, so that their costs add up. Every sampler computes the same 400 samples, an epoch of 25 steps: as
many as `group_by_length` sorts at once. Each sampler computes a step, then the next sampler does; ranks meet before and
after. Printed are seconds, torch's random batches = 1: by the clock; those for which the busiest rank of each step used
its core, which other work on the machine changes less; and as `sampler.py` predicts.
"""

import argparse
import os
import time
from contextlib import nullcontext
from itertools import chain, product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sampler import OURS, THEIRS, cost, read_lengths
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

NUM_RANKS, SHRINK, LONGEST = 2, 16, 512
# Tokens that take as long as a sample's launches, where samples are computed one by one (of the seconds of 16 to 512).
LAUNCHES = 15
# The tokens that attend as long as this model's matrices take, as `dflop.sample_costs` has it.
ATTENTION = 3328
NUM_STEPS, STEP_SIZE = 25, 16
LAYOUTS = [(8, 1), (4, 2), (2, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    lengths = np.clip(read_lengths(arguments.shapes) // SHRINK, 4, LONGEST)[: NUM_STEPS * STEP_SIZE]
    store = Path(f"/tmp/sampler_clock.{os.getpid()}")
    try:
        torch.multiprocessing.spawn(measure, (str(store), lengths), NUM_RANKS)
    finally:
        store.unlink(missing_ok=True)


def measure(rank: int, store: str, lengths: np.ndarray) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = DistributedDataParallel(LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)))
    for _ in range(2):  # the first step makes DDP's buckets
        train(model, lengths, [list(range(STEP_SIZE))], True)
    if rank == 0:
        print(f"| size x accumulation | batches | by | {' | '.join([*THEIRS, *OURS])} |")
    for (batch_size, accumulation), padded in product(LAYOUTS, (True, False)):
        seconds = epoch(model, rank, lengths, batch_size, accumulation, padded)
        if rank == 0:
            for by, values in zip(("clock", "core", "predicted"), seconds.T.tolist(), strict=True):
                cells = " | ".join(f"{value / values[0]:.3f}" for value in values)
                how = "padded" if padded else "add up"
                print(f"| {batch_size} x {accumulation} | {how} | {by} | {cells} |", flush=True)
    dist.destroy_process_group()


def epoch(
    model: torch.nn.Module, rank: int, lengths: np.ndarray, batch_size: int, accumulation: int, padded: bool
) -> torch.Tensor:
    """`[sampler, 3]`: seconds by the clock and on the core of the busiest rank of each step, and the predicted cost."""
    costs = lengths + lengths**2 / ATTENTION + (0 if padded else LAUNCHES)
    layout = (NUM_RANKS, batch_size, accumulation, NUM_STEPS * accumulation)
    samplers = [make(lengths, *layout) for make in THEIRS.values()]
    samplers += [make(costs, *layout, padded=padded, sync="step") for make in OURS.values()]
    for batches in samplers:
        assert sorted(np.concatenate([*chain(*batches)]).tolist()) == list(range(len(lengths)))
    seconds = torch.zeros(len(samplers), 3, dtype=torch.float64)
    seconds[:, 2] = torch.tensor([cost(costs, batches, accumulation, padded, "step") for batches in samplers])
    for step in range(NUM_STEPS):
        for place in range(len(samplers)):
            which = (place + step) % len(samplers)  # none always comes after the same one
            mine = samplers[which][rank][step * accumulation : (step + 1) * accumulation]
            dist.barrier()
            begin, begin_on_core = time.perf_counter(), time.thread_time()
            train(model, lengths, mine, padded)
            on_core = time.thread_time() - begin_on_core
            dist.barrier()
            busiest = torch.tensor([time.perf_counter() - begin, on_core], dtype=torch.float64)
            dist.all_reduce(busiest, dist.ReduceOp.MAX)
            seconds[which, :2] += busiest
    return seconds


def train(model: torch.nn.Module, lengths: np.ndarray, batches: list[list[int]], padded: bool) -> None:
    """Forward and backward of a step's batches, with one sync at its end."""
    for number, batch in enumerate(batches):
        own = lengths[batch]
        shapes = [(len(own), own.max())] if padded else [(1, length) for length in own]
        for place, shape in enumerate(shapes):
            last = number == len(batches) - 1 and place == len(shapes) - 1
            with nullcontext() if last else model.no_sync():
                ids = torch.ones(tuple(map(int, shape)), dtype=torch.long)
                model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()


if __name__ == "__main__":
    main()
