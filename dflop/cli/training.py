"""The last commands of the workflow: training with the plan, and the report of a run."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflop.cli.emulation import may_emulate
from dflop.cli.options import FILE, FOLDER, config_option, load_for, meta_of, run_argument

if TYPE_CHECKING:
    from dflop.train.run_folder import MeasuredOn

__all__ = ["report_command", "train_command"]


@click.command("train")
@config_option
@click.option("--shapes", type=FILE, required=True)
@click.option("--costs", type=FILE)
@click.option("--plan", "plan_path", type=FILE, required=True)
@click.option("--out", type=FOLDER, required=True, help="Folder for metrics, checkpoints, the model and summary.json.")
@may_emulate
def train_command(configs: tuple[str, ...], shapes: Path, costs: Path, plan_path: Path, out: Path) -> None:
    """Train with the plan: torchrun starts its ranks, and a process beside them schedules the batches."""
    from dflop.base.first_node import last_words_told

    with last_words_told(out):
        _train(configs, shapes, costs, plan_path, out)


@click.command("report")
@config_option
@click.option("--run", "run_folder", type=FOLDER, help="results/<run>, with all earlier artifacts.")
@click.option("--out", type=FOLDER, help="Folder for index.html, the plots and summary.json.")
@run_argument(run_folder="", out="report")
def report_command(configs: tuple[str, ...], run_folder: Path, out: Path) -> None:
    """Write the page on a run, its plots, and its figures: data, costs, plan, memory, one step, training, savings.

    RUN is a run of the workflow, by its name or folder; then the files are written to its `report/`. The page of a run
    that was not trained yet has no part on training.
    """
    from dflop.report import write_report

    config = load_for("report", configs)
    for path in write_report(config, run_folder, out):
        click.echo(str(path))


def _train(configs: tuple[str, ...], shapes: Path, costs: Path, plan_path: Path, out: Path) -> None:
    from dflop.base.torchrun import is_first_node
    from dflop.config import set_steps
    from dflop.models import check_adapter, check_parts, check_runnable, check_weights, load_model_spec
    from dflop.plan import load_plan
    from dflop.schedule import describe_left_out
    from dflop.schedule.service import open_evaluation, open_scheduler
    from dflop.search import planned_loaders
    from dflop.shapes import list_sources
    from dflop.store import read_table
    from dflop.train import (
        check_plan,
        check_resumable,
        check_trackers,
        finished_at,
        generation_of,
        launch_ranks,
        sole_use,
    )

    config = load_for("train", configs)
    list_sources(config.data)  # what is wrong with them is said before an earlier run is set aside
    check_runnable(config.model.family)
    check_weights(config.model.weights)
    spec = load_model_spec(config.model)
    check_parts(spec, config.train.part_names)
    check_adapter(spec, config.model)
    plan = load_plan(plan_path)
    check_plan(plan_path, plan, spec)
    loaders = planned_loaders(plan_path, plan.world_size)
    most = max(loaders)
    if config.train.loader_workers and config.train.loader_workers < most:
        click.echo(
            f"dflop: `train.loader_workers` is {config.train.loader_workers}, and the plan found that a rank needs "
            f"{most}: ranks will wait for data; leave it out to have as many as each rank needs",
            err=True,
        )
    sources = read_table(shapes, "sources", made_by="merge-shapes")
    data_digests = sources["digest"].to_list() + [str(row) for row in sources["epochs", "weight"].rows() if any(row)]
    # Problems with the samples, costs and plan are reported here, before any rank starts.
    scheduler = open_scheduler(config, shapes=shapes, costs=costs, plan=plan_path)
    steps_are_given = config.train.epochs is None
    if not steps_are_given:
        set_steps(config, scheduler.batches.steps_in(config.train.epochs))
    check_trackers(config.train.tensorboard)
    left_out = scheduler.left_out
    for line in describe_left_out(left_out):
        click.echo(line, err=True)
    with scheduler.open():
        scheduler.check(config.train.steps)
    if config.data.has_evaluation:
        open_evaluation(config, shapes=shapes, costs=costs, plan=plan_path)
    generation = generation_of(config, data_digests, left_out["source", "row"].rows(), scheduler.pricer)
    out.mkdir(parents=True, exist_ok=True)
    is_first = is_first_node(config.cluster)
    with ExitStack() as held:
        if is_first:  # of several nodes it holds the lock, and the others wait for its word
            held.enter_context(sole_use(out))
        check_resumable(config, out, generation, steps_are_given=steps_are_given)
        if checkpoint := finished_at(config, out, generation):
            click.echo(
                f"dflop: this run is finished: {checkpoint} is its last step. A larger `train.steps` continues it, "
                "`train.resume: never` trains anew. Its summary files are now written again from its results"
            )
        else:
            arguments = {"shapes": str(shapes), "costs": str(costs), "plan": str(plan_path), "out": str(out)}
            arguments |= {"measured_on": _measured_on(costs), "generation": generation.to_dict()}
            arguments["loaders_of_ranks"] = loaders
            launch_ranks(config, plan=plan_path, arguments=arguments)
        if is_first:
            _write_results(config, out, plan_path, generation, left_out)


def _write_results(config, out: Path, plan_path: Path, generation, left_out) -> None:
    """Write observations, trace and summary from the ranks' files, and print a line on them."""
    from dflop.base import written_whole
    from dflop.search import read_baselines
    from dflop.train import merge_observations, summarise
    from dflop.train.trace import chrome_trace

    meta = meta_of("train", config)
    merged = merge_observations(out / "observations", out / "observations.duckdb", left_out, meta)
    with written_whole(out / "trace.json") as path:
        path.write_text(json.dumps(chrome_trace(*merged)), encoding="utf-8")
    summary = summarise(
        config, out, merged, generation, baselines=read_baselines(plan_path), num_left_out=len(left_out)
    )
    click.echo(
        f"{out / 'summary.json'}: loss {summary['mean_first_loss']:.3f} -> {summary['mean_final_loss']:.3f} (means of "
        f"{summary['num_averaged_losses']}), {summary['tokens_per_s']:,.0f} tokens/s, idle {summary['idle']:.0%}, "
        f"model in {out / 'model'}"
    )
    if summary["time_split"]:
        click.echo(f"dflop: {summary['time_split']['bound_by']}")
    if summary["prices"] != generation.prices:
        click.echo(
            "dflop: costs.duckdb or plan.yaml have changed since this run was trained: measured times are compared "
            "with the predictions from before the change",
            err=True,
        )
    if rerun := summary["correction"]["rerun"]:
        click.echo(f"dflop: {rerun}", err=True)


def _measured_on(costs: Path) -> "MeasuredOn | None":
    """What the costs were measured on; None where they are analytic.

    There is only one such device (`read_measured` checks that).
    """
    from dflop.store import read_meta, read_tables
    from dflop.train.run_folder import MeasuredOn

    if read_meta(costs, made_by="fit-costs").get("source", "measured") != "measured":
        return None
    row, *_ = read_tables(costs, ["device"], made_by="fit-costs")["device"]
    return MeasuredOn(row["device"], row.get("attention"))
