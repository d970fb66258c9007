"""`dflop compare --measure`: the systems of the comparison really train, in turns, on this machine's devices.

The workflow does not use this module.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dflop.base import UserError, progress_bar
from dflop.cli.options import FILE, load_compared

__all__ = ["may_measure"]


def may_measure(function: Callable) -> Callable:
    """Add `--measure` to the command that compares predictions: it then measures step times as well."""

    @click.option(
        "--measure",
        is_flag=True,
        help="Train the rows on this machine's devices, in turns within each step, and set measured seconds beside the "
        "predicted ones: our plan and policy, the same plan with random groups, plain DDP and FSDP2, and each system "
        "by the fastest plan of its kind. Writes *-measured.parquet.",
    )
    @click.option("--plan", "plan_path", type=FILE, help="With --measure: our plan. Default: plan.yaml by the shapes.")
    @click.option(
        "--steps", type=click.IntRange(min=1), default=20, show_default=True, help="With --measure: steps that count."
    )
    @click.option("--row", "rows", multiple=True, help="With --measure: only this row beside ours. Repeatable.")
    @click.option(
        "--on-the-fly",
        is_flag=True,
        help="With --measure: loaders read ahead as in training, and rows have turns of six steps.",
    )
    @functools.wraps(function)
    def command(
        measure: bool, plan_path: Path | None, steps: int, rows: tuple[str, ...], on_the_fly: bool, **given: Any
    ) -> None:
        if not measure:
            function(**given)
        elif given["ablate"] or given["scale"]:
            raise UserError("--measure runs on the devices that there are: leave out --ablate and --scale")
        else:
            files = given["configs"], given["shapes"], given["costs"], given["out"]
            _measure(*files, plan_path=plan_path, steps=steps, names=rows, on_the_fly=on_the_fly)

    return command


def _measure(
    configs: tuple[str, ...],
    shapes: Path,
    costs: Path,
    out: Path,
    *,
    plan_path: Path | None,
    steps: int,
    names: tuple[str, ...],
    on_the_fly: bool,
) -> None:
    from dflop.checks.side_by_side import OURS_AT_RANDOM, PLAIN_ROWS, measure_rows, measured_frame, measured_text
    from dflop.comparison import TODAYS, SystemRow, systems_of
    from dflop.config import load_config
    from dflop.models import check_runnable, load_model_spec
    from dflop.store import write_parquet

    config = load_config(*configs, has_cluster=True)
    if config.cluster.num_nodes > 1:
        raise UserError(
            f"--measure runs on the devices of one node, and `cluster.num_nodes` is {config.cluster.num_nodes}; set it "
            "to 1, with a plan for one node"
        )
    check_runnable(config.model.family)
    known = (OURS_AT_RANDOM, *PLAIN_ROWS, *(system.name for system in systems_of(config)))
    if TODAYS in names and TODAYS not in known:
        raise UserError(f"there is no row {TODAYS!r}: the config has no `plan.today`, which would say what it is")
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"there is no row {unknown[0]!r}; --row takes {', '.join(map(repr, known))}")
    spec, chosen = load_model_spec(config.model), names or known
    found = _contenders(
        config, spec, shapes, costs, plan_path or shapes.with_name("plan.yaml"), steps, chosen, on_the_fly
    )
    why_not = "plain rows are written for models with one encoder" if len(spec.encoders) > 1 else None
    plain = [name for name in PLAIN_ROWS if name in chosen and not why_not]
    runnable = [row for row in found if row.plan is not None]
    clocked = measure_rows(config, runnable, plain, num_steps=steps, on_the_fly=on_the_fly)
    rows = [row.row for row in found]
    rows += [SystemRow(name=name, why_not=why_not) for name in PLAIN_ROWS if name in chosen]
    write_parquet(measured_frame(rows, clocked), out.with_stem(f"{out.stem}-measured"))
    click.echo(measured_text(rows, clocked))


def _contenders(
    config: Any,
    spec: Any,
    shapes: Path,
    costs: Path,
    plan_path: Path,
    num_steps: int,
    names: tuple[str, ...],
    on_the_fly: bool,
) -> list:
    """Our system and the chosen others (`side_by_side.contenders`), with their schedules of all steps."""
    from dflop.checks.side_by_side import contenders, counted_steps, num_scheduled
    from dflop.comparison import OURS, systems_of
    from dflop.plan import load_plan
    from dflop.train import check_devices, check_plan

    plan = load_plan(plan_path)
    check_plan(plan_path, plan, spec)
    check_devices(config, plan)
    _, cost_model, samples, _ = load_compared(config, shapes, costs)
    systems = [system for system in systems_of(config) if system.name in names]
    with progress_bar(unit=" rows", total=len(systems) + 2) as bar:

        def progress(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update(1)

        found = contenders(
            config,
            spec,
            cost_model,
            samples,
            plan,
            systems=systems,
            num_steps=num_scheduled(num_steps, on_the_fly=on_the_fly),
            counted=counted_steps(num_steps, on_the_fly=on_the_fly),
            progress=progress,
        )
    return [row for row in found if row.name in (OURS, *names)]
