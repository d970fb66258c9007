"""The report: one page on a run, its pictures as files of their own, and its figures as numbers.

This file computes what the page and the pictures show. Each picture has a file in `charts`, and the page has a folder.
Every number is marked as predicted or measured.
"""

import sys
from pathlib import Path

from dflop.config import Config
from dflop.models import load_model_spec
from dflop.report.charts import draw_all
from dflop.report.charts.shapes import draw_shapes
from dflop.report.facts import Facts
from dflop.report.figures import write_figures
from dflop.report.memory import memory_section
from dflop.report.page import write_page
from dflop.report.picture import write_picture
from dflop.report.run import Run, TrainedRun, read_run
from dflop.report.savings import savings_section
from dflop.report.schedules import PreviewPrices, price_preview
from dflop.report.steps import show_step
from dflop.schedule import BatchScheduler, prices_digest
from dflop.schedule.service import open_scheduler
from dflop.store import read_table

__all__ = ["plot_shapes", "write_report"]


def write_report(config: Config, run_folder: Path, out: Path) -> list[Path]:
    """Write the page, the pictures and `summary.json`, which is written last; returns their paths.

    If the run was not trained yet, the page and the pictures leave training out. The file of the picture of the shapes
    is left to `plot_shapes`, which draws it before there are costs.

    Raises:
        UserError: when the data, the costs or the plan are missing, naming the command that makes them.
    """
    run = read_run(run_folder)
    names = {"shapes": "shapes.duckdb", "costs": "costs.duckdb", "plan": "plan.yaml"}
    scheduler = open_scheduler(config, **{name: run_folder / file for name, file in names.items()})
    with scheduler.open():
        of_these = _of_these(run, prices_digest(scheduler.pricer))
        preview = None
        if run.preview is not None:
            preview = price_preview(scheduler, run.preview, run_folder / "schedule.parquet")
        facts = _facts(config, run, of_these, scheduler, preview)
        pictures = draw_all(facts)
        written = [write_page(facts, pictures, scheduler, out / "index.html")]
    if facts.is_foreign:
        print(
            f"dflop: warning: {run_folder / 'train'} was trained with other costs or another plan than costs.duckdb "
            "and plan.yaml hold: training.svg shows that run, and timeline.svg no measured step; `train.resume: never` "
            "trains anew",
            file=sys.stderr,
        )
    for name in sorted(pictures.keys() - {"shapes"}):
        written.append(out / f"{name}.svg")
        write_picture(pictures[name], written[-1])
    write_figures(out / "summary.json", facts, num_too_large=len(scheduler.left_out))
    return [*written, out / "summary.json"]


def _of_these(run: Run, prices: str) -> TrainedRun | None:
    """The training, if it was done with the present costs and plan; else None. `prices` is their digest."""
    return run.trained if run.trained and run.trained.summary.get("prices") in (None, prices) else None


def _facts(
    config: Config, run: Run, trained: TrainedRun | None, scheduler: BatchScheduler, preview: PreviewPrices | None
) -> Facts:
    shown = show_step(scheduler, config.schedule.policy, trained)
    predicted_bytes = run.plan_text.get("predicted", {}).get("memory_bytes", {})
    measured_bytes = trained.summary.get("peak_memory_bytes", {}) if trained else {}
    return Facts(
        config=config,
        spec=load_model_spec(config.model),
        run=run,
        trained=trained,
        preview=preview,
        shown=shown,
        memory=memory_section(scheduler.pricer, shown.schedule, preview, predicted_bytes, measured_bytes),
        savings=savings_section(
            run,
            trained,
            config.cluster,
            num_samples=scheduler.batches.samples_per_epoch,
            batch_size=config.train.global_batch_size,
        ),
    )


def plot_shapes(shapes: Path, out: Path) -> None:
    """Draw the shapes of a dataset, from `shapes.duckdb` alone.

    Raises:
        UserError: when that file is missing.
    """
    samples, rejects = (read_table(shapes, table, made_by="merge-shapes") for table in ("samples", "rejects"))
    write_picture(draw_shapes(samples, rejects), out)
