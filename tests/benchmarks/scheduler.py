"""How much shorter the scheduler makes a step, on batches of real shapes, and how long it takes to decide.

    python tests/benchmarks/scheduler.py --shapes FOLDER [--batches 4]

FOLDER holds `coco_val2017.csv`, `math_v.csv` and `nextqa_video.csv` with the columns `text_tokens_qwen25`, `ov_tiles`
and `ov_visual_tokens`. Mixes: single images (COCO and MATH-V); 13 % single image, 43 % multi-image and 44 % video of up
to 30 s, where multi-image samples are made up, of 2 to 8 COCO pictures; video.
The model is LLaVA-OneVision 7B on H100s by their data sheet (analytic costs), with all layers recomputed
(checkpointing). The encoder has the fewest ranks that make it as fast as the LLM and hold every batch in an H100's
memory; a plan that no number of ranks makes fit is left out. The cold ILP has its ten seconds for one batch of the
smaller sizes with four stages, Karmarkar-Karp, in Python, one of the largest.

Steps are over the lower bound, as are buckets. Nearer to what can be had comes the relaxed step, of samples that could
be cut at will; with one encoder replica it is a bound, too. A table is printed and `results/benchmarks/scheduler.json`
written. Two cores take about twenty minutes.
"""

import argparse
import json
import platform
import sys
import time
from collections import defaultdict
from pathlib import Path

import mip
import numpy as np
import polars as pl
import psutil
from published import with_device
from relaxed_step import relaxed_step_s

from dflop.balance import (
    BatchProblem,
    CbcProcess,
    bucket_loads,
    check_assignment,
    least_bucket_s,
    lpt_buckets,
)
from dflop.base import UserError
from dflop.base.devices import load_device
from dflop.comparison.packing import differencing
from dflop.config import ClusterConfig, ModelConfig, ScheduleConfig
from dflop.costs import CostModel
from dflop.costs.analytic import analytic_points
from dflop.costs.fit import fit_model, median_points
from dflop.models import ModelSpec, load_model_spec
from dflop.plan import Grid, Plan
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer, StepSchedule, fits
from dflop.shapes import SampleShapes

MIXES = {"single image": (1.0, 0.0, 0.0), "13/43/44": (0.13, 0.43, 0.44), "video": (0.0, 0.0, 1.0)}
# Samples and buckets: four samples a bucket, and once eight, with which memory is tight.
SIZES = [(128, 32), (512, 64), (512, 128), (2048, 512), (8192, 2048)]
NUM_STAGES = [1, 2, 4, 8]
SAMPLES_PER_REPLICA = 128
NUM_SAMPLES = 40_000
# Words around a question: a system prompt and the chat template.
PROMPT_TOKENS = 64
COLD_LIMIT_S = 10.0
COLD_SIZES = SIZES[:3]
FEWER_BATCHES = {SIZES[3]: 2, SIZES[4]: 4}
COLD_STAGES = 4
ROWS = ("random", "LPT", "Karmarkar-Karp", "cold ILP", "warm ILP", "LPT, small ends", "search", "ilp")
# Larger batches have no relaxed step: 2048 samples take seconds.
RELAXED_SIZES = SIZES[:3]
DEVICE_NAME = "h100-80g"
DEVICE = load_device(DEVICE_NAME)
# Encoder ranks are added up to so many times the number that balances the modules.
MOST_ENCODER_RANKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument(
        "--batches", type=int, default=4, help="batches a cell; half as many of 2048 samples, a quarter of 8192"
    )
    arguments = parser.parse_args()
    started = time.perf_counter()
    spec = load_model_spec(ModelConfig(preset="llava_ov_7b"))
    costs = analytic_costs(spec)
    mixes = {name: draw_mix(arguments.shapes, shares) for name, shares in MIXES.items()}
    measure_cell(next(iter(mixes.values())), costs, spec, SIZES[0], 8, 1)  # Compiles.
    print(f"{platform.machine()}, {psutil.cpu_count()} cores: {' '.join(['python', *sys.argv])}\n")
    print(f"devices of {DEVICE.memory_gib:.1f} GiB ({DEVICE_NAME}), checkpointing; step and largest bucket over their")
    print(
        "lower bounds: mean, 99th percentile; milliseconds to decide: median; batches that are too large for memory\n"
    )
    cells = []
    for mix, samples in mixes.items():
        for size in SIZES:
            for num_stages in NUM_STAGES:
                num_batches = max(1, arguments.batches // FEWER_BATCHES.get(size, 1))
                cell = measure_cell(samples, costs, spec, size, num_stages, num_batches)
                if cell is None:
                    print(f"{mix}, {size[0]} samples to {size[1]} buckets, {num_stages} stages: nothing fits\n")
                    continue
                cells.append({"mix": mix, "size": size, "num_stages": num_stages, **cell})
                print_cell(cells[-1])
    print(f"{(time.perf_counter() - started) / 60:.1f} minutes")
    figures = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
        "memory_gib": DEVICE.memory_gib,
        "cells": cells,
    }
    out = Path("results/benchmarks/scheduler.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")


def draw_mix(folder: Path, shares: tuple[float, float, float]) -> SampleShapes:
    """Samples of single images, several images and video in these shares."""
    rng = np.random.default_rng(0)
    columns = ["ov_tiles", "ov_visual_tokens", "text_tokens_qwen25"]

    def draw(*tables: pl.DataFrame) -> np.ndarray:
        rows = pl.concat([table.select(columns) for table in tables], how="vertical_relaxed").to_numpy()
        return rows[rng.integers(len(rows), size=NUM_SAMPLES)]

    coco, math_v, video = (pl.read_csv(folder / f"{name}.csv") for name in ("coco_val2017", "math_v", "nextqa_video"))
    # A picture of several is one crop of 729 tokens.
    num_images = rng.integers(2, 9, size=NUM_SAMPLES)
    several = np.column_stack([num_images, num_images * 729, num_images * draw(coco)[:, 2]])
    kinds = np.stack([draw(coco, math_v), several, draw(video.filter(pl.col("seconds") <= 30))])
    rows = kinds[rng.choice(3, NUM_SAMPLES, p=shares), np.arange(NUM_SAMPLES)].astype(np.int64)
    names = np.array([f"sample-{number}" for number in range(NUM_SAMPLES)])
    text_tokens = rows[:, 2] + PROMPT_TOKENS
    return SampleShapes(
        encoders=("vision",),
        sample_id=names,
        source=names,
        row=np.arange(NUM_SAMPLES),
        num_items=rows[:, :1],
        kept_tokens=rows[:, 1:2],
        llm_tokens=rows[:, 1] + text_tokens,
        target_tokens=np.maximum(16, text_tokens // 2),
    )


def analytic_costs(spec: ModelSpec) -> CostModel:
    points = [analytic_points(spec, module, 1, DEVICE, "compiled") for module in ("vision", "llm")]
    measurements, parameters = (
        pl.concat([getattr(point, name) for point in points]) for name in ("measurements", "parameters")
    )
    costs = fit_model(median_points(measurements), parameters, "analytic")
    return with_device(costs, DEVICE)


def make_pricer(
    samples, costs, spec, num_samples: int, num_buckets: int, num_stages: int, num_batches: int
) -> tuple[Pricer, float] | None:
    """Of the plan with the fewest encoder ranks that are as fast as the LLM and hold the batches; None: no plan does.

    Beside it the encoder's time over the LLM's.
    """
    cluster = ClusterConfig(
        num_nodes=100,
        devices_per_node=8,
        memory_gib=DEVICE.memory_gib,
        intra_node_gbps=3600.0,
        inter_node_gbps=400.0,
    )
    llm_dp = num_samples // SAMPLES_PER_REPLICA
    num_microbatches = num_buckets // llm_dp
    batches = GlobalBatches(len(samples), num_samples, 0)

    def pricer_of(vision_dp: int) -> tuple[Pricer, float]:
        vision = Grid(module="vision", num_ranks=vision_dp)
        llm = Grid(module="llm", num_ranks=llm_dp * num_stages, pp=num_stages, rank_offset=vision_dp)
        plan = Plan(placement="disjoint", grids=(vision, llm), num_microbatches=num_microbatches, checkpointing=True)
        pricer = Pricer(plan, costs, spec, cluster, precision="bf16")
        encoder_s, llm_s = pricer.problem(samples.take(np.arange(8 * num_buckets))).loads_s.sum(axis=0)
        return pricer, float(encoder_s / llm_s)

    try:
        _, ratio = pricer_of(llm_dp)
        balanced = max(1, round(llm_dp * ratio))
        for vision_dp in range(balanced, MOST_ENCODER_RANKS * balanced + 1, max(1, balanced // 8)):
            pricer, ratio = pricer_of(vision_dp)
            if all(holds(pricer, samples.take(batches[step])) for step in range(num_batches)):
                return pricer, ratio
    except UserError:
        ...  # However many ranks the encoder has, an LLM rank cannot hold the model or the batch's tokens.
    return None


def holds(pricer: Pricer, shapes: SampleShapes) -> bool:
    """Whether even buckets, in the order in which they come, fit into memory."""
    pricer.memory.require_room()
    rank, microbatch = np.divmod(lpt_buckets(pricer.problem(shapes)), pricer.plan.num_microbatches)
    return fits(pricer, shapes, pricer.assign(shapes, rank, microbatch))


def measure_cell(samples, costs, spec, size, num_stages, num_batches) -> dict | None:
    """Figures of every row, [num_batches] each; a row may be left out. None where no plan fits into memory."""
    num_samples, num_buckets = size
    made = make_pricer(samples, costs, spec, num_samples, num_buckets, num_stages, num_batches)
    if made is None:
        return None
    pricer, ratio = made
    batches = GlobalBatches(len(samples), num_samples, 0)
    found = defaultdict(lambda: {"step": [], "bucket": [], "ms": [], "is_too_large": []})
    relaxed = []
    with BatchScheduler(samples, pricer, batches, ScheduleConfig(), 0).open() as scheduler, CbcProcess() as cbc:
        scheduler.schedule(0, "search")  # What is worked out once a run is not counted.
        for step in range(num_batches):
            shapes = samples.take(batches[step])
            problem = pricer.problem(shapes)
            if size in RELAXED_SIZES:
                relaxed.append(relaxed_step_s(pricer, shapes) / pricer.lower_bound_s(shapes))
            lpt = lpt_buckets(problem)
            answers = {
                "random": lambda step=step: scheduler.schedule(step, "random"),
                "LPT": lambda problem=problem: lpt_buckets(problem),
                "Karmarkar-Karp": lambda problem=problem: differencing(problem.loads_s.sum(axis=1), num_buckets),
                "cold ILP": lambda problem=problem: cold_ilp(problem),
                "warm ILP": lambda problem=problem, lpt=lpt: cbc.solve(problem, lpt, time_limit_s=1.0).bucket,
                "LPT, small ends": lambda step=step: scheduler.schedule(step, "lpt"),
                "search": lambda step=step: scheduler.schedule(step, "search"),
                "ilp": lambda step=step: scheduler.schedule(step, "ilp"),
            }
            if size not in COLD_SIZES or num_stages != COLD_STAGES or step > 0:
                del answers["cold ILP"]
            if size == SIZES[-1] and (num_stages != COLD_STAGES or step > 0):
                del answers["Karmarkar-Karp"]
            for name, answer in answers.items():
                begin = time.perf_counter()
                try:
                    given = answer()
                except UserError:
                    assert name == "random", "that even buckets fit was looked at"
                    given = None  # What was drawn cannot be made to fit into memory.
                seconds = time.perf_counter() - begin
                if given is None:
                    continue
                step_s, bucket, is_too_large = outcome(pricer, shapes, problem, given)
                row = found[name]
                row["is_too_large"].append(is_too_large)
                row["step"].append(step_s / pricer.lower_bound_s(shapes))
                row["bucket"].append(bucket_loads(problem, bucket).max() / least_bucket_s(problem))
                row["ms"].append(1e3 * seconds)
    return {
        "plan": str(pricer.plan),
        "encoder_over_llm": ratio,
        "relaxed_step": relaxed,
        "rows": {name: found[name] for name in ROWS if name in found},
    }


def outcome(pricer, shapes, problem, given) -> tuple[float, np.ndarray, bool]:
    """Of a schedule, or of buckets in the order in which they come: the step in seconds, the buckets, and whether they
    take more memory than there is."""
    bucket = given
    if isinstance(given, StepSchedule):
        place = {name: number for number, name in enumerate(given.sample_id)}
        own = [place[name] for name in shapes.sample_id]
        bucket = (given.llm_dp_rank * problem.num_microbatches + given.microbatch)[own]
    check_assignment(problem, bucket)
    assignment = pricer.assign(shapes, *np.divmod(bucket, problem.num_microbatches))
    step_s = given.step_s if isinstance(given, StepSchedule) else pricer.step_s(shapes, assignment)
    return step_s, bucket, not isinstance(given, StepSchedule) and not fits(pricer, shapes, assignment)


def cold_ilp(problem: BatchProblem) -> np.ndarray | None:
    """The published formulation: a binary a sample and bucket, the largest bucket as small as can be, no start."""
    model = mip.Model(solver_name=mip.CBC)
    model.verbose, model.threads = 0, 1
    peak = model.add_var()
    model.objective = peak
    goes = [
        [model.add_var(var_type=mip.BINARY) for _ in range(problem.num_buckets)] for _ in range(problem.num_samples)
    ]
    unit_s = least_bucket_s(problem)
    for row in goes:
        model += mip.xsum(row) == 1
    for column in zip(*goes, strict=True):
        for loads_s in problem.loads_s.T:
            model += mip.xsum(float(load / unit_s) * var for load, var in zip(loads_s, column, strict=True)) <= peak
        model += mip.xsum(column) >= 1
    model.optimize(max_seconds=COLD_LIMIT_S)
    if model.num_solutions == 0:
        return None
    return np.array([[var.x for var in row] for row in goes]).argmax(axis=1)


def print_cell(cell: dict) -> None:
    num_samples, num_buckets = cell["size"]
    print(f"{cell['mix']}, {num_samples} samples to {num_buckets} buckets; {cell['plan']}")
    heading = f"{'':<16}{'step':>16}{'largest bucket':>18}{'ms':>10}{'too large':>11}"
    print(f"  {heading}   encoder/LLM {cell['encoder_over_llm']:.2f}")
    if relaxed := cell["relaxed_step"]:
        print(f"  {'relaxed':<16}{np.mean(relaxed):>9.3f}{np.percentile(relaxed, 99):>7.3f}")
    for name, row in cell["rows"].items():
        step, bucket = (f"{np.mean(row[key]):.3f}  {np.percentile(row[key], 99):.3f}" for key in ("step", "bucket"))
        print(f"  {name:<16}{step:>16}{bucket:>18}{np.median(row['ms']):>10.1f}{sum(row['is_too_large']):>11}")
    print(flush=True)


if __name__ == "__main__":
    main()
