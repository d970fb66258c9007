"""The command that compares other systems with ours on the same data, costs and cluster."""

from pathlib import Path
from typing import Any

import click

from dflop.base import UserError, progress_bar
from dflop.cli.measuring import may_measure
from dflop.cli.options import FILE, config_option, load_compared, load_for, run_argument

__all__ = ["compare_command"]


@click.command("compare")
@config_option
@click.option("--shapes", type=FILE)
@click.option("--costs", type=FILE)
@click.option("--batches", type=click.IntRange(min=1), default=4, show_default=True, help="Global batches to price.")
@click.option("--out", type=FILE, help="Parquet file to write; beside it the same as *.json and a figure, *.svg.")
@click.option(
    "--ablate",
    is_flag=True,
    help="In place of other systems, ours taken apart: plan, balance, order, schedule, sharding, one at a time.",
)
@click.option(
    "--scale",
    metavar="N,N,...",
    help="At each of these numbers of devices, with batches that grow with them: 8,64,512. Writes *-scale.parquet.",
)
@run_argument(shapes="shapes.duckdb", costs="costs.duckdb", out="comparison.parquet")
@may_measure
def compare_command(
    configs: tuple[str, ...], shapes: Path, costs: Path, batches: int, out: Path, ablate: bool, scale: str | None
) -> None:
    """Price published ways to train, and `plan.today`, beside ours: the same batches, costs and cluster, one simulator.

    RUN is a run of the workflow, by its name or folder; then the files are the run's.
    """
    from dflop.comparison import keys_of_size, scaling_frame, scaling_text
    from dflop.store import write_parquet

    config = load_for("compare", configs)
    if ablate:
        out = out.with_stem(f"{out.stem}-ablation")
    if scale is None:
        _write(_rows(config, shapes, costs, batches, ablate=ablate), config, costs, out)
        return
    sizes = {size: load_for("compare", (*configs, *keys_of_size(config, size))) for size in _sizes(scale)}
    found = {}
    for size, sized in sizes.items():
        click.echo(f"{size} devices", err=True)
        found[size] = _rows(sized, shapes, costs, batches, ablate=ablate)
    write_parquet(scaling_frame(found), out.with_stem(f"{out.stem}-scale"))
    click.echo(scaling_text(found))


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise UserError(f"--scale is {text!r}; give numbers of devices with commas between them: 8,64,512") from None


def _rows(config: Any, shapes: Path, costs: Path, batches: int, *, ablate: bool) -> list:
    """A row for each system. Samples that no plan can hold are left out, and their number is printed."""
    from dflop.comparison import ABLATION, compare_systems, systems_of

    spec, cost_model, samples, left_out = load_compared(config, shapes, costs)
    if len(left_out):
        click.echo(f"{len(left_out)} samples are left out: no plan holds them", err=True)
    systems = ABLATION if ablate else systems_of(config)
    with progress_bar(unit=" systems", total=len(systems) + 1) as bar:

        def progress(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update(1)

        return compare_systems(
            config, spec, cost_model, samples, num_batches=batches, systems=systems, progress=progress
        )


def _write(rows: list, config: Any, costs: Path, out: Path) -> None:
    """Write the table as Parquet, JSON and a figure, and print it."""
    from dflop.base import written_whole
    from dflop.comparison import comparison_frame, comparison_json, comparison_text
    from dflop.costs import CostModel
    from dflop.report.comparison import plot_comparison
    from dflop.store import write_parquet

    write_parquet(comparison_frame(rows), out)
    with written_whole(out.with_suffix(".json")) as path:
        path.write_text(comparison_json(rows, config, CostModel.load(costs)), encoding="utf-8")
    plot_comparison(rows, out.with_suffix(".svg"))
    click.echo(comparison_text(rows))
