"""The commands on plans: the search, and a preview of how the chosen plan's batches are regrouped."""

from pathlib import Path

import click

from dflop.base import progress_bar
from dflop.cli.elsewhere import emit_option, from_manifest, print_in_words_of
from dflop.cli.options import FILE, config_option, leave_out_impossible_today, load_for, run_argument

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

    RUN is a run of the workflow, by its name or folder: `dflop plan RUN` explains the plan for its data and costs.
    Files are only written where --out or --candidates name them. With --manifest the run is made first, from a manifest
    and a Hugging Face config, with analytic costs: `dflop plan mine --manifest train.json --model FOLDER --config
    cluster.num_nodes=8 --config train.global_batch_size=512` writes results/mine with its report.
    """
    from dflop.base import written_whole
    from dflop.comparison import price_baselines
    from dflop.config import excess_memory, require_known_memory
    from dflop.costs import CostModel
    from dflop.loading import read_loading_times
    from dflop.models import load_model_spec
    from dflop.search import (
        candidates_frame,
        describe_choice,
        explain_choice,
    )
    from dflop.store import write_parquet

    explain = explain or out is None
    config = load_for("plan", configs)
    loading_times = read_loading_times(loading) if loading else None
    require_known_memory(config.cluster)
    if excess := excess_memory(config.cluster):
        click.echo(f"warning: {excess}; plans may not fit there", err=True)
    spec, cost_model = load_model_spec(config.model), CostModel.load(costs)
    cost_model.require_made_for(spec, config)
    all_samples, samples = _samples_to_plan(config, spec, cost_model, shapes)
    leave_out_impossible_today(config, spec, cost_model)
    found = _search(config, spec, cost_model, samples, compares=explain)
    if found.trouble:
        click.echo(f"warning: not all batches of the first 200 steps fit: {found.trouble}", err=True)
    baselines = price_baselines(config, spec, cost_model, samples)
    best = found.best
    need = loading_times and _loading_need(best, loading_times, config)
    if candidates:
        write_parquet(candidates_frame(found), candidates)
    if out:
        with written_whole(out) as path:
            num_left_out = len(all_samples) - len(samples)
            text = describe_choice(found, baselines, config, cost_model, num_left_out=num_left_out, loading=need)
            path.write_text(text, encoding="utf-8")
    if explain:
        click.echo(explain_choice(found, baselines, config, cost_model) + "\n")
    _echo_choice(out, best, cost_model, need)
    _echo_price(configs, best, baselines, num_samples=float(samples.times_drawn().sum()))
    if emit:
        about = {"config": config, "spec": spec, "costs": cost_model, "samples": samples}
        print_in_words_of(emit, found, baselines, out, **about)
    if not explain:  # which says the same in full
        _echo_notes(found, baselines, config)


def _loading_need(best, loading_times, config):
    """The loader processes and core time that this plan needs."""
    from dflop.search import loading_need

    return loading_need(
        best.plan,
        loading_times,
        config.cluster,
        global_batch_size=config.train.global_batch_size,
        step_s=best.step_s,
        idle=best.idle,
    )


def _samples_to_plan(config, spec, cost_model, shapes: Path):
    """All samples with media that the model reads, and those of them that some plan can hold.

    The others are printed with the reason.
    """
    from dflop.schedule import describe_left_out
    from dflop.search import leave_out_what_no_plan_holds
    from dflop.shapes import load_samples

    samples, without_encoder = load_samples(shapes, spec.encoders)
    for media, count in without_encoder.items():
        click.echo(f"{count} samples with {media} are left out: the model has no {media} encoder")
    longest = int(samples.llm_tokens.max())
    if spec.most_positions and longest > spec.most_positions:
        count = int((samples.llm_tokens > spec.most_positions).sum())
        click.echo(
            f"warning: {count} samples have up to {longest:,} tokens, more than {spec.name} has positions "
            f"({spec.most_positions:,}): lower `data.max_llm_tokens`, or set `rope_scaling` in the checkpoint's config",
            err=True,
        )
    held, left_out = leave_out_what_no_plan_holds(config, spec, cost_model, samples)
    for line in describe_left_out(left_out):
        click.echo(f"too large for any plan, so {line}", err=True)
    return samples, held


def _search(config, spec, cost_model, samples, *, compares: bool):
    """The result of the search, with a progress bar of the plans decided so far."""
    from dflop.search import search_plans, with_finalists_scheduled

    with progress_bar(unit=" plans", unit_scale=True) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = search_plans(config, spec, cost_model, samples, progress, compares=compares)
        return with_finalists_scheduled(found, config, spec, cost_model, samples)


def _echo_choice(out: Path | None, best, cost_model, need) -> None:
    """Print the chosen plan in one line, a warning about extrapolated costs, and a note on loading."""
    from dflop.costs import BEYOND_MEASURED
    from dflop.search import loading_note

    if best.extrapolated:
        click.echo(f"{best.extrapolated:.1%} of the plan's microbatches {BEYOND_MEASURED}")
    of_costs = "" if cost_model.source == "measured" else f" ({cost_model.source} costs)"
    click.echo(f"{out or 'the plan'}: {best.plan}; expected step {best.step_s:.3g} s{of_costs}, idle {best.idle:.0%}")
    if need:
        click.echo(loading_note(need, best.step_s))


def _echo_price(configs: tuple[str, ...], best, baselines, *, num_samples: float) -> None:
    """Print the price of an epoch, if the config has a price.

    The workflow does not pass the price to `dflop plan`, so that another price does not rerun the search; its report
    shows the price.
    """
    from dflop.config import load_config
    from dflop.search import Epoch, price_note

    config = load_config(*configs, has_cluster=True)
    epoch = Epoch(
        num_samples=num_samples,
        global_batch_size=config.train.global_batch_size,
        num_devices=best.plan.world_size,
    )
    if note := price_note(epoch, config.cluster, best.step_s, baselines):
        click.echo(note)


def _echo_notes(found, baselines, config) -> None:
    """Print notes on the chosen plan, for output without `--explain`."""
    from dflop.search import faster_baselines_note, uneven_note

    if note := uneven_note(found, config):
        click.echo(note)
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

    from dflop.balance import without_cbc
    from dflop.costs import BEYOND_MEASURED
    from dflop.plan import load_plan
    from dflop.schedule import describe_left_out, preview_frames
    from dflop.schedule.service import open_scheduler
    from dflop.store import write_parquet
    from dflop.train import check_devices

    config = load_for("schedule", configs)
    check_devices(config, load_plan(plan_path))
    with open_scheduler(config, shapes=shapes, costs=costs, plan=plan_path).open() as scheduler:
        schedules = [scheduler.schedule(step) for step in range(batches)]
        at_random = [scheduler.at_random(step) for step in range(batches)]
        samples, stages, steps = preview_frames(schedules, scheduler.pricer.nodes)
    for ending, frame in (("", samples), ("_stages", stages), ("_steps", steps), ("_rejects", scheduler.left_out)):
        write_parquet(frame, out.with_name(f"{out.stem}{ending}.parquet"))
    for line in describe_left_out(scheduler.left_out):
        click.echo(line, err=True)
    if share := stages["extrapolated"].mean():
        click.echo(f"{share:.1%} of the ranks' microbatches {BEYOND_MEASURED}")
    step_s = statistics.fmean(schedule.step_s for schedule in schedules)
    bound_s = statistics.fmean(schedule.lower_bound_s for schedule in schedules)
    random_s = statistics.fmean(schedule.step_s for schedule in at_random)
    num_beyond = sum(schedule.num_beyond_memory for schedule in at_random)
    beyond = f" (whose groups do not fit into memory in {num_beyond} of {batches} batches)" if num_beyond else ""
    click.echo(
        f"{out}: {batches} batches by {config.schedule.policy}: predicted step {step_s:.3g} s, "
        f"{random_s / step_s:.2f}x faster than random{beyond}, {step_s / bound_s:.2f}x the lower bound, "
        f"idle {steps['idle'].mean():.0%}, decided in {steps['deciding_s'].median() * 1e3:.0f} ms at the median"
    )
    if len(shared := samples.filter(samples["degree"] > 1, share=0)):
        click.echo(f"{len(shared)} long samples over up to {shared['degree'].max()} replicas of the LLM each")
    if number := sum(without_cbc(schedule.status) for schedule in schedules):
        click.echo(
            f"{number} of them without CBC, which gave no answer; column `status` of {out.stem}_steps.parquet says why"
        )
