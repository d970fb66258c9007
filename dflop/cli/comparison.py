"""The command that compares: what others would run, and we, on the same data, costs and cluster."""

from pathlib import Path

import click

from dflop.cli.options import FILE, config_option, load_for, run_argument
from dflop.runtime import progress_bar

__all__ = ["compare_command"]


@click.command("compare")
@config_option
@click.option("--shapes", type=FILE)
@click.option("--costs", type=FILE)
@click.option("--batches", type=click.IntRange(min=1), default=4, show_default=True, help="Global batches to price.")
@click.option("--out", type=FILE, help="Parquet file to write; beside it the same as *.json and a figure, *.svg.")
@run_argument(shapes="shapes.duckdb", costs="costs.duckdb", out="comparison.parquet")
def compare_command(configs: tuple[str, ...], shapes: Path, costs: Path, batches: int, out: Path) -> None:
    """Price published ways to train beside ours: the same batches, costs and cluster, one simulator.

    RUN is a run of the workflow, by its name or folder; then the files are the run's.
    """
    from dflop.comparison import SYSTEMS, compare_systems, comparison_frame, comparison_json, comparison_text
    from dflop.costs import CostModel
    from dflop.data import load_samples
    from dflop.models import digest_of_spec, load_model_spec
    from dflop.planning import leave_out_what_no_plan_holds
    from dflop.reporting.comparison import plot_comparison
    from dflop.runtime import written_whole

    config = load_for("compare", configs)
    spec = load_model_spec(config.model)
    samples, _ = load_samples(shapes, spec.encoders)
    cost_model = CostModel.load(costs)
    cost_model.require_made_for(
        model=digest_of_spec(spec), precision=config.train.precision, device_model=config.cluster.device_model
    )
    samples, left_out = leave_out_what_no_plan_holds(config, spec, cost_model, samples)
    if len(left_out):
        click.echo(f"{len(left_out)} samples are left out: no plan holds them", err=True)
    with progress_bar(unit=" systems", total=len(SYSTEMS) + 1) as bar:

        def progress(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update(1)

        rows = compare_systems(config, spec, cost_model, samples, num_batches=batches, progress=progress)
    with written_whole(out) as path:
        comparison_frame(rows).write_parquet(path)
    with written_whole(out.with_suffix(".json")) as path:
        path.write_text(comparison_json(rows, config, cost_model), encoding="utf-8")
    plot_comparison(rows, out.with_suffix(".svg"))
    click.echo(comparison_text(rows))
