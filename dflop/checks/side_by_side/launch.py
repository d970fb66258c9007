"""Starting a measured comparison: which rows there are, the request to the ranks, and their results.

This file does not import torch.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import yaml

from dflop.base import UserError, torchrun
from dflop.checks.side_by_side.contenders import Contender
from dflop.checks.side_by_side.measured import Clocked
from dflop.config import Config, select_keys

__all__ = ["PLAIN_ROWS", "counted_steps", "measure_rows", "num_scheduled"]

# What users would write themselves: plain PyTorch. Rows that accumulate gradients have as many microbatches as ours.
PLAIN_ROWS = ("DDP", "DDP, accumulated", "DDP, padded", "FSDP2")
# The first steps, which are not counted; with loaders that read ahead, until what they had ready at the start is used.
_NUM_WARMUP, _NUM_WARMUP_ON_THE_FLY = 3, 12
# By how many steps a side's loaders are ahead, at most.
_NUM_AHEAD = 8


def counted_steps(num_steps: int, *, on_the_fly: bool) -> range:
    """The steps that count if `num_steps` are asked for."""
    first = _NUM_WARMUP_ON_THE_FLY if on_the_fly else _NUM_WARMUP
    return range(first, first + num_steps)


def num_scheduled(num_steps: int, *, on_the_fly: bool) -> int:
    """How many steps need a schedule. With `on_the_fly` these are more than are trained, so that loaders still read
    ahead in the last steps."""
    return counted_steps(num_steps, on_the_fly=on_the_fly).stop + (_NUM_AHEAD if on_the_fly else 0)


def measure_rows(
    config: Config,
    planned: Sequence[Contender],
    plain: Sequence[str],
    *,
    num_steps: int,
    on_the_fly: bool = False,
) -> dict[str, Clocked]:
    """Train all rows in turns, step by step, on as many ranks as their plans have. Returns the measured times by row.

    `planned` are the rows with plans, ours first. `plain` are names of `PLAIN_ROWS`; those that accumulate gradients
    have as many microbatches as our plan. Batches are loaded before a step's clock starts, or with `on_the_fly` by
    loader processes that read ahead.

    Raises:
        UserError: when a rank failed.
    """
    counted = counted_steps(num_steps, on_the_fly=on_the_fly)
    workers = config.train.loader_workers if on_the_fly else 0
    steps = num_scheduled(num_steps, on_the_fly=on_the_fly)
    config = replace(config, train=replace(config.train, steps=steps, epochs=None, loader_workers=workers))
    world_size, num_microbatches = planned[0].plan.world_size, planned[0].plan.num_microbatches
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, row in enumerate(planned):
            (folder / f"{number}.yaml").write_text(yaml.safe_dump({"plan": row.plan.to_dict()}), encoding="utf-8")
            for step, schedule in enumerate(row.schedules):
                (folder / f"{number}-{step}").write_bytes(schedule.to_bytes())
        ways = {
            "DDP": {"num_microbatches": 1},
            "DDP, accumulated": {"num_microbatches": num_microbatches},
            "DDP, padded": {"num_microbatches": 1, "padded": True},
            "FSDP2": {"num_microbatches": num_microbatches, "shards": True},
        }
        request = {
            "config": select_keys(config, [section.name for section in fields(config)]),
            "folder": str(folder),
            "planned": [row.name for row in planned],
            "plain": {name: ways[name] for name in plain},
            "on_the_fly": on_the_fly,
            "num_timed": counted.stop,
        }
        code, _ = torchrun.run_ranks(
            "dflop.checks.side_by_side.rank", request, config.cluster, num_nodes=1, per_node=world_size
        )
        if code:
            raise UserError(f"measuring ended early (torchrun's exit code {code}); see the reason above")
        found = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    return {
        name: Clocked(*(times[counted.start : counted.stop] for times in (seconds, found["cpu_seconds"][name])))
        for name, seconds in found["seconds"].items()
    }
