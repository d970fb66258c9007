"""How much longer a step is with messages as a GPU carries them than as the simulator prices them.

    python tests/benchmarks/transport.py --shapes FOLDER [--only TEXT] [--artifacts FOLDER]

The simulator lets a message begin when it is made. On a GPU it begins when all is made that its two ends send with it,
and when both have ended what stood before it: messages of one place in the total order and one channel are one
operation, operations of a channel follow each other (`step.streams`), receives begin ahead of need, and a worker waits
until a message has arrived that it need not keep any more (`kept_until`). Here a plan's batches are timed both ways,
with the same seconds. *Late* is as if a receive began only when all is computed that stands before it. Plans are the
fastest with pipelines of each placement and schedule, on 64 H100s with 400 Gbit/s a device between nodes, and on 32
A100s over PCIe with 3 Gbit/s. FOLDER, the mix and the costs are `planner.py`'s, with fewer samples and tp of 1 and 2
alone. Costs take most of the time, so `--artifacts` keeps them for the next run.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import gains
import numpy as np
import planner

from dflop.config import FixedGrid, FixedPlan, PlanConfig
from dflop.plan import PLACEMENTS, Plan
from dflop.plan.passes import FORWARD
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer
from dflop.step import Instruction, Op, StageTimes, make_program
from dflop.step.instructions import features_issued_at, kept_until
from dflop.step.routes import make_routes
from dflop.step.simulation_kernel import BRIDGE_IN, SHARED
from dflop.step.syncs import sync_parts

CLUSTERS = (
    {"nodes": 8, "batch": 512, "device": "h100-80g", "intra_gbps": 3600, "inter_gbps": 400},
    {"nodes": 4, "batch": 256, "intra_gbps": gains.PCIE_GBPS, "inter_gbps": 25 / 8},
)
MODELS = ("llava_ov_7b", "internvl_38b")
SCHEDULES = ("1f1b", "interleaved_1f1b", "gpipe")
NUM_BATCHES, NUM_SAMPLES, TP_SIZES = 4, 16_384, (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--artifacts", type=Path, help="a folder to keep costs and samples in")
    arguments = parser.parse_args()
    print(f"python {' '.join(sys.argv)}\n\n   longer      late   priced  plan", flush=True)
    planner.NUM_SAMPLES, planner.TP_SIZES = NUM_SAMPLES, TP_SIZES
    rows = [gains.Row(preset=preset, **cluster) for preset in MODELS for cluster in CLUSTERS]
    with tempfile.TemporaryDirectory() as temporary:
        for row in (row for row in rows if arguments.only in row.name):
            print(f"\n{row.name}", flush=True)
            folder = (arguments.artifacts or Path(temporary)) / f"{row.preset} {row.device} {row.inter_gbps:g}"
            folder.mkdir(parents=True, exist_ok=True)
            inputs = gains.inputs_of(row, arguments.shapes, folder)
            for placement in PLACEMENTS:
                for schedule in SCHEDULES:
                    judge(inputs, placement, schedule)


def judge(inputs, placement: str, schedule: str) -> None:
    """Print a line on the fastest plan with a pipeline of this placement and schedule."""
    config, spec, costs, samples = inputs
    found = None
    for pp in (2, 4):
        fixed = FixedPlan(modules={"llm": FixedGrid(pp=pp)})
        within = PlanConfig(placements=[placement], schedules=[schedule], fixed=fixed)
        best = gains.fastest(inputs, within)
        if not isinstance(best, str) and (found is None or best.step_s < found.step_s):
            found = best
    if found is None:
        return
    plan = found.plan
    pricer = Pricer(plan, costs, spec, config.cluster, precision=config.train.precision)
    batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
    policy = replace(config.schedule, policy="search")
    priced, carried, late = [], [], []
    with BatchScheduler(samples, pricer, batches, policy, config.seed).open() as scheduler:
        for step in range(NUM_BATCHES):
            decided = scheduler.schedule(step)
            times = pricer.stage_times(decided.shapes, decided.assignment)
            slots = decided.assignment.slots
            priced.append(pricer.timeline(times, slots).computed_s.max())
            carried.append(carried_s(plan, pricer.order(slots), times))
            late.append(carried_s(plan, pricer.order(slots), times, late=True))
    longer = (f"{np.mean(steps) / np.mean(priced) - 1:9.2%}" for steps in (carried, late))
    print(*longer, f" {np.mean(priced):7.3f}s  {plan}", flush=True)


def carried_s(plan: Plan, compiled, times: StageTimes, *, late: bool = False) -> float:
    """When the last rank has computed, with messages as a GPU carries them, or with `late` receives."""
    program = make_program(plan, rank=0)
    routes = make_routes(program.workers, program.edges)
    bridges = times.bridges
    bridge_s = {
        (source, target, microbatch): seconds
        for source, target, microbatch, seconds in zip(
            bridges.source.tolist(), bridges.target.tolist(), bridges.microbatch.tolist(), bridges.seconds.tolist(),
            strict=True,
        )
    }  # fmt: skip
    carriers, edges_of = defaultdict(list), {FORWARD: defaultdict(list), 1 - FORWARD: defaultdict(list)}
    for index, worker in enumerate(program.workers):
        for node in worker.nodes:
            carriers[node].append(index)
    for number, edge in enumerate(program.edges):
        edges_of[FORWARD][edge.source].append(number)
        edges_of[1 - FORWARD][edge.target].append(number)
    clock_s, free_s, arrived_s = np.zeros(len(program.workers)), defaultdict(float), defaultdict(float)
    # When messages have arrived that a worker keeps no longer, and those that it keeps until a computation.
    let_go_s, kept_s = np.zeros_like(clock_s), defaultdict(float)
    first_node, dp, num_parts = compiled.stages[:, 1], compiled.stages[:, 0], compiled.stages[:, -1]
    gathered_s = sync_parts(compiled, times.sync_s, times.early_sync_s, times.late_sync_s).gathered_s
    order, waiting = compiled.order.tolist(), defaultdict(list)
    issued_at = features_issued_at(order, compiled.stages[:, BRIDGE_IN] > 0)
    for place, (which, stage, microbatch, part) in enumerate(order):
        share = dp[stage] // num_parts[stage]
        nodes = range(first_node[stage] + part * share, first_node[stage] + (part + 1) * share)
        seconds_of = times.forward_s if which == FORWARD else times.backward_s
        begins_s = []
        for node in nodes:
            free_at_s = max(clock_s[carriers[node]].max(), let_go_s[carriers[node]].max())
            begins_s.append(max(arrived_s[which, node, microbatch], free_at_s))
            if which == FORWARD and microbatch == 0 and len(gathered_s):
                begins_s[-1] = max(begins_s[-1], gathered_s[node] - seconds_of[node, 0])
        for index, node in enumerate(nodes):  # replicas that share parameters begin and end together
            shared = compiled.stages[stage, SHARED]
            together = slice(index // shared * shared, (index // shared + 1) * shared)
            longest_s = seconds_of[nodes[together], microbatch].max()
            clock_s[carriers[node]] = max(begins_s[together]) + longest_s
            computed = Op.FORWARD if which == FORWARD else Op.BACKWARD, node, microbatch
            for worker in carriers[node]:
                let_go_s[worker] = kept_s.pop((worker, computed), 0.0)
            for number in edges_of[which][node]:
                is_held = which == FORWARD and program.edges[number].is_bridge
                issued = max(place, issued_at.get(microbatch, place)) if is_held else place
                waiting[issued].append((number, which, microbatch, clock_s[carriers[node]].max()))
        messages, ready_s, ended_s = [], defaultdict(float), defaultdict(float)
        for number, way, of_microbatch, made_s in waiting.pop(place, []):
            edge, is_forward = program.edges[number], way == FORWARD
            seconds = times.chain_s[edge.source, of_microbatch]
            if edge.is_bridge:
                seconds = bridge_s.get((edge.source, edge.target, of_microbatch))
                if seconds is None:
                    continue
            channel, taker = edge.channel(is_forward), edge.target if is_forward else edge.source
            for ends in routes.of(number, is_forward):
                ready_s[ends.sender, channel] = max(ready_s[ends.sender, channel], made_s)
                op, maker = (Op.SEND_FORWARD, edge.source) if is_forward else (Op.SEND_BACKWARD, edge.target)
                until = kept_until(Instruction(op, maker, of_microbatch, number), edge, learns=True)
                messages.append((ends, channel, seconds, (way, taker, of_microbatch), until))
        for ends, channel, seconds, *_ in messages:
            begin_s = max(max(ready_s[worker, channel], free_s[worker, channel]) for worker in ends)
            if late:
                begin_s = max(begin_s, clock_s[ends.receiver])
            for worker in ends:
                ended_s[worker, channel] = max(ended_s[worker, channel], begin_s + seconds)
        free_s |= ended_s
        for ends, channel, _, key, until in messages:
            kept = ends.sender, until
            kept_s[kept] = max(kept_s[kept], ended_s[ends.sender, channel])
            arrived_s[key] = max(arrived_s[key], ended_s[ends.receiver, channel])
    return float(clock_s.max())


if __name__ == "__main__":
    main()
