"""What every rank that is measured side by side does."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import logging

from dflop.base import progress_bar
from dflop.base.rendezvous import leave_ranks
from dflop.checks.side_by_side.plain import plain_side
from dflop.checks.side_by_side.planned import planned_side
from dflop.checks.side_by_side.sides import Side, paused, timed
from dflop.config import Config, load_config
from dflop.plan import load_plan
from dflop.schedule import StepSchedule
from dflop.train.stopping import end_loaders
from dflop.train.topology import join_group

__all__ = ["main"]


def main(request: dict) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    logging.set_verbosity_error()
    try:
        _measure(load_config(request["config"]), request)
    finally:
        end_loaders()


def _measure(config: Config, request: dict) -> None:
    device, store = join_group(config.cluster.device)
    on_the_fly, num_steps, is_main = request["on_the_fly"], request["num_timed"], dist.get_rank() == 0
    sides = {}
    for name, make in _makers(config, request, device, store).items():
        if is_main:
            print(f"dflop: building {name}", flush=True)
        sides[name] = paused(make)
    try:
        with progress_bar(unit=" steps", total=len(sides) * num_steps, disable=not is_main) as bar:
            seconds, cpu_seconds = timed(sides, num_steps, device, on_the_fly=on_the_fly, progress=bar.update)
    finally:
        for side in sides.values():
            side.go_on()
    if is_main:
        figures = {"seconds": seconds, "cpu_seconds": cpu_seconds}
        (Path(request["folder"]) / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
    leave_ranks()


def _makers(config: Config, request: dict, device: torch.device, store: dist.Store) -> dict[str, Callable[[], Side]]:
    """Functions that make the side of each row, those with plans first. Every rank makes all sides in this order."""
    folder, makers, of_all = Path(request["folder"]), {}, []
    for number, name in enumerate(request["planned"]):
        files = (folder / f"{number}-{step}" for step in range(config.train.steps))
        schedules = [StepSchedule.from_bytes(path.read_bytes()) for path in files]
        plan, of_side = load_plan(folder / f"{number}.yaml"), dist.PrefixStore(f"side {number}", store)
        makers[name] = partial(planned_side, config, plan, schedules, device, of_side)
        of_all = of_all or schedules  # all rows have the same samples
    for name, how in request["plain"].items():
        makers[name] = partial(plain_side, config, of_all, device=device, on_the_fly=request["on_the_fly"], **how)
    return makers
