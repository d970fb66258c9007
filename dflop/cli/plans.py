"""The commands on plans: the search, and a preview of how the chosen plan's batches are regrouped."""

from pathlib import Path

import click

from dflop.cli.elsewhere import emit_option, from_manifest, print_in_words_of
from dflop.cli.options import FILE, config_option, load_for, run_argument
from dflop.runtime import progress_bar

__all__ = ["plan_command", "schedule_command"]


@click.command("plan")
@config_option
@click.option("--shapes", type=FILE)
@click.option("--costs", type=FILE)
@click.option("--loading", type=FILE, help="What `dflop profile-loading` measured, if it did.")
@click.option("--out", type=FILE, help="plan.yaml to write.")
@click.option("--candidates", type=FILE, help="Parquet file of all priced plans to write.")
@click.option("--explain", is_flag=True, help="Print the ten best plans, what others would run, and what comes next.")
@emit_option
@from_manifest
@run_argument(shapes="shapes.duckdb", costs="costs.duckdb")
def plan_command(
    configs: tuple[str, ...],
    shapes: Path,
    costs: Path,
    loading: Path | None,
    out: Path | None,
    candidates: Path | None,
    explain: bool,
    emit: str | None,
) -> None:
    """Search the layouts and choose the one with the shortest expected step.

    RUN is a run of the workflow, by its name or folder: `dflop plan RUN` explains the plan of its data and costs. What
    is not asked for by --out or --candidates is not written. With --manifest the run is made first, from a manifest and
    a Hugging Face config, with analytic costs: `dflop plan mine --manifest train.json --model FOLDER --config
    cluster.num_nodes=8 --config train.global_batch_size=512` writes results/mine, its report included.
    """
    from dflop.config import excess_memory
    from dflop.costs import CostModel
    from dflop.data import read_loading_times
    from dflop.models import digest_of_spec, load_model_spec
    from dflop.planning import (
        beyond_device,
        candidates_frame,
        describe_choice,
        explain_choice,
        price_baselines,
        require_todays_layout,
    )
    from dflop.runtime import written_whole

    explain = explain or out is None
    config = load_for("plan", configs)
    loading_times = read_loading_times(loading) if loading else None
    if excess := excess_memory(config.cluster):
        click.echo(f"warning: {excess}; plans may not fit there", err=True)
    spec, cost_model = load_model_spec(config.model), CostModel.load(costs)
    cost_model.require_made_for(
        model=digest_of_spec(spec), precision=config.train.precision, device_model=config.cluster.device_model
    )
    all_samples, samples = _samples_to_plan(config, spec, cost_model, shapes)
    require_todays_layout(config, spec, cost_model)
    found = _search(config, spec, cost_model, samples, compares=explain)
    baselines = price_baselines(config, spec, cost_model, samples)
    best = found.best
    need = loading_times and _loading_need(best, loading_times, config)
    if candidates:
        with written_whole(candidates) as path:
            candidates_frame(found).write_parquet(path)
    if out:
        with written_whole(out) as path:
            num_left_out = len(all_samples) - len(samples)
            text = describe_choice(found, baselines, config, cost_model, num_left_out=num_left_out, loading=need)
            path.write_text(text, encoding="utf-8")
    if explain:
        beyond = beyond_device(best.plan, config, spec, cost_model, all_samples)
        click.echo(explain_choice(found, baselines, config, cost_model, beyond) + "\n")
    _echo_choice(out, best, cost_model, need)
    if emit:
        print_in_words_of(emit, best.plan, spec, config.train.global_batch_size)
    if not explain:  # which says the same in full
        _echo_notes(found, baselines, config)


def _loading_need(best, loading_times, config):
    """What loading takes of the hosts under this plan."""
    from dflop.planning import loading_need

    return loading_need(
        best.plan,
        loading_times,
        config.cluster,
        global_batch_size=config.train.global_batch_size,
        step_s=best.step_s,
        idle=best.idle,
    )


def _samples_to_plan(config, spec, cost_model, shapes: Path):
    """All samples of the model's media, and those that some plan can hold; what is left out, and why, is printed."""
    from dflop.data import load_samples
    from dflop.planning import leave_out_what_no_plan_holds
    from dflop.pricing import describe_left_out

    samples, without_encoder = load_samples(shapes, spec.encoders)
    for media, count in without_encoder.items():
        click.echo(f"{count} samples with {media} are left out: the model has no {media} encoder")
    held, left_out = leave_out_what_no_plan_holds(config, spec, cost_model, samples)
    for line in describe_left_out(left_out):
        click.echo(f"by no plan held, so {line}", err=True)
    return samples, held


def _search(config, spec, cost_model, samples, *, compares: bool):
    """What the search finds, with a bar of the plans priced so far."""
    from dflop.planning import search_plans, with_finalists_scheduled

    with progress_bar(unit=" plans", unit_scale=True) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = search_plans(config, spec, cost_model, samples, progress, compares=compares)
        return with_finalists_scheduled(found, config, spec, cost_model, samples)


def _echo_choice(out: Path | None, best, cost_model, need) -> None:
    """The chosen plan in a line, what to know of its price, and what loading needs."""
    from dflop.costs import BEYOND_MEASURED
    from dflop.planning import loading_note

    if best.extrapolated:
        click.echo(f"{best.extrapolated:.1%} of its microbatches {BEYOND_MEASURED}")
    of_costs = "" if cost_model.source == "measured" else f" ({cost_model.source} costs)"
    click.echo(f"{out or 'the plan'}: {best.plan}; expected step {best.step_s:.3g} s{of_costs}, idle {best.idle:.0%}")
    if need:
        click.echo(loading_note(need, best.step_s))


def _echo_notes(found, baselines, config) -> None:
    """What is worth knowing of a chosen plan, where all of it is not asked for."""
    from dflop.planning import faster_baselines_note, uneven_note

    if note := uneven_note(found, config):
        click.echo(note)
    if first := found.passed_over:
        click.echo(f"{1 - first.step_s / found.best.step_s:.0%} shorter, but not trainable yet: {first.plan}")
    if note := faster_baselines_note(found, baselines):
        click.echo(note)


@click.command("schedule")
@config_option
@click.option("--shapes", type=FILE, required=True)
@click.option("--costs", type=FILE, required=True)
@click.option("--plan", "plan_path", type=FILE, required=True)
@click.option("--batches", type=click.IntRange(min=1), default=8, show_default=True, help="Global batches to preview.")
@click.option(
    "--out",
    type=FILE,
    required=True,
    help="Parquet file to write; beside it *_stages.parquet (stage times), *_steps.parquet (gaps, idle) and "
    "*_rejects.parquet (samples too large).",
)
def schedule_command(
    configs: tuple[str, ...], shapes: Path, costs: Path, plan_path: Path, batches: int, out: Path
) -> None:
    """Preview how the first global batches are regrouped, and what that saves."""
    import statistics

    from dflop.balancing import without_cbc
    from dflop.costs import BEYOND_MEASURED
    from dflop.parallelism import load_plan
    from dflop.pricing import describe_left_out
    from dflop.runtime import written_whole
    from dflop.scheduling import preview_frames
    from dflop.scheduling.service import open_scheduler
    from dflop.training import check_devices

    config = load_for("schedule", configs)
    check_devices(config, load_plan(plan_path))
    with open_scheduler(config, shapes=shapes, costs=costs, plan=plan_path).open() as scheduler:
        schedules = [scheduler.schedule(step) for step in range(batches)]
        random_s = [scheduler.at_random(step).step_s for step in range(batches)]
        samples, stages, steps = preview_frames(schedules, scheduler.pricer.nodes)
    for ending, frame in (("", samples), ("_stages", stages), ("_steps", steps), ("_rejects", scheduler.left_out)):
        with written_whole(out.with_name(f"{out.stem}{ending}.parquet")) as beside:
            frame.write_parquet(beside)
    for line in describe_left_out(scheduler.left_out):
        click.echo(line, err=True)
    if share := stages["extrapolated"].mean():
        click.echo(f"{share:.1%} of the ranks' microbatches {BEYOND_MEASURED}")
    step_s = statistics.fmean(schedule.step_s for schedule in schedules)
    bound_s = statistics.fmean(schedule.lower_bound_s for schedule in schedules)
    click.echo(
        f"{out}: {batches} batches by {config.schedule.policy}: predicted step {step_s:.3g} s, "
        f"{statistics.fmean(random_s) / step_s:.2f}x faster than random, {step_s / bound_s:.2f}x the lower bound, "
        f"idle {steps['idle'].mean():.0%}, decided in {steps['deciding_s'].median() * 1e3:.0f} ms at the median"
    )
    if number := sum(without_cbc(schedule.status) for schedule in schedules):
        click.echo(
            f"{number} of them without CBC, which gave no answer; column `status` of {out.stem}_steps.parquet says why"
        )
