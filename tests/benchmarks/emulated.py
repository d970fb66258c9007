"""The real runtime on a cluster that is not there: ranks sleep as long as their stages would compute.

    python tests/benchmarks/emulated.py --shapes FOLDER [--steps 50] [--step-s 0.5] [--only NAME]

Of each plan, as many processes as it has ranks carry out the instruction lists of training over gloo: the same
schedules, messages, hand-overs and gradient syncs, with tensors of one number a token or item, and stages that sleep
for their predicted time. What a simulation leaves out is then in the step: the order as it is carried out, waiting,
and the time that messages and the program itself take. Samples and costs are those of `scheduler.py`'s mix (a 7B on
H100s); all seconds are multiplied so that the mean step takes `--step-s`. Printed is the median of emulated over
simulated steps, for our policy and for random groups; `results/benchmarks/emulated.json` has every step.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scheduler
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dflop.config import ClusterConfig, ModelConfig, ScheduleConfig
from dflop.data import SampleShapes
from dflop.models import load_model_spec
from dflop.parallelism import Grid, Plan
from dflop.pipeline import Program, StepInstructions, check_program, make_program
from dflop.pipeline.run import run_instructions
from dflop.pricing import WEIGHT_SHARE, Pricer
from dflop.scheduling import BatchScheduler, GlobalBatches, StepSchedule
from dflop.training.feed import samples_of
from dflop.training.topology import place_in_world

BATCH_SIZE = 64
POLICIES = ("search", "random")
# Nothing is held here, so memory is no limit.
CLUSTER = ClusterConfig(devices_per_node=8, memory_gib=1e6, intra_node_gbps=3600.0, inter_node_gbps=400.0)
# Steps that are not counted: processes load code in their first.
NUM_WARMUP = 3
EIGHT = {"num_ranks": 8, "pp": 4}


def disjoint(**more) -> Plan:
    grids = (Grid(module="vision", num_ranks=4), Grid(module="llm", num_ranks=4, pp=4, rank_offset=4))
    return Plan(placement="disjoint", grids=grids, num_microbatches=8, **more)


def shared(placement: str, **more) -> Plan:
    encoder_ranks = 2 if placement == "monolithic" else 8
    grids = (Grid(module="vision", num_ranks=encoder_ranks), Grid(module="llm", **EIGHT))
    return Plan(placement=placement, grids=grids, num_microbatches=8, **more)


PLANS = {
    "disjoint, 1f1b": disjoint(),
    "disjoint, zb_h1": disjoint(schedule="zb_h1"),
    "disjoint, interleaved": disjoint(schedule="interleaved_1f1b", num_chunks=2),
    "colocated, 1f1b": shared("colocated"),
    "colocated, zb_h1": shared("colocated", schedule="zb_h1"),
    "colocated, interleaved": shared("colocated", schedule="interleaved_1f1b", num_chunks=2),
    "bubble-filled, 1f1b": shared("bubble_filled"),
    "monolithic, 1f1b": shared("monolithic"),
}


@dataclass
class EmulatedWork:
    """A node whose stage sleeps. Tensors have one number for each token, or for each item inside an encoder."""

    program: Program
    index: int
    sync_s: float
    replicas: dist.ProcessGroup
    scale: float

    def begin_step(self, schedule: StepSchedule) -> None:
        self.schedule = schedule

    def edge_shape(self, microbatch: int, edge: int) -> tuple[int, ...] | None:
        ends = self.program.edges[edge]
        source, target = self.program.nodes[ends.source], self.program.nodes[ends.target]
        chosen = samples_of(self.schedule, source, microbatch)
        if source.module == target.module:
            sizes = self.schedule.llm_tokens if source.module == "llm" else self.schedule.num_items[:, 0]
        else:
            chosen &= self.schedule.llm_dp_rank == target.dp_rank
            sizes = self.schedule.kept_tokens[:, self.schedule.encoders.index(source.module)]
        size = int(sizes[chosen].sum())
        return (size, 1) if size else None

    def prepare(self, microbatch: int) -> None: ...

    def forward(self, microbatch: int, received: dict) -> dict[int, torch.Tensor]:
        self._sleep(self.schedule.forward_s[self.index, microbatch])
        return self._tensors(microbatch, forward=True)

    def backward(self, microbatch: int, received: dict) -> dict[int, torch.Tensor]:
        self._sleep(self.schedule.backward_s[self.index, microbatch])
        return self._tensors(microbatch, forward=False)

    def backward_input(self, microbatch: int, received: dict) -> dict[int, torch.Tensor]:
        self._sleep(self.schedule.backward_s[self.index, microbatch] * (1 - WEIGHT_SHARE))
        return self._tensors(microbatch, forward=False)

    def backward_weight(self, microbatch: int) -> None:
        self._sleep(self.schedule.backward_s[self.index, microbatch] * WEIGHT_SHARE)

    def sync_gradients(self) -> None:
        dist.barrier(self.replicas)
        self._sleep(self.sync_s)

    def _tensors(self, microbatch: int, *, forward: bool) -> dict[int, torch.Tensor]:
        tensors = {}
        for number, edge in enumerate(self.program.edges):
            if (edge.source if forward else edge.target) != self.index:
                continue
            if (shape := self.edge_shape(microbatch, number)) is not None:
                tensors[number] = torch.zeros(shape)
        return tensors

    def _sleep(self, seconds: float) -> None:
        # As exactly as the system can: an early wake is made up for by a later look at the clock.
        until = time.monotonic() + float(seconds) * self.scale
        while (left := until - time.monotonic()) > 0:
            time.sleep(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--step-s", type=float, default=0.5, help="what the mean step shall take")
    parser.add_argument("--only", default="", help="plans whose name has this in it")
    arguments = parser.parse_args()
    spec = load_model_spec(ModelConfig(family="llava_onevision", preset="llava_ov_7b"))
    costs, samples = scheduler.analytic_costs(spec), scheduler.draw_mix(arguments.shapes, scheduler.MIXES["13/43/44"])
    print(f"{platform.machine()}, {os.cpu_count()} cores: python {' '.join(sys.argv)}\n", flush=True)
    rows = []
    for name, plan in PLANS.items():
        for policy in POLICIES if arguments.only in name else ():
            steps = emulate(plan, policy, Pricer(plan, costs, spec, CLUSTER), samples, arguments)
            ratios = [emulated / simulated for emulated, simulated in steps]
            print(
                f"{name:<24} {policy:<8} {plan.world_size} ranks   emulated over simulated: median "
                f"{statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}",
                flush=True,
            )
            rows.append({"plan": name, "policy": policy, "emulated_and_simulated_s": steps})
    out = Path("results/benchmarks/emulated.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"command": " ".join(sys.argv), "rows": rows}, indent=2) + "\n")


def emulate(
    plan: Plan, policy: str, pricer: Pricer, samples: SampleShapes, arguments: argparse.Namespace
) -> list[tuple[float, float]]:
    """Emulated and simulated seconds of each step that counts."""
    num_steps = NUM_WARMUP + arguments.steps
    batches = GlobalBatches(len(samples), BATCH_SIZE, 0)
    with (
        tempfile.TemporaryDirectory() as name,
        BatchScheduler(samples, pricer, batches, ScheduleConfig(policy=policy), 0).open() as own,
    ):
        folder = Path(name)
        schedules = [own.schedule(step) for step in range(num_steps)]
        for step, schedule in enumerate(schedules):
            (folder / str(step)).write_bytes(schedule.to_bytes())
        scale = arguments.step_s / statistics.fmean(schedule.step_s for schedule in schedules)
        sync_s = pricer.stage_times(schedules[0].shapes, schedules[0].assignment).sync_s
        mp.spawn(_run_rank, (plan, folder, num_steps, sync_s, scale), nprocs=plan.world_size)
        seconds = json.loads((folder / "seconds.json").read_text())
    pairs = zip(seconds, (scale * schedule.step_s for schedule in schedules), strict=True)
    return list(pairs)[NUM_WARMUP:]


def _run_rank(rank: int, plan: Plan, folder: Path, num_steps: int, sync_s: np.ndarray, scale: float) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), plan.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.world_size)
    program = make_program(plan)
    check_program(plan, program)
    topology = place_in_world(program, torch.device("cpu"), torch.float32, dist.HashStore())
    instructions = StepInstructions(plan, program, (), topology.rank)
    works = {
        index: EmulatedWork(program, index, float(sync_s[index]), topology.replicas[index], scale)
        for index in topology.nodes
    }
    schedules = [StepSchedule.from_bytes((folder / str(step)).read_bytes()) for step in range(num_steps)]
    seconds = []
    gc.collect()
    gc.disable()  # as the trainer has it
    for schedule in schedules:
        for work in works.values():
            work.begin_step(schedule)
        dist.barrier()
        started = time.monotonic()
        run_instructions(instructions.of(schedule.slots), works, topology.links)
        dist.barrier()
        seconds.append(time.monotonic() - started)
    if rank == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
