"""Seconds of steps on two processes, by DDP and FSDP2, with the samplers of `sampler.py` in turns.

    python tests/benchmarks/sampler_clock.py --shapes FOLDER [--draws 3]

A tiny Llama trains on texts of real lengths over sixteen. Batches are padded to their longest, or a batch's samples are
computed one by one, so that their costs add up. DDP syncs once a step, FSDP2 in each microbatch, and our samplers are
told so. Every sampler computes the same 400 samples, an epoch of 25 steps: as many as `group_by_length` sorts at once.
Each sampler computes a step, then the next sampler does; ranks meet before and after. A draw is 400 other samples.
Printed after each draw are seconds, torch's random batches = 1, as mean and standard deviation over the draws so far:
by the clock; those for which the busiest rank of each step (FSDP2: of each microbatch) used its core, which other work
on the machine changes less; and as `sampler.py` predicts. `results/benchmarks/sampler_clock.json` has each draw.
"""

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from itertools import chain, product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sampler import OURS, THEIRS, cost, read_lengths
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

NUM_RANKS, SHRINK, LONGEST = 2, 16, 512
# Tokens that take as long as a sample's launches, where samples are computed one by one (of the seconds of 16 to 512).
LAUNCHES = 58
# The tokens that attend as long as this model's matrices take, as `dflop.sample_costs` has it.
ATTENTION = 3328
NUM_STEPS, STEP_SIZE = 25, 16
# With one batch a step both sync once, so FSDP2 would repeat DDP's rows.
LAYOUTS = [("DDP", 8, 1), ("DDP", 4, 2), ("DDP", 2, 4), ("FSDP2", 4, 2), ("FSDP2", 2, 4)]
OUT = Path("results/benchmarks/sampler_clock.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--draws", type=int, default=3, help="how often 400 other samples are drawn")
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    lengths = np.clip(read_lengths(arguments.shapes) // SHRINK, 4, LONGEST)
    draws = lengths[: arguments.draws * NUM_STEPS * STEP_SIZE].reshape(arguments.draws, -1)
    store = Path(f"/tmp/sampler_clock.{os.getpid()}")
    try:
        torch.multiprocessing.spawn(measure, (str(store), draws), NUM_RANKS)
    finally:
        store.unlink(missing_ok=True)


def measure(rank: int, store: str, draws: np.ndarray) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    models = {"DDP": DistributedDataParallel(tiny_llama()), "FSDP2": sharded(tiny_llama())}
    for model in models.values():
        for _ in range(2):  # the first step makes DDP's buckets
            train(model, draws[0], [list(range(STEP_SIZE))], True)
    ratios = {}
    for lengths in draws:
        for (kind, *division), padded in product(LAYOUTS, (True, False)):
            seconds = epoch(models[kind], rank, lengths, *division, padded)
            for by, values in zip(("clock", "core", "predicted"), seconds.T, strict=True):
                row = kind, "{} x {}".format(*division), "padded" if padded else "add up", by
                ratios.setdefault(row, []).append((values / values[0]).tolist())
        if rank == 0:
            show(ratios)
    dist.destroy_process_group()


def tiny_llama() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    mesh = dist.init_device_mesh("cpu", (NUM_RANKS,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return model


def show(ratios: dict[tuple, list[list[float]]]) -> None:
    """The table of `ratios[row][draw][sampler]`."""
    names = [*THEIRS, *OURS]
    print(f"| | size x accumulation | batches | by | {' | '.join(names)} |\n|{'---|' * (4 + len(names))}")
    for row, values in ratios.items():
        mean, spread = np.mean(values, axis=0), np.std(values, axis=0, ddof=min(1, len(values) - 1))
        cells = [f"{value:.3f} ± {deviation:.3f}" for value, deviation in zip(mean, spread, strict=True)]
        print(f"| {' | '.join([*row, *cells])} |")
    print(flush=True)
    rows = [{"row": row, "of_draws": values} for row, values in ratios.items()]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"command": sys.argv, "samplers": names, "rows": rows}, indent=2) + "\n")


def epoch(
    model: torch.nn.Module, rank: int, lengths: np.ndarray, batch_size: int, accumulation: int, padded: bool
) -> torch.Tensor:
    """`[sampler, 3]`: seconds by the clock and on the core of the busiest rank, and the predicted cost."""
    costs = lengths + lengths**2 / ATTENTION + (0 if padded else LAUNCHES)
    sync = "step" if isinstance(model, DistributedDataParallel) else "microbatch"
    layout = (NUM_RANKS, batch_size, accumulation, NUM_STEPS * accumulation)
    samplers = [make(lengths, *layout) for make in THEIRS.values()]
    samplers += [make(costs, *layout, padded=padded, sync=sync) for make in OURS.values()]
    for batches in samplers:
        assert sorted(np.concatenate([*chain(*batches)]).tolist()) == list(range(len(lengths)))
    seconds = torch.zeros(len(samplers), 3, dtype=torch.float64)
    seconds[:, 2] = torch.tensor([cost(costs, batches, accumulation, padded, sync) for batches in samplers])
    for step in range(NUM_STEPS):
        for place in range(len(samplers)):
            which = (place + step) % len(samplers)  # none always comes after the same one
            mine = samplers[which][rank][step * accumulation : (step + 1) * accumulation]
            dist.barrier()
            begin = time.perf_counter()
            on_core = train(model, lengths, mine, padded)
            dist.barrier()
            between_syncs = on_core if sync == "microbatch" else [sum(on_core)]
            busiest = torch.tensor([time.perf_counter() - begin, *between_syncs], dtype=torch.float64)
            dist.all_reduce(busiest, dist.ReduceOp.MAX)
            seconds[which, :2] += torch.stack([busiest[0], busiest[1:].sum()])
    return seconds


def train(model: torch.nn.Module, lengths: np.ndarray, batches: list[list[int]], padded: bool) -> list[float]:
    """Forward and backward of a step's batches: DDP syncs at the end, FSDP2 after each batch. Core seconds of each."""
    on_core = []
    for number, batch in enumerate(batches):
        own, begin = lengths[batch], time.thread_time()
        shapes = [(len(own), own.max())] if padded else [(1, length) for length in own]
        for place, shape in enumerate(shapes):
            ids = torch.ones(tuple(map(int, shape)), dtype=torch.long)
            with syncing(model, place == len(shapes) - 1, number == len(batches) - 1):
                model(input_ids=ids, labels=ids).loss.backward()
        on_core.append(time.thread_time() - begin)
    model.zero_grad()
    return on_core


def syncing(model: torch.nn.Module, ends_batch: bool, ends_step: bool):
    """The context of a pass, after which gradients are synced where it ends what the model syncs by."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if ends_batch and ends_step else model.no_sync()
    model.set_requires_gradient_sync(ends_batch)
    model.set_reshard_after_backward(ends_batch)
    return nullcontext()


if __name__ == "__main__":
    main()
