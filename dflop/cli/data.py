"""The commands on data: making the demo's, reading shapes shard by shard, merging and plotting them, timing loaders."""

import hashlib
import os
from pathlib import Path

import click

from dflop.base import UserError, printable, progress_bar
from dflop.cli.options import FILE, FOLDER, config_option, load_for, meta_of

__all__ = [
    "demo_data",
    "list_shards_command",
    "merge_shapes",
    "plot_shapes_command",
    "profile_loading",
    "profile_shapes",
    "shapes_command",
]


@click.command("demo-data")
@click.option("--out", type=FOLDER, required=True, help="Folder for train.json, audio.json and their media.")
@click.option("--records", type=click.IntRange(min=10), default=400, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def demo_data(out: Path, records: int, seed: int) -> None:
    """Make a small LLaVA-style dataset: pictures, clips, texts and sounds, with questions and answers."""
    from dflop.demo import make_demo_data

    with progress_bar(total=records, unit="record") as bar:
        made = make_demo_data(out, num_records=records, seed=seed, progress=lambda done: bar.update(done - bar.n))
    kinds = ", ".join(f"{count} {kind}" for kind, count in made.num_records.items())
    click.echo(f"{out}: {kinds}; {made.total_bytes / 1e6:.1f} MB")


@click.command("profile-shapes")
@config_option
@click.option("--shard", required=True, help="Name of the shard (`dflop list-shards` prints them).")
@click.option("--out", type=FILE, required=True, help="Parquet file to write.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes that share the shard; one a core if not given.")
def profile_shapes(configs: tuple[str, ...], shard: str, out: Path, workers: int | None) -> None:
    """Read the shapes of one shard's samples from media headers and text."""
    config = load_for("profile-shapes", configs)
    click.echo(f"{out}: {_profile(config, *_find_shard(config, shard), out, workers)}")


def _profile(config, source, shard, out: Path, workers: int | None = None) -> str:
    """Write the file of a shard; returns how many samples it has."""
    from dflop.models import load_model_spec
    from dflop.shapes import ChatTokenizer, ShapeReader, profile_shard, tokenizer_folder
    from dflop.shapes.record_media import MEDIA_KINDS
    from dflop.store import write_parquet

    data = config.data
    spec = load_model_spec(config.model)
    refused = tuple(kind for kind in MEDIA_KINDS if data.without_encoder == "reject" and kind not in spec.media)
    folder = tokenizer_folder(config.model)
    ChatTokenizer(folder)  # a folder without a tokenizer is refused here, before processes start
    with progress_bar(total=shard.num_records, unit="record", desc=shard.name) as bar:
        frame = profile_shard(
            source,
            shard,
            seed=config.seed,
            reader=ShapeReader(spec.rules, _whole(data)),
            tokenizer_folder=folder,
            max_llm_tokens=data.max_llm_tokens,
            num_workers=workers or len(os.sched_getaffinity(0)),
            refused_media=refused,
            progress=bar.update,
        )
    write_parquet(frame, out)
    num_rejected = frame["reason"].is_not_null().sum()
    return f"{len(frame) - num_rejected} samples, {num_rejected} rejected"


@click.command("shapes")
@click.argument("manifests", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--model", type=FOLDER, required=True, help="Folder of a model: config, tokenizer, preprocessor.")
@click.option("--media-root", type=FOLDER, help="Folder that the media's paths begin at; each manifest's if not given.")
@click.option("--out", type=FILE, default="shapes.duckdb", show_default=True, help="DuckDB file to write.")
@config_option
def shapes_command(
    manifests: tuple[Path, ...], model: Path, media_root: Path | None, out: Path, configs: tuple[str, ...]
) -> None:
    """Read the shapes of manifests without a workflow, e.g. as costs for `dflop.balance_trainer`."""
    import json
    import tempfile

    from dflop.shapes import list_sources
    from dflop.store import read_table

    root = {} if media_root is None else {"media_root": str(media_root.resolve())}
    given = {
        "data": {"sources": [{"path": str(path.resolve())} | root for path in manifests], "duplicate_ids": "keep"},
        "model": {"family": _family_of(model), "path": str(model.resolve())},
    }
    configs = (json.dumps(given), *configs)
    config = load_for("profile-shapes", configs)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        for source in list_sources(config.data):
            for shard in _shards(config, source, look_again=True):
                _profile(config, source, shard, Path(folder) / f"{shard.name}.parquet")
        _merge(load_for("merge-shapes", configs), Path(folder), out)
    shapes, rejects = (read_table(out, f"{of}_summary", made_by="shapes") for of in ("shape", "reject"))
    if not len(read_table(out, "samples", made_by="shapes")):
        out.unlink()
        raise UserError(f"{_nothing_usable(rejects)}. Check --media-root")
    click.echo("\n".join([f"{out}:", *_shape_lines(shapes, rejects)]))


def _family_of(model: Path) -> str:
    """The family by the `model_type` in a model's `config.json`, or by that of the part which is trained."""
    import json

    from dflop.models import family_for, family_names

    path = model / "config.json"
    try:
        kind = json.loads(path.read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        kind = None
    if not isinstance(kind, str):
        raise UserError(f"{path} is no model's config with a `model_type`; give --model a model's folder")
    if family := family_for(kind):
        return family
    raise UserError(f"{path}: model_type {kind!r} is not supported; these are: {', '.join(family_names())}")


def _whole(data):
    """A whole `DataConfig` with the keys that profiling reads; other keys have their defaults.

    A config restricted to some keys cannot be sent to other processes.
    """
    from dflop.base.commands import LIMITS
    from dflop.config import DataConfig

    read = [key.removeprefix("data.") for key in LIMITS]
    return DataConfig(**{name: getattr(data, name) for name in read})


def _find_shard(config, name: str):
    """The source and the shard with this name. Watched media are checked again only if the shard is not known yet."""
    from dflop.shapes import list_sources

    sources = list_sources(config.data)
    for look_again in (False, True) if config.data.watch_media else (False,):
        for source in sources:
            for shard in _shards(config, source, look_again=look_again):
                if shard.name == name:
                    return source, shard
    raise UserError(f"no source has a shard `{name}`; `dflop list-shards` prints their names")


def _shards(config, source, *, look_again: bool):
    from dflop.shapes import list_shards

    return list_shards(
        source,
        config.data.samples_per_shard,
        config.seed,
        watch_media=config.data.watch_media,
        look_again=look_again,
    )


@click.command("list-shards")
@config_option
def list_shards_command(configs: tuple[str, ...]) -> None:
    """Print the shards of all sources: name, first record, number of records."""
    from dflop.shapes import list_sources

    config = load_for("merge-shapes", configs)
    for source in list_sources(config.data):
        for shard in _shards(config, source, look_again=True):
            click.echo(f"{shard.name}\t{shard.start}\t{shard.num_records}")


@click.command("merge-shapes")
@config_option
@click.option("--shapes", type=FOLDER, required=True, help="Folder with the shards' Parquet files.")
@click.option("--out", type=FILE, required=True, help="DuckDB file to write.")
@click.option("--bounds", type=FILE, help="JSON file to write: the loads that `dflop profile-costs` is to measure.")
def merge_shapes(configs: tuple[str, ...], shapes: Path, out: Path, bounds: Path | None) -> None:
    """Merge the shards into one database: samples, rejects, sources, and summaries of them."""
    import polars as pl

    from dflop.base import written_whole
    from dflop.costs.design import bounds_of_samples
    from dflop.shapes import BUNDLED_TOKENIZER, tokenizer_folder
    from dflop.shapes.manifests.entries import CUT_OFF
    from dflop.store import read_table

    config = load_for("merge-shapes", configs)
    _merge(config, shapes, out)
    if bounds:
        samples = read_table(out, "samples", made_by="merge-shapes")
        num_items = samples.select(pl.max_horizontal("num_items", "num_audio_windows")).to_series()  # of any encoder
        loads = (column.to_numpy() for column in (num_items, samples["llm_tokens"], samples["target_tokens"]))
        with written_whole(bounds) as path:
            path.write_text(bounds_of_samples(*loads).to_json(), encoding="utf-8")
    shape_summary, reject_summary = (
        read_table(out, f"{of}_summary", made_by="merge-shapes") for of in ("shape", "reject")
    )
    rejects = read_table(out, "rejects", made_by="merge-shapes")
    for source, detail in rejects.filter(pl.col("detail").str.contains(CUT_OFF)).select("source", "detail").iter_rows():
        click.echo(f"warning: a manifest of {source} is not whole, what follows is missing: {detail}")
    num_samples = shape_summary.filter(pl.col("quantity") == "llm_tokens")["num_samples"].sum()
    num_held_out = read_table(out, "samples", made_by="merge-shapes")["evaluation"].sum()
    said = f" ({num_held_out:,} of them held out for evaluation)" if num_held_out else ""
    click.echo(f"{out}: {num_samples:,} samples{said}, {reject_summary['num_records'].sum():,} rejects")
    if not num_samples:
        raise UserError(
            f"{_nothing_usable(reject_summary)}. Check `data.sources` and its `media_root`; {shapes}/*.parquet hold "
            "the reason of every record"
        )
    for line in _shape_lines(shape_summary, reject_summary):
        click.echo(line)
    if tokenizer_folder(config.model) == BUNDLED_TOKENIZER:
        click.echo(
            "text was counted with the small bundled tokenizer; for the counts of a real model set "
            "`model.tokenizer` to its tokenizer directory"
        )


def _merge(config, shapes: Path, out: Path) -> None:
    """Write the database of all sources' shards, whose files are in the folder `shapes`."""
    import polars as pl

    from dflop.shapes import SourceRecords, list_sources
    from dflop.store import HeldOut, ShardFile, write_shapes

    files, source_rows, sampled_rows, held_out = [], [], {}, []
    for source in list_sources(config.data):
        shards = _shards(config, source, look_again=False)
        kept = SourceRecords(source, config.seed).kept
        first_row = kept.start if isinstance(kept, range) else 0
        if not isinstance(kept, range):
            sampled_rows[source.name] = kept
        held_out += [source.name] if source.evaluation else []
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
                "epochs": source.epochs,
                "weight": source.weight,
            }
        )
    write_shapes(
        out,
        files,
        pl.DataFrame(source_rows, schema_overrides={"epochs": pl.Float64, "weight": pl.Float64}),
        meta_of("merge-shapes", config),
        sampled_rows=sampled_rows,
        keep_duplicates=config.data.duplicate_ids == "keep",
        held_out=HeldOut(held_out, config.data.evaluation_share, config.seed),
    )


def _nothing_usable(rejects) -> str:
    """The message where all records were rejected. Without it, only training would fail, after costs are measured."""
    import polars as pl

    reasons = rejects.group_by("reason").agg(pl.col("num_records").sum(), pl.col("examples").first().list.first())
    found = [
        f"{count:,} {reason}, e.g. {example}" for reason, count, example in reasons.sort(-pl.col("num_records")).rows()
    ]
    return f"none of {reasons['num_records'].sum():,} records can be used: {'; '.join(found)}"


def _shape_lines(shapes, rejects) -> list[str]:
    """Lines that describe a dataset: samples, items and tokens by source and modality, and the rejects."""
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
        lines.append(f"{source}: {count:,} rejected as {reason}, e.g. {printable(examples[0][:500])}")
    return lines


@click.command("profile-loading")
@config_option
@click.option("--shapes", type=FILE, required=True, help="shapes.duckdb")
@click.option("--out", type=FILE, required=True, help="Parquet file to write.")
def profile_loading(configs: tuple[str, ...], shapes: Path, out: Path) -> None:
    """Measure how long training's loaders take for a sample of each modality: reading, decoding, tokenising."""
    from dflop.loading.measure import measure_loading
    from dflop.models import check_runnable
    from dflop.store import write_parquet

    config = load_for("profile-loading", configs)
    check_runnable(config.model.family)
    with progress_bar(unit="sample") as bar:
        frame = measure_loading(config, shapes, bar.update)
    write_parquet(frame, out)
    for row in frame.iter_rows(named=True):
        click.echo(
            f"{row['module']} {row['modality']}: {row['seconds'] * 1e3:.3g} ms a sample"
            + (f", {row['media_bytes'] / 1e6:.3g} MB of media" if row["media_bytes"] else "")
            + f"; {row['num_measured']} measured"
            + (f", {row['num_unreadable']} of them damaged" if row["num_unreadable"] else "")
        )
    click.echo(f"{out}: {len(frame)} rows")


@click.command("plot-shapes")
@click.option("--shapes", type=FILE, required=True, help="shapes.duckdb")
@click.option("--out", type=FILE, required=True, help="SVG file to write.")
def plot_shapes_command(shapes: Path, out: Path) -> None:
    """Plot how much samples differ, by modality, and what was rejected."""
    from dflop.report import plot_shapes

    plot_shapes(shapes, out)
    click.echo(str(out))
