"""The `dflop` command: one subcommand a stage, each reading files and writing files.

A mistake of the user's is one line on stderr and exit code 2. Heavy imports stand inside the commands
that need them, so that `dflop --help` answers at once.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import click

from dflop.errors import UserError
from dflop.progress import progress_bar

__all__ = ["main"]

# Fewer whole stages kept out of the fit, or a larger median error, than this are worth a word.
_FEW_HELD_OUT, _LARGE_ERROR = 6, 0.2
_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="dflop")
def cli() -> None:
    """Plan and run multimodal-LLM training around the data.

    The workflow runs these commands in this order: demo-data (for the demo), profile-shapes, merge-shapes,
    plot-shapes, profile-costs, profile-links, fit-costs, plan, schedule, train, report. Each can also be run by hand.
    """


def _config_option(function):
    return click.option(
        "--config",
        "configs",
        multiple=True,
        metavar="FILE|JSON",
        help="A config file, or its text as JSON; later ones win. Repeatable.",
    )(function)


def _load(stage: str, configs: tuple[str, ...]):
    from dflop.config import load_config
    from dflop.stages import STAGES, restrict

    if not configs:
        raise UserError(f"`dflop {stage}` needs a config: --config config/config.yaml")
    layers = [text if text.lstrip().startswith("{") else Path(text) for text in configs]
    return restrict(load_config(*layers), STAGES[stage].reads)


def _meta(stage: str, config) -> dict[str, str]:
    """What a DuckDB file says of its making."""
    from dflop.stages import STAGES

    return {"config_digest": _config_digest(stage, config), "code_digest": STAGES[stage].code_digest}


def _config_digest(stage: str, config) -> str:
    from dflop.config import select_keys
    from dflop.stages import STAGES

    keys = json.dumps(select_keys(config, STAGES[stage].reads), sort_keys=True)
    return hashlib.sha256(keys.encode()).hexdigest()[:16]


@cli.command("demo-data")
@click.option("--out", type=_FOLDER, required=True, help="Folder for train.json, audio.json and their media.")
@click.option("--records", type=click.IntRange(min=10), default=400, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def demo_data(out: Path, records: int, seed: int) -> None:
    """Draw a small LLaVA-style dataset: pictures, clips, texts and sounds, with questions and answers."""
    from dflop.data.demo import make_demo_data

    with progress_bar(total=records, unit="record") as bar:
        made = make_demo_data(out, num_records=records, seed=seed, progress=lambda done: bar.update(done - bar.n))
    kinds = ", ".join(f"{count} {kind}" for kind, count in made.num_records.items())
    click.echo(f"{out}: {kinds}; {made.total_bytes / 1e6:.1f} MB")


@cli.command("profile-shapes")
@_config_option
@click.option("--shard", required=True, help="Name of the shard (`dflop list-shards` prints them).")
@click.option("--out", type=_FILE, required=True, help="Parquet file to write.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes that share the shard; one a core if not given.")
def profile_shapes(configs: tuple[str, ...], shard: str, out: Path, workers: int | None) -> None:
    """Read the shapes of one shard's samples from media headers and text."""
    from dflop.artifacts import written_whole
    from dflop.data import ChatTokenizer, ShapeReader, profile_shard, tokenizer_folder
    from dflop.models import load_model_spec

    config = _load("profile-shapes", configs)
    data = config.data
    source, found = _find_shard(config, shard)
    rules = load_model_spec(config.model).rules
    folder = tokenizer_folder(config.model)
    ChatTokenizer(folder)  # a folder that is no tokenizer's is refused here, before processes start
    with progress_bar(total=found.num_records, unit="record", desc=shard) as bar:
        frame = profile_shard(
            source,
            found,
            seed=config.seed,
            reader=ShapeReader(
                rules=rules,
                video=data.video,
                audio=data.audio,
                max_image_pixels=data.max_image_pixels,
                max_text_bytes=data.max_text_bytes,
            ),
            tokenizer_folder=folder,
            max_llm_tokens=data.max_llm_tokens,
            num_workers=workers or len(os.sched_getaffinity(0)),
            progress=bar.update,
        )
    with written_whole(out) as path:
        frame.write_parquet(path)
    num_rejected = frame["reason"].is_not_null().sum()
    click.echo(f"{out}: {len(frame) - num_rejected} samples, {num_rejected} rejected")


def _find_shard(config, name: str):
    """A shard and its source; watched media are looked at again only where the shard is not known yet."""
    from dflop.data import list_sources

    sources = list_sources(config.data)
    for look_again in (False, True) if config.data.watch_media else (False,):
        for source in sources:
            for shard in _shards(config, source, look_again=look_again):
                if shard.name == name:
                    return source, shard
    raise UserError(f"no source has a shard `{name}`; `dflop list-shards` prints their names")


def _shards(config, source, *, look_again: bool):
    from dflop.data import list_shards

    return list_shards(
        source,
        config.data.samples_per_shard,
        config.seed,
        watch_media=config.data.watch_media,
        look_again=look_again,
    )


@cli.command("list-shards")
@_config_option
def list_shards_command(configs: tuple[str, ...]) -> None:
    """Print the shards of all sources: name, first record, number of records."""
    from dflop.data import list_sources

    config = _load("merge-shapes", configs)
    for source in list_sources(config.data):
        for shard in _shards(config, source, look_again=True):
            click.echo(f"{shard.name}\t{shard.start}\t{shard.num_records}")


@cli.command("merge-shapes")
@_config_option
@click.option("--shapes", type=_FOLDER, required=True, help="Folder with the shards' Parquet files.")
@click.option("--out", type=_FILE, required=True, help="DuckDB file to write.")
@click.option("--bounds", type=_FILE, help="JSON file to write: the loads that `dflop profile-costs` is to measure.")
def merge_shapes(configs: tuple[str, ...], shapes: Path, out: Path, bounds: Path | None) -> None:
    """Merge the shards into one database: samples, rejects, sources, and summaries of them."""
    import polars as pl

    from dflop.artifacts import written_whole
    from dflop.costs.design import bounds_of_samples
    from dflop.data import BUNDLED_TOKENIZER, SourceRecords, list_sources, tokenizer_folder
    from dflop.data.manifests.formats import CUT_OFF
    from dflop.store import ShardFile, read_table, write_shapes

    config = _load("merge-shapes", configs)
    files, source_rows, sampled_rows = [], [], {}
    for source in list_sources(config.data):
        shards = _shards(config, source, look_again=False)
        kept = SourceRecords(source, config.seed).kept
        first_row = kept.start if isinstance(kept, range) else 0
        if not isinstance(kept, range):
            sampled_rows[source.name] = kept
        files += [
            ShardFile(shapes / f"{shard.name}.parquet", shard.name, source.name, shard.start, first_row + shard.start)
            for shard in shards
        ]
        source_rows.append(
            {
                "name": source.name,
                "path": str(source.path),
                "media_root": str(source.media_root),
                "sampling": source.sampling,
                "digest": hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest(),
                "num_records": len(kept),
            }
        )
    for file in files:
        if not file.path.is_file():
            raise UserError(f"{file.path} does not exist; make it with `dflop profile-shapes --shard {file.name}`")
    write_shapes(
        out,
        files,
        pl.DataFrame(source_rows),
        _meta("merge-shapes", config),
        sampled_rows=sampled_rows,
        keep_duplicates=config.data.duplicate_ids == "keep",
    )
    if bounds:
        samples = read_table(out, "samples", made_by="merge-shapes")
        loads = (samples[name].to_numpy() for name in ("num_items", "llm_tokens", "target_tokens"))
        with written_whole(bounds) as path:
            path.write_text(bounds_of_samples(*loads).to_json(), encoding="utf-8")
    shape_summary, reject_summary = (
        read_table(out, f"{of}_summary", made_by="merge-shapes") for of in ("shape", "reject")
    )
    rejects = read_table(out, "rejects", made_by="merge-shapes")
    for source, detail in rejects.filter(pl.col("detail").str.contains(CUT_OFF)).select("source", "detail").iter_rows():
        click.echo(f"warning: a manifest of {source} is not whole, what follows is missing: {detail}")
    num_samples = shape_summary.filter(pl.col("quantity") == "llm_tokens")["num_samples"].sum()
    click.echo(f"{out}: {num_samples:,} samples, {reject_summary['num_records'].sum():,} rejects")
    if not num_samples:
        raise UserError(_nothing_usable(reject_summary, shapes))
    for line in _shape_lines(shape_summary, reject_summary):
        click.echo(line)
    if tokenizer_folder(config.model) == BUNDLED_TOKENIZER:
        click.echo(
            "text was counted with the small bundled tokenizer; for the counts of a real model set "
            "`model.tokenizer` to its tokenizer directory"
        )


def _nothing_usable(rejects, shapes: Path) -> str:
    """What became of the records where none is left; training would only find out once the costs are measured."""
    import polars as pl

    reasons = rejects.group_by("reason").agg(pl.col("num_records").sum(), pl.col("examples").first().list.first())
    found = [
        f"{count:,} {reason}, e.g. {example}" for reason, count, example in reasons.sort(-pl.col("num_records")).rows()
    ]
    return (
        f"none of {reasons['num_records'].sum():,} records can be used: {'; '.join(found)}. Check `data.sources` and "
        f"its `media_root`; {shapes}/*.parquet hold the reason of every record"
    )


def _shape_lines(shapes, rejects) -> list[str]:
    """What a person wants to know of a dataset: samples, items and tokens by source and modality, and the rejects."""
    import polars as pl

    table = [("source", "modality", "samples", "items p50", "p95", "max", "LLM tokens p50", "p95", "max", "variation")]
    for (source, modality), rows in shapes.group_by("source", "modality", maintain_order=True):
        items, tokens = (
            rows.row(by_predicate=pl.col("quantity") == name, named=True) for name in ("num_items", "llm_tokens")
        )
        numbers = [entry[key] for entry in (items, tokens) for key in ("p50", "p95", "max")]
        variation = f"{tokens['coefficient_of_variation']:.2f}"
        table.append((source, modality, f"{tokens['num_samples']:,}", *(f"{n:,.0f}" for n in numbers), variation))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    for source, reason, count, examples in rejects.rows():
        lines.append(f"{source}: {count:,} rejected as {reason}, e.g. {examples[0]}")
    return lines


@cli.command("plot-shapes")
@click.option("--shapes", type=_FILE, required=True, help="shapes.duckdb")
@click.option("--out", type=_FILE, required=True, help="SVG file to write.")
def plot_shapes_command(shapes: Path, out: Path) -> None:
    """Draw how much samples differ, by modality, and what was rejected."""
    from dflop.reporting import plot_shapes

    plot_shapes(shapes, out)
    click.echo(str(out))


@cli.command("profile-costs")
@_config_option
@click.option("--module", required=True, help="vision or llm.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--bounds",
    type=_FILE,
    help="What `dflop merge-shapes --bounds` wrote: the loads that the data brings; usual ones while it is not there.",
)
@click.option(
    "--out", type=_FILE, required=True, help="Parquet file to write; sizes go beside it as *.parameters.parquet."
)
def profile_costs(configs: tuple[str, ...], module: str, tp: int, bounds: Path | None, out: Path) -> None:
    """What a module's layers cost at several sizes: measured on this device, or (`costs.source`) analytic."""
    import polars as pl

    from dflop.models import check_tp, load_model_spec

    config = _load("profile-costs", configs)
    spec = load_model_spec(config.model)
    check_tp(spec, module, tp)
    if config.costs.source == "analytic":
        _write_analytic_costs(config, spec, module, tp, out)
    else:
        _measure_costs(config, spec, module, tp, bounds, out)
    what = "analytic points" if config.costs.source == "analytic" else "measurements"
    click.echo(f"{out}: {len(pl.read_parquet(out))} {what}")


def _write_analytic_costs(config, spec, module: str, tp: int, out: Path) -> None:
    """Points of the roofline of `cluster.device_model`, and that device as a frame."""
    import polars as pl

    from dflop.costs import Measured, analytic_points, load_device, write_measured
    from dflop.models import digest_of_spec

    device = load_device(config.cluster.device_model)
    points = analytic_points(spec, module, tp, device)
    about = {
        "device": f"{config.cluster.device_model} (analytic)",
        "model": digest_of_spec(spec),
        "device_model": config.cluster.device_model,
        "source": "analytic",
        "module": module,
        "tp": tp,
        "num_ranks": tp,
        "threads": 0,
        "precision": "bf16",
        "torch": "",
        "overhead_bytes": int(device.overhead_bytes),
        "allocator_share": device.allocator_share,
        "seconds": 0.0,
        "config_digest": _config_digest("profile-costs", config),
    }
    write_measured(out, Measured(points.measurements, points.parameters, pl.DataFrame([about])))


def _measure_costs(config, spec, module: str, tp: int, bounds: Path | None, out: Path) -> None:
    """Measure on ranks of this node that torchrun starts; they write the frames."""
    from dflop.config import select_keys
    from dflop.costs.design import load_bounds
    from dflop.data import tokenizer_folder
    from dflop.models import check_runnable
    from dflop.stages import STAGES
    from dflop.torchrun import run_ranks

    check_runnable(spec.family)
    if bounds and not bounds.exists():
        click.echo(f"{bounds} is not there yet: measuring over a usual range of loads", err=True)
        bounds = None
    if bounds:
        load_bounds(bounds)
    cluster = config.cluster
    if tp > cluster.devices_per_node:
        raise UserError(
            f"tp={tp}: a node has {cluster.devices_per_node} devices (`cluster.devices_per_node`), and tensor "
            "parallelism does not cross nodes; take smaller `costs.tp_sizes`"
        )
    request = {
        "config": select_keys(config, STAGES["profile-costs"].reads),
        "module": module,
        "tp": tp,
        "bounds": str(bounds) if bounds else None,
        "tokenizer": str(tokenizer_folder(config.model)),
        "out": str(out),
        "config_digest": _config_digest("profile-costs", config),
    }
    per_node = tp if cluster.device == "cuda" else cluster.devices_per_node // tp * tp
    code, _ = run_ranks("dflop.costs.worker", request, cluster, num_nodes=1, per_node=per_node)
    if code:
        raise UserError(f"measuring {module} at tp={tp} ended early (torchrun's exit code {code}); why stands above")


@cli.command("profile-links")
@_config_option
@click.option(
    "--max-bytes", type=click.IntRange(min=4096), default=64 * 2**20, show_default=True, help="Largest message."
)
@click.option("--out", type=_FILE, required=True, help="Parquet file to write.")
def profile_links(configs: tuple[str, ...], max_bytes: int, out: Path) -> None:
    """Time transfers and all-reduces between the cluster's devices: torchrun on all of them."""
    import polars as pl

    from dflop.torchrun import is_first_node, run_ranks

    config = _load("profile-links", configs)
    cluster = config.cluster
    request = {
        "device": cluster.device,
        "repeats": config.costs.repeats,
        "max_bytes": max_bytes,
        "out": str(out),
    }
    code, stopped = run_ranks(
        "dflop.costs.links", request, cluster, num_nodes=cluster.num_nodes, per_node=cluster.devices_per_node
    )
    if code:
        why = "was stopped by SIGTERM" if stopped else f"ended early (torchrun's exit code {code}); see above"
        raise UserError(f"measuring links {why}")
    if is_first_node(cluster):
        click.echo(f"{out}: {len(pl.read_parquet(out))} measurements")


@cli.command("fit-costs")
@click.argument("measurements", nargs=-1, required=True, type=_FILE)
@click.option("--links", "links_path", type=_FILE, help="What `dflop profile-links` measured, if it did.")
@click.option("--out", type=_FILE, required=True, help="DuckDB file to write.")
def fit_costs_command(measurements: tuple[Path, ...], links_path: Path | None, out: Path) -> None:
    """Fit the time and memory model to measurements, with its error on whole stages kept out of the fit."""
    from dflop.costs import fit_costs, fit_links, read_links, read_measured
    from dflop.stages import STAGES
    from dflop.store import write_costs

    measured = read_measured(measurements)
    (source,) = measured.device["source"].unique()
    tables = fit_costs(measured.measurements, measured.parameters, source)
    if links_path:
        links = read_links(links_path)
        tables |= {"links": links, "link_model": fit_links(links)}
    write_costs(
        out,
        {"measurements": measured.measurements, "device": measured.device, **tables},
        {
            "source": source,
            "config_digest": ",".join(measured.device["config_digest"].unique().sort()),
            "code_digest": STAGES["fit-costs"].code_digest,
        },
    )
    if source == "analytic":
        click.echo(f"{out}: analytic; how far the formulas are off is not known")
    else:
        click.echo(f"{out}: error on whole stages, which no fit saw")
    for row in tables["fit_error"].iter_rows(named=True):
        click.echo(
            f"  {row['module']} tp{row['tp']} {row['pass']}: median {row['median_error']:.1%}, "
            f"p95 {row['p95_error']:.1%} of {row['num_held_out']}"
        )
    errors = tables["fit_error"]
    if len(errors) and (errors["num_held_out"].min() < _FEW_HELD_OUT or errors["median_error"].max() > _LARGE_ERROR):
        click.echo("  few or rough; raise `costs.time_budget_s`, or measure on a machine that does nothing else")
    for row in tables["link_model"].iter_rows(named=True) if links_path else ():
        click.echo(
            f"  {row['kind']} {row['scope']}, {row['num_ranks']} ranks: {row['latency_s'] * 1e6:.3g} µs and "
            f"{row['bytes_per_s'] / 1e9:.3g} GB/s, median error {row['median_error']:.0%} of {row['num_points']} sizes"
        )


@cli.command("plan")
@_config_option
@click.option("--shapes", type=_FILE, required=True)
@click.option("--costs", type=_FILE, required=True)
@click.option("--out", type=_FILE, required=True, help="plan.yaml to write.")
@click.option("--candidates", type=_FILE, required=True, help="Parquet file of all priced plans to write.")
def plan_command(configs: tuple[str, ...], shapes: Path, costs: Path, out: Path, candidates: Path) -> None:
    """Search the layouts and choose the one with the shortest expected step."""
    from dflop.artifacts import written_whole
    from dflop.costs import CostModel
    from dflop.data import load_samples
    from dflop.models import digest_of_spec, load_model_spec
    from dflop.planning import candidates_frame, describe_choice, search_plans

    config = _load("plan", configs)
    samples, num_left_out = load_samples(shapes)
    if num_left_out:
        click.echo(f"{num_left_out} samples with audio are left out: the model has no audio encoder")
    with progress_bar(unit="plan") as bar:

        def progress(text: str) -> None:
            bar.set_description(text, refresh=False)
            bar.update()

        cost_model = CostModel.load(costs)
        spec = load_model_spec(config.model)
        cost_model.require_made_for(
            model=digest_of_spec(spec), precision=config.train.precision, device_model=config.cluster.device_model
        )
        found = search_plans(config, spec, cost_model, samples, progress)
    with written_whole(candidates) as path:
        candidates_frame(found).write_parquet(path)
    with written_whole(out) as path:
        path.write_text(describe_choice(found, config, cost_model), encoding="utf-8")
    if found[0].extrapolated:
        click.echo(
            f"{found[0].extrapolated:.0%} of its microbatches lie outside of the loads that were measured; for surer "
            "costs raise `costs.time_budget_s`, or measure again if the data has changed "
            "(`snakemake --forcerun profile_costs`)"
        )
    of_costs = "" if cost_model.source == "measured" else f" ({cost_model.source} costs)"
    click.echo(f"{out}: {found[0].plan}; expected step {found[0].step_s:.3g} s{of_costs}, idle {found[0].idle:.0%}")


@cli.command("schedule")
@_config_option
@click.option("--shapes", type=_FILE, required=True)
@click.option("--costs", type=_FILE, required=True)
@click.option("--plan", "plan_path", type=_FILE, required=True)
@click.option("--batches", type=click.IntRange(min=1), default=8, show_default=True, help="Global batches to preview.")
@click.option("--out", type=_FILE, required=True, help="Parquet file to write; stage times go to *_stages.parquet.")
def schedule_command(
    configs: tuple[str, ...], shapes: Path, costs: Path, plan_path: Path, batches: int, out: Path
) -> None:
    """Preview how the first global batches are regrouped, and what that saves."""
    import statistics

    from dflop.artifacts import written_whole
    from dflop.scheduling import preview_frames
    from dflop.scheduling.service import open_scheduler

    config = _load("schedule", configs)
    with open_scheduler(config, shapes=shapes, costs=costs, plan=plan_path).open() as scheduler:
        schedules = [scheduler.schedule(step) for step in range(batches)]
        random_s = [scheduler.schedule(step, "random").step_s for step in range(batches)]
        samples, stages = preview_frames(schedules, scheduler.pricer.program.workers)
    for path, frame in ((out, samples), (out.with_name(f"{out.stem}_stages.parquet"), stages)):
        with written_whole(path) as beside:
            frame.write_parquet(beside)
    step_s = statistics.fmean(schedule.step_s for schedule in schedules)
    bound_s = statistics.fmean(schedule.lower_bound_s for schedule in schedules)
    click.echo(
        f"{out}: {batches} batches by {config.schedule.policy}: predicted step {step_s:.3g} s, "
        f"{statistics.fmean(random_s) / step_s:.2f}x faster than random, {step_s / bound_s:.2f}x the lower bound, "
        f"decided in {statistics.fmean(schedule.deciding_s for schedule in schedules) * 1e3:.0f} ms each"
    )


@cli.command("train")
@_config_option
@click.option("--shapes", type=_FILE, required=True)
@click.option("--costs", type=_FILE, required=True)
@click.option("--plan", "plan_path", type=_FILE, required=True)
@click.option("--out", type=_FOLDER, required=True, help="Folder for metrics, checkpoints, the model and summary.json.")
def train_command(configs: tuple[str, ...], shapes: Path, costs: Path, plan_path: Path, out: Path) -> None:
    """Train with the plan: torchrun over its ranks, batches scheduled beside training."""
    from dflop.artifacts import written_whole
    from dflop.models import check_runnable
    from dflop.reporting.trace import chrome_trace
    from dflop.scheduling.service import open_scheduler
    from dflop.store import read_table
    from dflop.torchrun import is_first_node
    from dflop.training import launch_ranks, merge_observations, summarise

    config = _load("train", configs)
    check_runnable(config.model.family)
    data_digests = read_table(shapes, "sources", made_by="merge-shapes")["digest"].to_list()
    # What is amiss is said here, before any rank starts.
    open_scheduler(config, shapes=shapes, costs=costs, plan=plan_path).check(config.train.steps)
    out.mkdir(parents=True, exist_ok=True)
    launch_ranks(
        config,
        plan=plan_path,
        arguments={
            "shapes": str(shapes),
            "costs": str(costs),
            "plan": str(plan_path),
            "out": str(out),
            "run_digest": _run_digest(config, data_digests),
        },
    )
    if not is_first_node(config.cluster):
        return
    observations = merge_observations(out / "observations", out / "observations.duckdb", _meta("train", config))
    with written_whole(out / "trace.json") as path:
        path.write_text(json.dumps(chrome_trace(observations)), encoding="utf-8")
    summary = summarise(config, out, observations)
    click.echo(
        f"{out / 'summary.json'}: loss {summary['first_loss']:.3f} -> {summary['final_loss']:.3f}, "
        f"{summary['tokens_per_s']:,.0f} tokens/s, idle {summary['idle']:.0%}, model in {out / 'model'}"
    )


@cli.command("report")
@_config_option
@click.option("--run", "run_folder", type=_FOLDER, required=True, help="results/<run>, with all earlier artifacts.")
@click.option("--out", type=_FOLDER, required=True, help="Folder for the plots and summary.json.")
def report_command(configs: tuple[str, ...], run_folder: Path, out: Path) -> None:
    """Draw what the run found: costs, plans, one step's timeline, loss and throughput."""
    from dflop.reporting import write_report

    config = _load("report", configs)
    for path in write_report(config, run_folder, out):
        click.echo(str(path))


def _run_digest(config, data_digests: list[str]) -> str:
    """What a checkpoint must agree on to be resumed: data, model, batch size, precision; not the optimiser's knobs."""
    from dflop.config import select_keys

    keys = select_keys(config, ("seed", "data.sources", "data.video", "data.max_llm_tokens", "model", "train"))
    for free in (
        "steps",
        "checkpoint_every",
        "resume",
        "loader_workers",
        "lr",
        "warmup_steps",
        "weight_decay",
        "grad_clip",
    ):
        keys["train"].pop(free)
    text = json.dumps([keys, data_digests], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    """Entry point of the `dflop` command."""
    try:
        cli(standalone_mode=False)
    except UserError as error:
        click.echo(f"dflop: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"dflop: {where}{error.strerror or error}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("dflop: interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
