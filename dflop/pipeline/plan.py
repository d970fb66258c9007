"""Plans: a placement, one grid per module, the number of microbatches, checkpointing and the schedule.

A plan is what the search chooses and what the trainer obeys; `plan.yaml` holds one, with the prediction
that it was chosen for beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflop.errors import UserError
from dflop.pipeline.grid import Grid, tile_world

__all__ = ["Plan", "Worker", "load_plan", "plan_from_dict", "split_layers"]


@dataclass(frozen=True, slots=True)
class Worker:
    """One replica of one pipeline stage of a module: `tp` ranks that act as one."""

    module: str
    pp_stage: int
    dp_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Grids in the order the data takes: encoders first, the LLM last."""

    placement: str
    grids: tuple[Grid, ...]
    num_microbatches: int
    checkpointing: bool = False
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        assert self.grids[-1].module == "llm", "the LLM's grid stands last"
        tile_world(self.grids, self.world_size)
        for encoder in self.grids[:-1]:
            if encoder.pp > 1:
                raise UserError(f"{encoder.module}: pp={encoder.pp}, but encoders run in one stage; use pp: 1")
        for grid in self.grids:
            if grid.tp > 1:
                raise UserError(f"{grid.module}: tp={grid.tp}, but tensor parallelism cannot run yet; use tp: 1")

    @property
    def world_size(self) -> int:
        return sum(grid.num_ranks for grid in self.grids)

    @property
    def num_buckets(self) -> int:
        return self.grid("llm").dp * self.num_microbatches

    def grid(self, module: str) -> Grid:
        return next(grid for grid in self.grids if grid.module == module)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All stage replicas by rising rank."""
        return tuple(
            Worker(grid.module, stage, replica)
            for grid in self.grids
            for stage in range(grid.pp)
            for replica in range(grid.dp)
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "placement": self.placement,
            "grids": {
                grid.module: {
                    "num_ranks": grid.num_ranks,
                    "tp": grid.tp,
                    "pp": grid.pp,
                    "dp": grid.dp,
                    "rank_offset": grid.rank_offset,
                }
                for grid in self.grids
            },
            "num_microbatches": self.num_microbatches,
            "checkpointing": self.checkpointing,
            "schedule": self.schedule,
        }

    def __str__(self) -> str:
        grids = " + ".join(f"{grid.module} tp{grid.tp} pp{grid.pp} dp{grid.dp}" for grid in self.grids)
        checkpointing = ", checkpointing" if self.checkpointing else ""
        return f"{self.placement}: {grids}, {self.num_microbatches} microbatches, {self.schedule}{checkpointing}"


def plan_from_dict(values: Mapping[str, Any]) -> Plan:
    return Plan(
        placement=values["placement"],
        grids=tuple(
            Grid(
                module=module,
                num_ranks=grid["num_ranks"],
                tp=grid["tp"],
                pp=grid["pp"],
                rank_offset=grid["rank_offset"],
            )
            for module, grid in sorted(
                values["grids"].items(), key=lambda entry: (entry[0] == "llm", entry[1]["rank_offset"])
            )
        ),
        num_microbatches=values["num_microbatches"],
        checkpointing=values["checkpointing"],
        schedule=values["schedule"],
    )


def load_plan(path: Path) -> Plan:
    """The plan of a `plan.yaml`.

    Raises:
        UserError: when the file is missing or holds no plan.
    """
    try:
        return plan_from_dict(yaml.safe_load(path.read_text(encoding="utf-8"))["plan"])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; make it with `dflop plan`") from None
    except (KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        what = " ".join(str(error).split())
        raise UserError(f"{path} holds no plan ({what}); make it again with `dflop plan`") from None


def split_layers(num_layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage; when they do not divide, the first stages hold one more.

    The last stage also holds the head and the loss, so it is the one to spare.
    """
    if pp > num_layers:
        raise UserError(f"{num_layers} layers cannot be split into {pp} pipeline stages")
    small, extra = divmod(num_layers, pp)
    stages, start = [], 0
    for stage in range(pp):
        stop = start + small + (stage < extra)
        stages.append(range(start, stop))
        start = stop
    return stages
