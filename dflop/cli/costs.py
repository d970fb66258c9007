"""The commands on costs: modules and links, measured or from a data sheet, and the models fitted to them."""

from dataclasses import asdict
from pathlib import Path

import click

from dflop.base import UserError
from dflop.cli.options import FILE, config_digest, config_option, load_for

__all__ = ["fit_costs_command", "profile_costs", "profile_links"]

# Users are warned where fewer whole stages than this were kept out of the fit, or where the median error is larger.
_FEW_HELD_OUT, _LARGE_ERROR = 6, 0.2


@click.command("profile-costs")
@config_option
@click.option("--module", required=True, help="One of the model's encoders (vision), or llm.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--bounds",
    type=FILE,
    help="What `dflop merge-shapes --bounds` wrote: the loads that the data brings. Without it, a usual range.",
)
@click.option(
    "--out", type=FILE, required=True, help="Parquet file to write; sizes go beside it as *.parameters.parquet."
)
def profile_costs(configs: tuple[str, ...], module: str, tp: int, bounds: Path | None, out: Path) -> None:
    """Find the costs of a module's layers at several sizes: measured on this device, or analytic (`costs.source`)."""
    import polars as pl

    from dflop.costs import require_parquet
    from dflop.models import check_tp, load_model_spec, load_runtime
    from dflop.plan.trained import EVERYTHING

    require_parquet(out)
    config = load_for("profile-costs", configs)
    spec = load_model_spec(config.model)
    check_tp(spec, module, tp)
    if config.model.trained != EVERYTHING:  # to import the family's layers takes seconds, and ranks do it again
        runtime = load_runtime(spec.family)
        runtime.check_trained(spec, runtime.make_config(spec, {}, 0), config.model.trained)
    if config.costs.source == "analytic":
        _write_analytic_costs(config, spec, module, tp, out)
    else:
        _measure_costs(config, spec, module, tp, bounds, out)
    kind = "analytic points" if config.costs.source == "analytic" else "measurements"
    click.echo(f"{out}: {len(pl.read_parquet(out))} {kind}")


def _write_analytic_costs(config, spec, module: str, tp: int, out: Path) -> None:
    """Write points of the roofline of `cluster.device_model`, and a row about that device, in place of measurements."""
    import polars as pl

    from dflop.base.devices import load_device
    from dflop.costs import Measured, write_measured
    from dflop.costs.analytic import analytic_points
    from dflop.costs.measured import measured_as
    from dflop.models import digest_of_spec

    models_file = config.cluster.device_models
    device = load_device(config.cluster.device_model, Path(models_file) if models_file else None)
    points = analytic_points(spec, module, tp, device, config.layers_of_costs, trained=config.model.trained)
    about = {
        "device": f"{config.cluster.device_model} (analytic)",
        "model": digest_of_spec(spec),
        "device_model": config.cluster.device_model,
        "source": "analytic",
        "module": module,
        "tp": tp,
        "num_ranks": tp,
        "threads": 0,
        **measured_as(config.model.trained.among(spec.modules), module),
        "precision": "bf16",
        "torch": "",
        "overhead_bytes": int(device.overhead_bytes),
        "communicator_bytes": int(device.communicator_bytes),
        "allocator_share": device.allocator_share,
        "update_bytes_per_s": device.update_bytes_per_s,
        "seconds": 0.0,
        "config_digest": config_digest("profile-costs", config, device=asdict(device)),
    }
    about |= dict.fromkeys(("attention", "sm_mhz_before", "sm_mhz_after"))  # nothing ran
    write_measured(out, Measured(points.measurements, points.parameters, pl.DataFrame([about])))


def _measure_costs(config, spec, module: str, tp: int, bounds: Path | None, out: Path) -> None:
    """Measure on ranks of this node, which torchrun starts; the first of them writes the files."""
    from dflop.base.commands import COMMANDS
    from dflop.base.torchrun import run_ranks
    from dflop.config import select_keys
    from dflop.costs.design import load_bounds
    from dflop.models import check_runnable
    from dflop.shapes import ChatTokenizer, tokenizer_folder

    check_runnable(spec.family)
    if bounds:
        load_bounds(bounds)
    cluster = config.cluster
    if tp > cluster.devices_per_node:
        raise UserError(
            f"tp={tp}: a node has {cluster.devices_per_node} devices (`cluster.devices_per_node`), and tensor "
            "parallelism does not cross nodes; take smaller `costs.tp_sizes`"
        )
    tokenizer = ChatTokenizer(tokenizer_folder(config.model))  # refused here in one line, not by every rank
    request = {
        "config": select_keys(config, COMMANDS["profile-costs"].reads),
        "module": module,
        "tp": tp,
        "bounds": str(bounds) if bounds else None,
        "tokenizer": str(tokenizer.folder),
        "out": str(out),
        "config_digest": config_digest("profile-costs", config),
    }
    per_node = tp if cluster.device == "cuda" else cluster.devices_per_node // tp * tp
    code, _ = run_ranks("dflop.costs.profile_rank", request, cluster, num_nodes=1, per_node=per_node)
    if code:
        raise UserError(f"measuring {module} at tp={tp} ended early (torchrun's exit code {code}); see above")


@click.command("profile-links")
@config_option
@click.option(
    "--max-bytes", type=click.IntRange(min=2**20), default=64 * 2**20, show_default=True, help="Largest message."
)
@click.option("--out", type=FILE, required=True, help="Parquet file to write.")
def profile_links(configs: tuple[str, ...], max_bytes: int, out: Path) -> None:
    """Time transfers and gradient syncs between the cluster's devices, and copies to their hosts: torchrun on all."""
    from dflop.base.first_node import last_words_told

    with last_words_told(out.parent):
        _time_links(configs, max_bytes, out)


@click.command("fit-costs")
@click.argument("measurements", nargs=-1, required=True, type=FILE)
@click.option("--links", "links_path", type=FILE, help="What `dflop profile-links` measured, if it did.")
@click.option("--out", type=FILE, required=True, help="DuckDB file to write.")
def fit_costs_command(measurements: tuple[Path, ...], links_path: Path | None, out: Path) -> None:
    """Fit the time and memory model to measurements, with its error on whole stages kept out of the fit."""
    import polars as pl

    from dflop.base.commands import code_digest
    from dflop.costs import fit_costs, fit_links, measured_communicator_bytes, read_links, read_measured
    from dflop.store import write_costs

    measured = read_measured(measurements)
    (source,) = measured.device["source"].unique()
    tables = fit_costs(measured.measurements, measured.parameters, source)
    device = measured.device
    if links_path:
        links = read_links(links_path)
        tables |= {"links": links, "link_model": fit_links(links)}
        if (num_bytes := measured_communicator_bytes(links)) is not None:
            device = device.with_columns(communicator_bytes=pl.lit(num_bytes))
    write_costs(
        out,
        {"measurements": measured.measurements, "device": device, **tables},
        {
            "source": source,
            "config_digest": ",".join(measured.device["config_digest"].unique().sort()),
            "code_digest": code_digest("fit-costs"),
        },
    )
    if source == "analytic":
        click.echo(f"{out}: analytic; docs/explanation/measurements/analytic-costs.md says how far off such costs are")
    else:
        click.echo(f"{out}: error on whole stages, which no fit saw")
    for row in tables["fit_error"].iter_rows(named=True):
        click.echo(
            f"  {row['module']} tp{row['tp']} {row['pass'] or 'peak memory'}: median {row['median_error']:.1%}, "
            f"p95 {row['p95_error']:.1%} of {row['num_held_out']}"
        )
    errors = tables["fit_error"]
    if len(errors) and (errors["num_held_out"].min() < _FEW_HELD_OUT or errors["median_error"].max() > _LARGE_ERROR):
        click.echo(
            "  these errors are large, or come from few measurements; raise `costs.time_budget_s`, or measure on a "
            "machine that does nothing else"
        )
    for row in tables["link_model"].iter_rows(named=True) if links_path else ():
        click.echo(
            f"  {row['kind']} {row['scope']}, {row['num_ranks']} ranks: {row['latency_s'] * 1e6:.3g} µs and "
            f"{row['bytes_per_s'] / 1e9:.3g} GB/s, median error {row['median_error']:.0%} of {row['num_points']} sizes"
        )


def _time_links(configs: tuple[str, ...], max_bytes: int, out: Path) -> None:
    import polars as pl

    from dflop.base.torchrun import is_first_node, run_ranks

    config = load_for("profile-links", configs)
    cluster = config.cluster
    request = {
        "device": cluster.device,
        "repeats": config.costs.repeats,
        "max_bytes": max_bytes,
        "out": str(out),
    }
    size = {"num_nodes": cluster.num_nodes, "per_node": cluster.devices_per_node}
    code, stopped = run_ranks("dflop.costs.links", request, cluster, **size, shared=out.parent)
    if code:
        why = "was stopped by SIGTERM" if stopped else f"ended early (torchrun's exit code {code}); see above"
        raise UserError(f"measuring links {why}")
    if is_first_node(cluster):
        click.echo(f"{out}: {len(pl.read_parquet(out))} measurements")
