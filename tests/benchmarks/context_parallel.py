"""What it brings that replicas share long samples: predicted for many clusters, and on this machine's clock.

    python tests/benchmarks/context_parallel.py --shapes FOLDER [--only llava_ov_7b] [--devices 64] [--mixes ordinary]
    python tests/benchmarks/context_parallel.py --clock [--steps 20] [--recomputing] [--keep FOLDER]

The table: for each mix the chosen plan of all plans, of those that share no sample, and FSDP with our sampler; then the
fastest plan that divides every sample over 2, 4 or 8 replicas, as frameworks with a fixed degree do, with our groups.
`blocks` is as FCP does (arXiv 2605.08524): the replicas of such a group deal blocks of all samples among them; `even`
is the same if all replicas and microbatches had equal parts of the batch. `in_blocks` says what is assumed.
All are means of the same two batches as they are scheduled. `work` is a lower bound of any schedule of the chosen plan.
FOLDER, mixes and `--artifacts` are `regret.py`'s. All of it is predicted.

On the clock: two processes, batches of eight of the demo's samples and long texts, of which about one in a batch is
longer than all others together. Our plan with a degree of up to 2, without it, and DDP train in turns on the same
batches, loaded before the clock starts; with `--recomputing` also our plan without it and with all layers recomputed,
as a whole or the LLM's but for attention.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import parts
import planner
import regret
import yaml

from dflop.base import UserError
from dflop.base.devices import load_device
from dflop.checks.side_by_side import Clocked, Contender, contenders, counted_steps, measure_rows
from dflop.comparison.compare import NUM_TRIED, fastest_that_fits
from dflop.comparison.systems.fsdp_balanced import SYSTEM as BALANCED
from dflop.config import Config, load_config
from dflop.costs import CostModel, Loads
from dflop.models import ModelSpec, load_model_spec
from dflop.plan import PLACEMENTS, Plan
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer, shared_batches, sums_by_cell
from dflop.schedule.assignment import Cells
from dflop.schedule.pricer import BYTES_PER_VALUE
from dflop.schedule.sharing import deal_shares
from dflop.search import SearchResult, grouped_batches, pricer_of, search_plans, with_finalists_scheduled
from dflop.shapes import SampleShapes, load_samples

BATCH_SIZES = {**regret.BATCH_SIZES, 512: 4096}
# Scheduled batches of a row, plans with a fixed degree that are scheduled, and a part of a bucket that no sample is.
NUM_BATCHES, NUM_DIVIDED, LEAST = 2, 3, 1e-9
# Sizes of blocks that are tried, in tokens; and how many of an epoch's batches are looked through for the fullest one,
# which has to fit, as it has for our plans.
BLOCKS, NUM_IN_EPOCH = (1024, 2048, 4096, 8192), 200
NUM_OF_DEMO, NUM_LONG, LONG_WORDS = 350, 50, 6000
SHARED, WHOLE = "ours, samples shared", "ours, whole samples"
AGAIN, BUT_FOR_ATTENTION = (f"{WHOLE}, layers recomputed{how}" for how in ("", " but for attention"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, help="a folder of tables of real shapes")
    parser.add_argument("--only", choices=regret.MODELS, nargs="+", default=list(regret.MODELS))
    parser.add_argument("--devices", type=int, nargs="+", choices=BATCH_SIZES, default=[8, 64])
    parser.add_argument("--mixes", nargs="+", choices=regret.MIXES, default=list(regret.MIXES))
    parser.add_argument("--artifacts", type=Path, help="a folder to keep costs in")
    parser.add_argument("--clock", action="store_true", help="measure on this machine")
    parser.add_argument("--steps", type=int, default=20, help="steps that count on the clock")
    parser.add_argument("--recomputing", action="store_true", help="on the clock, rows that recompute all layers, too")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the clock's run is made and stays")
    arguments = parser.parse_args()
    print(f"python {' '.join(sys.argv)}\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        if arguments.clock:
            folder = arguments.keep or Path(name)
            folder.mkdir(parents=True, exist_ok=True)
            print_clock(folder.absolute(), arguments.steps, recomputing=arguments.recomputing)
            return
        planner.FAMILIES |= regret.MODELS
        print("  ours   work  whole  of it   FSDP  of it  fixed 2, 4, 8        blocks   even", flush=True)
        for preset in arguments.only:
            folder = planner.folder_with_costs(preset, arguments.artifacts or Path(name))
            for mix in arguments.mixes:
                planner.SHARES = regret.MIXES[mix]
                planner.write_mix(arguments.shapes, folder, preset)
                for num_devices in arguments.devices:
                    inputs = planner.read_inputs(folder, preset, num_devices, BATCH_SIZES[num_devices])
                    print_row(f"{preset}, {mix}, {num_devices}", *inputs)


def print_row(name: str, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> None:
    inputs = spec, costs, samples
    plan = chosen(config, *inputs)
    ours_s, work_s = scheduled(plan, config, *inputs)
    print(f"{ours_s:6.2f} {work_s:6.2f}", end=" ", flush=True)
    try:
        whole_s, _ = scheduled(chosen(with_sizes(config, [1]), *inputs), config, *inputs)
    except UserError:
        whole_s = np.inf
    print(f"{whole_s:6.2f} {ours_s / whole_s:6.3f}", end=" ", flush=True)
    fsdp_s = balanced(config, *inputs)
    print(f"{fsdp_s:6.2f} {ours_s / fsdp_s:6.3f}", end=" ", flush=True)
    blocks_s, even_s = np.inf, np.inf
    for degree in (2, 4, 8):
        found = all_divided(config, *inputs, degree)
        print(f"{divided_always(found, config, *inputs, degree):6.2f}", end=" ", flush=True)
        blocks_s = min(blocks_s, in_blocks(found, config, *inputs, degree, is_even=False))
        even_s = min(even_s, in_blocks(found, config, *inputs, degree, is_even=True))
    print(f"{blocks_s:6.2f} {even_s:6.2f}  {name}: {plan}", flush=True)


def with_sizes(config: Config, sizes: list[int]) -> Config:
    return replace(config, plan=replace(config.plan, cp_sizes=sizes))


def chosen(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> Plan:
    found = search_plans(config, spec, costs, samples)
    return with_finalists_scheduled(found, config, spec, costs, samples).best.plan


def scheduled(
    plan: Plan, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes
) -> tuple[float, float]:
    """The mean step of the first scheduled batches, and its lower bound, in seconds."""
    pricer, batches = pricer_of(plan, config, spec, costs), GlobalBatches.of(samples, config.train.global_batch_size, 0)
    schedule = replace(config.schedule, policy="search")
    with BatchScheduler(samples, pricer, batches, schedule, config.seed).open() as scheduler:
        steps = [scheduler.schedule(step) for step in range(NUM_BATCHES)]
    return tuple(float(np.mean([getattr(step, name) for step in steps])) for name in ("step_s", "lower_bound_s"))


def balanced(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> float:
    """The mean step of FSDP with our sampler; infinite where it does not fit."""
    batches = GlobalBatches.of(samples, config.train.global_batch_size, config.seed)
    shapes = {step: samples.take(batches[step]) for step in range(NUM_TRIED)}
    try:
        _, steps = fastest_that_fits(BALANCED, config, spec, costs, samples, shapes, range(NUM_BATCHES))
    except UserError:
        return np.inf
    return float(np.mean([step.step_s for step in steps]))


def all_divided(
    config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, degree: int
) -> SearchResult | None:
    """The search of plans that divide all samples, but the shortest, over so many replicas; None where none fits."""
    with patched(grouped_batches, SEARCH_FILL=LEAST):
        try:
            return search_plans(with_sizes(config, [degree]), spec, costs, samples)
        except UserError:
            return None


def divided_always(
    found: SearchResult | None, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, degree: int
) -> float:
    """The mean step of the fastest of these plans; infinite where none fits. As ours, it is chosen among those with the
    least prices, and holds an epoch's fullest batches."""
    if found is None:
        return np.inf
    with patched(grouped_batches, SEARCH_FILL=LEAST), patched(shared_batches, FILLS=(LEAST,)):
        sized = with_sizes(config, [degree])
        found = replace(found, candidates=found.candidates[:NUM_DIVIDED])
        plan = with_finalists_scheduled(found, sized, spec, costs, samples).best.plan
        pricer, steps = pricer_of(plan, config, spec, costs), []
        batches = GlobalBatches.of(samples, config.train.global_batch_size, config.seed)
        for step in range(NUM_BATCHES):
            shapes = samples.take(batches[step])
            loads_s = pricer.problem(shapes).loads_s
            shared = shared_batches.with_shares(pricer, shapes, loads_s, config.schedule.search_trials, step)
            steps.append(np.inf if shared is None else shared.step_s)
        return float(np.mean(steps))


def in_blocks(
    found: SearchResult | None,
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    degree: int,
    *,
    is_even: bool,
) -> float:
    """The mean step of the fastest of these plans where samples are cut into blocks; infinite where none fits.

    Samples are dealt to groups of `degree` replicas and to microbatches as ours are, and their blocks to the group's
    replicas by longest processing time. Assumed in its favour: encoders' work is divided evenly among a group; a
    replica gets each block that it needs once, over a node's links; beside the bytes, only the launch of a kernel for
    each is priced; the size of blocks is the fastest of `BLOCKS`. With `is_even`, all replicas and microbatches have
    equal parts of everything. Memory is priced as for ours, and the fullest of an epoch's batches have to fit. Plans
    whose features cross between ranks are left out.
    """
    least_s, batches = np.inf, GlobalBatches.of(samples, config.train.global_batch_size, config.seed)
    for candidate in found.candidates if found else ():
        if PLACEMENTS[candidate.plan.placement].has_bridges:
            continue
        pricer = pricer_of(candidate.plan, config, spec, costs)
        scheduler = BatchScheduler(samples, pricer, batches, config.schedule, config.seed)
        fullest = scheduler.fullest(min(NUM_IN_EPOCH, batches.steps_in(1.0)), NUM_BATCHES)
        for block in BLOCKS:
            priced = {
                step: priced_in_blocks(pricer, spec, samples.take(batches[step]), block, degree, is_even=is_even)
                for step in {*range(NUM_BATCHES), *fullest}
            }
            if all(np.isfinite(step_s) for step_s in priced.values()):
                least_s = min(least_s, float(np.mean([priced[step] for step in range(NUM_BATCHES)])))
    return least_s


def priced_in_blocks(
    pricer: Pricer, spec: ModelSpec, shapes: SampleShapes, block: int, degree: int, *, is_even: bool
) -> float:
    """The step of a batch whose samples are cut into blocks of so many tokens; infinite where it does not fit."""
    llm, num_microbatches, alone = pricer.plan.grid("llm"), pricer.plan.num_microbatches, pricer.alone(shapes)
    groups = SimpleNamespace(dp=llm.dp // degree, num_meeting=max(1, llm.num_meeting // degree))
    loads_s, row_bytes = pricer.problem(shapes).loads_s, pricer.memory.bytes_of_rows(alone)
    num_cells, whole = groups.dp * num_microbatches, np.ones(len(shapes), dtype=np.int64)
    block_bytes = block * spec.keys_and_values * BYTES_PER_VALUE["bf16"] / llm.tp
    launches = load_device(planner.DEVICE).launch_s / (block_bytes * pricer.transfers.exchange_byte_s())
    for most_bytes in row_bytes.sum() / num_cells * np.array([np.inf, 1.5, 1.2, 1.1, 1.0]):
        group, microbatch = deal_shares(loads_s, row_bytes, whole, groups, num_microbatches, most_bytes)
        assignment, cells = pricer.assign(shapes, group * degree, microbatch), {}
        for module, own in alone.items():
            values = np.array([*own.loads, own.edge_tokens, own.features], dtype=float)
            if module == "llm":
                values, cell = of_blocks(pricer, values, group * num_microbatches + microbatch, block, degree)
                sums = sums_by_cell(cell, values, num_cells * degree).reshape(len(values), -1, num_microbatches, degree)
            else:
                sums = sums_by_cell(group * num_microbatches + microbatch, values, num_cells) / degree
                sums = np.repeat(sums.reshape(len(values), -1, num_microbatches, 1), degree, axis=3)
            *loads, tokens, features = sums.swapaxes(2, 3).reshape(len(values), llm.dp, num_microbatches)
            cells[module] = Cells(Loads(*loads), tokens, features)
        if is_even:
            cells = {name: Cells(Loads(*map(evenly, own.loads)), *map(evenly, own[1:])) for name, own in cells.items()}
        if max(pricer.memory_bytes(shapes, assignment, cells).values()) <= pricer.memory.limit_bytes:
            loads = cells["llm"].loads
            cells["llm"] = cells["llm"]._replace(loads=loads._replace(num_items=loads.num_items * (1 + launches)))
            return pricer.timeline(pricer.stage_times(shapes, assignment, cells), assignment.slots).step_s
    return np.inf


def evenly(values: np.ndarray) -> np.ndarray:
    return np.full_like(values, values.mean())


def of_blocks(
    pricer: Pricer, values: np.ndarray, cell: np.ndarray, block: int, degree: int
) -> tuple[np.ndarray, np.ndarray]:
    """What blocks add to their buckets, as the LLM's `values` of samples [num_values, num_samples], and the bucket of
    each: place `degree * cell + rank`, for the sample's cell and the rank in the group."""
    num_tokens = values[Loads._fields.index("num_tokens")]
    num_blocks = np.maximum(1, np.ceil(num_tokens / block)).astype(np.int64)
    sample = np.repeat(np.arange(len(num_blocks)), num_blocks)
    starts = block * (np.arange(len(sample)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)).astype(float)
    ends = np.minimum(starts + block, num_tokens[sample])
    parts = (ends - starts) / num_tokens[sample]
    made = values[:, sample] * parts
    # A block attends to itself and to all before it.
    made[Loads._fields.index("sum_sq_tokens")] = ends**2 - starts**2
    added_s = pricer.stage_costs.additive_loads_s("llm", Loads(*made[:4])).max(axis=0)
    rank, held_s = np.empty(len(sample), dtype=np.int64), np.zeros((cell.max() + 1, degree))
    for number in np.argsort(-added_s, kind="stable"):
        own = held_s[cell[sample[number]]]
        rank[number] = own.argmin()
        own[rank[number]] += added_s[number]
    # A rank gets what is before its last block of a sample, but for its own.
    pairs, of_pair = np.unique(sample * degree + rank, return_inverse=True)
    last, own_tokens = np.zeros(len(pairs)), np.bincount(of_pair, ends - starts)
    np.maximum.at(last, of_pair, ends)
    made[Loads._fields.index("num_items")] = (last - own_tokens)[of_pair] / np.bincount(of_pair)[of_pair]
    return made, degree * cell[sample] + rank


@contextlib.contextmanager
def patched(module: ModuleType, **values: object) -> Iterator[None]:
    """The module with other constants."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def print_clock(folder: Path, num_steps: int, *, recomputing: bool) -> None:
    write_records(folder / "long.json")
    run = {
        "run": "clock",
        "data": {
            "sources": [
                {"path": "results/demo-data/train.json", "sampling": f"first:{NUM_OF_DEMO}"},
                {"path": "long.json"},
            ],
            "max_llm_tokens": 8192,
        },
        "train": {"global_batch_size": 8},
        "costs": {"repeats": 3, "time_budget_s": 60},  # so that the largest sizes are measured, too
    }
    (folder / "clock.yaml").write_text(yaml.safe_dump(parts.QUICK | run), encoding="utf-8")
    configs = [str(parts.REPOSITORY / "config/config.yaml"), "clock.yaml"]
    snakefile = str(parts.REPOSITORY / "workflow/Snakefile")
    what = ("--configfile", *configs, "--", "results/clock/plan.yaml")
    parts.command(folder, "snakemake", "--snakefile", snakefile, "--cores", "2", *what)
    results = folder / "results/clock"
    config, costs = load_config(results / "config.yaml"), CostModel.load(results / "costs.duckdb")
    spec = load_model_spec(config.model)
    samples, _ = load_samples(results / "shapes.duckdb", spec.encoders)
    rows = [row_of(SHARED, [2], num_steps, config, spec, costs, samples)]
    whole = (WHOLE, AGAIN, BUT_FOR_ATTENTION) if recomputing else (WHOLE,)
    rows += [row_of(name, [1], num_steps, config, spec, costs, samples) for name in whole]
    with contextlib.chdir(folder):  # which the paths of the data begin at
        clocked = measure_rows(config, rows, ["DDP"], num_steps=num_steps)
    print_steps(clocked, rows)
    for row in rows:
        print(f"{row.name}: {row.plan}")


def print_steps(clocked: Mapping[str, Clocked], rows: Sequence[Contender]) -> None:
    """Each row's steps, then their sums, measured and predicted, and those over ours."""
    names = list(clocked)
    measured = {name: np.array(own.seconds) for name, own in clocked.items()}
    predicted = {
        row.name: np.array([step.step_s for step in row.schedules[-len(measured[row.name]) :]]) for row in rows
    }
    print("step  longest, tokens  " + "  ".join(names) + "; predicted")
    longest = [int(max(step.sample_tokens)) for step in rows[0].schedules[-len(measured[SHARED]) :]]
    for step, tokens in enumerate(longest):
        figures = [f"{own[step]:6.2f}" for own in (*measured.values(), *predicted.values())]
        print(f"{step:4}  {tokens:6}  {' '.join(figures)}")
    print("   sum  over ours  predicted, over ours")
    for name, own in measured.items():
        own_s = predicted.get(name, np.array([np.nan])).sum()
        over, of_predicted = own.sum() / measured[SHARED].sum(), own_s / predicted[SHARED].sum()
        print(f"{own.sum():6.2f} {over:10.3f} {own_s:10.2f} {of_predicted:10.3f}  {name}")


def row_of(
    name: str,
    sizes: Sequence[int],
    num_steps: int,
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
) -> Contender:
    """Our row with these sizes of groups that share samples."""
    counted = counted_steps(num_steps, on_the_fly=False)
    plan = chosen(with_sizes(config, list(sizes)), spec, costs, samples)
    if name in (AGAIN, BUT_FOR_ATTENTION):
        plan = recomputing(plan, spec, keeps_attention=name == BUT_FOR_ATTENTION)
    how = {"systems": (), "num_steps": counted.stop, "counted": counted}
    ours, _ = contenders(config, spec, costs, samples, plan, **how)
    return replace(ours, row=replace(ours.row, name=name))


def recomputing(plan: Plan, spec: ModelSpec, *, keeps_attention: bool) -> Plan:
    """The plan with all layers recomputed."""
    grids = []
    for grid in plan.grids:
        counts = tuple(map(len, plan.layers_of(grid.module, spec.module(grid.module).num_layers)))
        kept = counts if keeps_attention and grid.module == "llm" else ()
        grids.append(replace(grid, recomputed=counts, attention_kept=kept))
    return replace(plan, grids=tuple(grids), checkpointing=True)


def write_records(path: Path) -> None:
    """Conversations of many words."""
    rng, records = np.random.default_rng(0), []
    for number in range(NUM_LONG):
        words = " ".join(rng.choice(["red", "boat", "seven", "under", "light", "north"], LONG_WORDS))
        turns = [{"from": "human", "value": words}, {"from": "gpt", "value": "a boat under a light"}]
        records.append({"id": f"long-{number}", "conversations": turns})
    path.write_text(json.dumps(records), encoding="utf-8")


if __name__ == "__main__":
    main()
