"""`dflop train --emulate`: the plan's ranks run on this machine, and sleep instead of computing.

The workflow does not use this module.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dflop.base import UserError, written_whole
from dflop.cli.options import FILE, load_for, meta_of

__all__ = ["may_emulate"]


def may_emulate(function: Callable) -> Callable:
    """Add `--emulate` to the command that trains: it then emulates the cluster of the given costs on this machine."""

    @click.option(
        "--emulate",
        type=FILE,
        help="In place of --costs: costs.duckdb of a cluster that is not at hand. The plan's ranks run on this machine "
        "over gloo, with the real schedules and messages, and sleep for as long as they are predicted to compute. "
        "Nothing is trained; measured and predicted step time are printed at the end.",
    )
    @click.option(
        "--emulate-scale",
        type=click.FloatRange(min=0.0, min_open=True),
        default=1.0,
        show_default=True,
        help="With --emulate: what all predicted seconds are multiplied by.",
    )
    @functools.wraps(function)
    def command(
        configs: tuple[str, ...], costs: Path | None, emulate: Path | None, emulate_scale: float, **given: Any
    ) -> None:
        if emulate is None:
            _check_training(costs, given["out"], emulate_scale)
            function(configs=configs, costs=costs, **given)
        elif costs is not None:
            raise UserError("--emulate names the costs to emulate by; leave out --costs, which is for training")
        else:
            _emulate(configs, emulate, emulate_scale, **given)

    return command


def _check_training(costs: Path | None, out: Path, scale: float) -> None:
    from dflop.train.run_folder import is_emulated

    if costs is None:
        raise UserError("`dflop train` needs --costs, or --emulate with the costs of a cluster to emulate")
    if scale != 1.0:
        raise UserError("--emulate-scale goes with --emulate; a training takes as long as it takes")
    if is_emulated(out):
        raise UserError(f"{out} holds an emulated run; remove it, or give --out another folder to train in")


def _emulate(configs: tuple[str, ...], costs: Path, scale: float, *, shapes: Path, plan_path: Path, out: Path) -> None:
    from dflop.checks.emulation import emulate, emulation_text
    from dflop.store import read_table
    from dflop.train.trace import chrome_trace

    # Stages take exactly their predicted times, so there is nothing to learn from them.
    config = load_for("train", (*configs, "schedule.correction=off"))
    read_table(costs, "device", made_by="fit-costs")  # missing costs are reported here, in one line
    summary, merged = emulate(
        config, shapes=shapes, costs=costs, plan=plan_path, out=out, scale=scale, meta=meta_of("train", config)
    )
    with written_whole(out / "trace.json") as path:
        path.write_text(json.dumps(chrome_trace(*merged)), encoding="utf-8")
    click.echo(f"\n{emulation_text(summary)}\n{out / 'summary.json'} has it, {out / 'trace.json'} the timeline")
