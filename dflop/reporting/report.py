"""The report: one page on a run, its plots as files of their own, and its figures as numbers.

This file computes what the plots and the page show. Each plot has a file that draws what it is given, and the page has
a folder. Every number is marked as predicted or measured.
"""

import sys
from pathlib import Path

from dflop.config import Config
from dflop.models import load_model_spec
from dflop.pricing import prices_digest
from dflop.reporting.costs import costs_height_in, draw_costs, measured_points
from dflop.reporting.figures import write_figures
from dflop.reporting.page import PageParts, write_page
from dflop.reporting.plans import draw_plans, plans_height_in
from dflop.reporting.run import Run, TrainedRun, read_run
from dflop.reporting.schedules import price_preview
from dflop.reporting.shapes import draw_shapes, shapes_height_in
from dflop.reporting.steps import StepShown, show_step
from dflop.reporting.style import drawing
from dflop.reporting.time_split import draw_time_split, time_split_height_in
from dflop.reporting.timeline import draw_timeline, timeline_height_in
from dflop.reporting.training import draw_training
from dflop.scheduling.service import open_scheduler
from dflop.store import read_table
from dflop.training import rank_names

__all__ = ["plot_shapes", "write_report"]

_FOREIGN = "; the run was trained by another plan or other costs"


def write_report(config: Config, run_folder: Path, out: Path) -> list[Path]:
    """Write the page, the plots and `summary.json`, which is written last; returns their paths.

    If the run was not trained yet, the page and the plots leave training out. `plot_shapes` draws the data.

    Raises:
        UserError: when the data, the costs or the plan are missing, naming the command that makes them.
    """
    run = read_run(run_folder)
    names = {"shapes": "shapes.duckdb", "costs": "costs.duckdb", "plan": "plan.yaml"}
    scheduler = open_scheduler(config, **{name: run_folder / file for name, file in names.items()})
    with scheduler.open():
        of_these = _of_these(run, prices_digest(scheduler.pricer))
        preview = run.preview is not None and price_preview(scheduler, run.preview, run_folder / "schedule.parquet")
        shown = show_step(scheduler, config.schedule.policy, of_these)
        spec = load_model_spec(config.model)
        parts = PageParts(config=config, spec=spec, run=run, trained=of_these, shown=shown)
        written = [write_page(parts, scheduler, preview or None, out / "index.html")]
    is_foreign = run.trained is not None and of_these is None
    if is_foreign:
        print(
            f"dflop: warning: {run_folder / 'train'} was trained with other costs or another plan than costs.duckdb "
            "and plan.yaml hold: training.svg shows that run, and timeline.svg no measured step; `train.resume: never` "
            "trains anew",
            file=sys.stderr,
        )
    written += _draw(config, run, shown, shown.finding + _FOREIGN * is_foreign, out)
    write_figures(
        out / "summary.json",
        config.run,
        run,
        spec,
        preview or None,
        shown,
        policy=config.schedule.policy,
        num_too_large=len(scheduler.left_out),
        is_of_these=not is_foreign,
    )
    return [*written, out / "summary.json"]


def _of_these(run: Run, prices: str) -> TrainedRun | None:
    """The training, if it was done with the present costs and plan; else None. `prices` is their digest."""
    return run.trained if run.trained and run.trained.summary.get("prices") in (None, prices) else None


def _draw(config: Config, run: Run, shown: StepShown, finding: str, out: Path) -> list[Path]:
    """The plots as files, for papers and slides."""
    points = measured_points(run.measurements, run.costs)
    paths = [out / f"{name}.svg" for name in ("costs", "plans", "timeline")]
    with drawing(paths[0], costs_height_in(points)) as figure:
        draw_costs(figure, points, run.fit_error, run.costs, run.costs_meta, run.device_name)
    with drawing(paths[1], plans_height_in(run.candidates)) as figure:
        draw_plans(figure, run.candidates, run.plan, config.cluster.memory_gib)
    with drawing(paths[2], timeline_height_in(run.plan, len(shown.panels))) as figure:
        draw_timeline(figure, shown.panels, run.plan, finding)
    if run.trained is None:
        return paths
    paths += [out / f"{name}.svg" for name in ("training", "time_split")]
    with drawing(paths[3], 6.2) as figure:
        draw_training(figure, run.trained.metrics)
    with drawing(paths[4], time_split_height_in(run.trained.step_seconds)) as figure:
        found = (run.trained.summary.get("time_split") or {}).get("bound_by")
        draw_time_split(figure, run.trained.step_seconds, rank_names(run.trained.observations), found)
    return paths


def plot_shapes(shapes: Path, out: Path) -> None:
    """Draw the shapes of a dataset, from `shapes.duckdb` alone.

    Raises:
        UserError: when that file is missing.
    """
    samples, rejects = (read_table(shapes, table, made_by="merge-shapes") for table in ("samples", "rejects"))
    with drawing(out, shapes_height_in(samples, rejects)) as figure:
        draw_shapes(figure, samples, rejects)
