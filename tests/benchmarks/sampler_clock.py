"""Seconds of DDP steps on two processes, with the samplers of `sampler.py` in turns.

    python tests/benchmarks/sampler_clock.py --shapes FOLDER [--steps 13]

A tiny Llama trains on texts of real lengths over sixteen. Batches are padded to their longest, or a batch's samples are
computed one by one, so that their costs add up. Each sampler computes a step, then the next sampler does; ranks meet
before and after. Of samplers that sort by length, steps lie at unlike places in what is sorted at once. Printed are
seconds a token, torch's random batches = 1: by the clock; those for which the busiest rank of each step used its core,
which other work on the machine changes less; and as `sampler.py` predicts.
"""

import argparse
import os
import time
from contextlib import nullcontext
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
# Steps between those that are computed: no divisor of the 25 that are sorted at once.
STRIDE = 27
LAYOUTS = [(8, 1), (4, 2), (2, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--steps", type=int, default=13)
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    lengths = np.clip(read_lengths(arguments.shapes) // SHRINK, 4, LONGEST)
    store = Path(f"/tmp/sampler_clock.{os.getpid()}")
    try:
        torch.multiprocessing.spawn(measure, (str(store), lengths, arguments.steps), NUM_RANKS)
    finally:
        store.unlink(missing_ok=True)


def measure(rank: int, store: str, lengths: np.ndarray, num_steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = DistributedDataParallel(LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)))
    if rank == 0:
        print(f"| size x accumulation | batches | by | {' | '.join([*THEIRS, *OURS])} |")
    for batch_size, accumulation in LAYOUTS:
        for padded in (True, False):
            layout = (lengths, NUM_RANKS, batch_size, accumulation, num_steps * STRIDE * accumulation)
            batches = {name: make(*layout) for name, make in THEIRS.items()}
            costs = lengths if padded else lengths + lengths**2 / ATTENTION + LAUNCHES
            batches |= {name: make(costs, *layout[1:], padded=padded, sync="step") for name, make in OURS.items()}
            batches = {name: [taken(own, accumulation) for own in some] for name, some in batches.items()}
            seconds = {name: torch.zeros(2, dtype=torch.float64) for name in batches}
            for step in range(num_steps):
                for name, some in batches.items():
                    mine = some[rank][step * accumulation : (step + 1) * accumulation]
                    dist.barrier()
                    begin, begin_on_core = time.perf_counter(), time.thread_time()
                    train(model, lengths, mine, padded)
                    on_core = time.thread_time() - begin_on_core
                    dist.barrier()
                    busiest = torch.tensor([time.perf_counter() - begin, on_core], dtype=torch.float64)
                    dist.all_reduce(busiest, dist.ReduceOp.MAX)
                    if step:  # the first one makes DDP's buckets
                        seconds[name] += busiest
            if rank == 0:
                rows = {"clock": [], "core": [], "predicted": []}
                for name, some in batches.items():
                    counted = [own[accumulation:] for own in some]
                    tokens = sum(costs[batch].sum() for own in counted for batch in own)
                    predicted = cost(costs, counted, accumulation, padded, "step")
                    for by, value in zip(rows, (*(seconds[name] / tokens).tolist(), predicted), strict=True):
                        rows[by].append(value)
                for by, values in rows.items():
                    cells = " | ".join(f"{value / values[0]:.3f}" for value in values)
                    how = "padded" if padded else "add up"
                    print(f"| {batch_size} x {accumulation} | {how} | {by} | {cells} |", flush=True)
    dist.destroy_process_group()


def taken(batches: list, accumulation: int) -> list:
    """The batches of every so many-th step."""
    return [batch for number, batch in enumerate(batches) if number // accumulation % STRIDE == 0]


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
