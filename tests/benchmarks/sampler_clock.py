"""Seconds of DDP steps on two processes, with the samplers of `sampler.py` in turns.

    python tests/benchmarks/sampler_clock.py --shapes FOLDER [--steps 20]

A tiny Llama trains on texts of real lengths over eight. Batches are padded to their longest, or a batch's samples are
computed one by one, so that their costs add up. Each sampler computes its next step, then the next sampler does; ranks
meet before and after. Printed are seconds a sample, torch's random batches = 1.
"""

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sampler import THEIRS, balanced_batches, read_lengths
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

NUM_RANKS, SHRINK, LONGEST = 2, 8, 1024
LAYOUTS = [(8, 1), (4, 2), (2, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--steps", type=int, default=20)
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
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = DistributedDataParallel(LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)))
    if rank == 0:
        print(f"| size x accumulation | batches | {' | '.join([*THEIRS, 'ours, equal sizes', 'ours'])} |")
    for batch_size, accumulation in LAYOUTS:
        for padded in (True, False):
            layout = (lengths, NUM_RANKS, batch_size, accumulation, num_steps * accumulation)
            batches = {name: make(*layout)[rank] for name, make in THEIRS.items()}
            for name, equal_sizes in (("ours, equal sizes", True), ("ours", False)):
                ours = balanced_batches(*layout, padded=padded, sync="step", equal_sizes=equal_sizes)
                batches[name] = ours[rank]
            seconds, samples = dict.fromkeys(batches, 0.0), dict.fromkeys(batches, 0)
            for step in range(num_steps):
                for name, some in batches.items():
                    mine = some[step * accumulation : (step + 1) * accumulation]
                    dist.barrier()
                    begin = time.perf_counter()
                    train(model, lengths, mine, padded)
                    dist.barrier()
                    if step:  # the first one makes DDP's buckets
                        seconds[name] += time.perf_counter() - begin
                        samples[name] += sum(map(len, mine))
            count = torch.tensor(list(samples.values()))
            dist.all_reduce(count)
            each = np.array(list(seconds.values())) / count.numpy()
            if rank == 0:
                cells = " | ".join(f"{value:.3f}" for value in each / each[0])
                print(f"| {batch_size} x {accumulation} | {'padded' if padded else 'add up'} | {cells} |", flush=True)
    dist.destroy_process_group()


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
