"""How many stages' microbatches the simulator prices in a second, on one core, and what compiling a plan takes.

    python tests/benchmarks/simulator.py

One evaluation is one (microbatch, stage replica): its forward and its backward, with transfers. Small plans are priced
64 batches at a time, large ones one at a time; every bucket receives four messages over bridges. A table is printed and
`results/benchmarks/simulator.json` written.
"""

import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

from dflop.plan import Grid, Plan
from dflop.step import Bridges, CompiledPlan, StageTimes, compile_plan, peak_bytes, simulate_step_s, stages_of

REPOSITORY = Path(__file__).parents[2]
MESSAGES_A_BUCKET = 4
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2))
# Name, ranks of the encoder and of the LLM, tp of both, pp of the LLM, microbatches, batches at a time.
SIZES = (("20 ranks", 4, 16, 1, 1, 4, 16, 64), ("8,192 ranks", 2048, 6144, 4, 8, 8, 64, 1))


def main() -> None:
    rows = measure_all()
    print(f"{platform.machine()}, {os.cpu_count()} cores; python {' '.join(sys.argv)}")
    print(f"{'':44} {'compiled in':>12} {'a batch in':>12} {'peak in':>10} {'evaluations/s':>14}")
    for row in rows:
        print(
            f"{row['size']:>12} {row['placement']:<11} {row['schedule']:<19} {row['compile_ms']:9.2f} ms "
            f"{row['batch_ms']:9.3f} ms {row['peak_ms']:7.3f} ms {row['evaluations_per_s']:14,.0f}"
        )
    out = REPOSITORY / "results/benchmarks/simulator.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def measure_all() -> list[dict[str, object]]:
    return [
        measured(name, *size, placement, schedule, num_chunks)
        for name, *size in SIZES
        for placement in ("disjoint", "colocated", "monolithic")
        for schedule, num_chunks in SCHEDULES
    ]


def measured(
    size: str,
    encoder_ranks: int,
    llm_ranks: int,
    encoder_tp: int,
    tp: int,
    pp: int,
    num_microbatches: int,
    num_batches: int,
    placement: str,
    schedule: str,
    num_chunks: int,
) -> dict[str, object]:
    world_size = encoder_ranks + llm_ranks
    if placement == "disjoint":
        encoder = Grid(module="vision", num_ranks=encoder_ranks, tp=encoder_tp)
        llm = Grid(module="llm", num_ranks=llm_ranks, tp=tp, pp=pp, rank_offset=encoder_ranks)
    else:
        llm_ranks = world_size // (pp * tp) * pp * tp
        llm = Grid(module="llm", num_ranks=llm_ranks, tp=tp, pp=pp)
        of_encoder = (llm_ranks, encoder_tp) if placement == "colocated" else (llm.dp * tp, tp)
        encoder = Grid(module="vision", num_ranks=of_encoder[0], tp=of_encoder[1])
    plan = Plan(
        placement=placement,
        grids=(encoder, llm),
        num_microbatches=num_microbatches,
        schedule=schedule,
        num_chunks=num_chunks,
    )
    compiled = compile_plan(plan)
    times = drawn_times(plan, compiled, num_batches)
    batch_s = seconds_of(lambda: simulate_step_s(compiled, times)) / num_batches
    one = times.forward_s[0]
    return {
        "size": size,
        "placement": placement,
        "schedule": schedule + (f" x{num_chunks}" if num_chunks > 1 else ""),
        "compile_ms": 1e3 * seconds_of(lambda: compile_plan(plan)),
        "batch_ms": 1e3 * batch_s,
        "peak_ms": 1e3 * seconds_of(lambda: peak_bytes(compiled, one, one)),
        "evaluations_per_s": one.size / batch_s,
    }


def drawn_times(plan: Plan, compiled: CompiledPlan, num_batches: int) -> StageTimes:
    rng = np.random.default_rng(0)
    shape = (num_batches, compiled.num_nodes, compiled.num_microbatches)
    forward_s = rng.exponential(1.0, shape)
    encoder, llm = (next(stage for stage in stages_of(plan) if stage.module == module) for module in ("vision", "llm"))
    count = num_batches * plan.num_buckets * MESSAGES_A_BUCKET if plan.placement != "monolithic" else 0
    return StageTimes(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        chain_s=rng.exponential(0.1, shape),
        bridges=Bridges(
            source=encoder.first_node + rng.integers(0, encoder.dp, count),
            target=llm.first_node + rng.integers(0, llm.dp, count),
            microbatch=rng.integers(0, plan.num_microbatches, count),
            seconds=rng.exponential(0.1, count),
            batch=rng.integers(0, num_batches, count),
        ),
        sync_s=np.zeros(compiled.num_nodes),
    )


def seconds_of(work) -> float:
    """The shortest of seven tries, after one that is not counted: others share the machine."""
    work()
    taken = []
    for _ in range(7):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


if __name__ == "__main__":
    main()
