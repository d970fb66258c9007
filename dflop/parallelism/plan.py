"""Plans: a placement, one grid and sharding per module, the number of microbatches, checkpointing and the schedule.

A plan is what the search chooses and what the trainer obeys; `plan.yaml` holds one, with the prediction
that it was chosen for beside it. More can be said, and priced, than can be trained today: see `runnable`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflop.parallelism.grid import Grid
from dflop.parallelism.placements import PLACEMENTS
from dflop.parallelism.schedules import PLAIN_SCHEDULE, SCHEDULES
from dflop.parallelism.shardings import PLAIN_SHARDING
from dflop.runtime import UserError

__all__ = ["Plan", "split_layers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Grids in the order the data takes: encoders first, the LLM last.

    `placement` and `schedule` are names in the tables `PLACEMENTS` and `SCHEDULES`. `num_chunks` is the number of runs
    of LLM layers that an LLM rank holds.

    Raises:
        UserError: when the grids do not fit the placement, or the numbers or checkpointing the schedule.
    """

    placement: str
    grids: tuple[Grid, ...]
    num_microbatches: int
    checkpointing: bool = False
    schedule: str = PLAIN_SCHEDULE
    num_chunks: int = 1

    def __post_init__(self) -> None:
        if not self.grids or self.grids[-1].module != "llm":
            names = ", ".join(grid.module for grid in self.grids) or "no module"
            raise UserError(f"the plan has grids of {names}; it must have one of `llm`, behind those of the encoders")
        for name, value, choices in (
            ("placement", self.placement, PLACEMENTS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in choices:
                raise UserError(f"the plan's {name} is {value!r}; it must be one of {', '.join(choices)}")
        if self.num_microbatches < 1:
            raise UserError(f"the plan has {self.num_microbatches} microbatches; use at least 1")
        PLACEMENTS[self.placement].check(self)
        SCHEDULES[self.schedule].check(self)
        for grid in self.grids:
            if grid.layers and len(grid.layers) != self.num_stages(grid.module):
                raise UserError(
                    f"{grid.module}: layers are given for {len(grid.layers)} stages, but pp={grid.pp}"
                    + (f" with {self.num_chunks} chunks" if grid.module == "llm" and self.num_chunks > 1 else "")
                    + f" makes {self.num_stages(grid.module)}; give as many numbers, or none for an even split"
                )

    @property
    def world_size(self) -> int:
        return PLACEMENTS[self.placement].world_size(self.grids)

    @property
    def num_buckets(self) -> int:
        return self.grid("llm").dp * self.num_microbatches

    def grid(self, module: str) -> Grid:
        """A module's grid.

        Raises:
            UserError: naming the modules that the plan has.
        """
        for grid in self.grids:
            if grid.module == module:
                return grid
        names = ", ".join(grid.module for grid in self.grids)
        raise UserError(f"the plan has no grid for {module}; it has {names}: make it again with `dflop plan`")

    def num_stages(self, module: str) -> int:
        """Pipeline stages of a module; each chunk of an LLM rank is one."""
        return self.grid(module).pp * (self.num_chunks if module == "llm" else 1)

    def layers_of(self, module: str, num_layers: int) -> list[range]:
        """Layers of each of a module's stages.

        Raises:
            UserError: when the plan's `layers` are not as many as the module has, or there are more stages than layers.
        """
        given = self.grid(module).layers
        if not given:
            return split_layers(num_layers, self.num_stages(module))
        if sum(given) != num_layers:
            raise UserError(
                f"{module}: the plan's layers {list(given)} are {sum(given)} together, the model has {num_layers}; "
                "make the plan again with `dflop plan`"
            )
        return _ranges(given)

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
                    "layers": list(grid.layers) or None,
                    "sharding": grid.sharding,
                    "shards": grid.shards,
                }
                for grid in self.grids
            },
            "num_microbatches": self.num_microbatches,
            "checkpointing": self.checkpointing,
            "schedule": self.schedule,
            "num_chunks": self.num_chunks,
        }

    def __str__(self) -> str:
        def in_node(grid: Grid) -> str:
            return f" of {grid.shards}" if grid.shards else ""

        grids = " + ".join(
            f"{grid.module} tp{grid.tp} pp{grid.pp} dp{grid.dp}"
            + (f" (layers {'+'.join(map(str, grid.layers))})" if grid.layers else "")
            + (f" (sharding {grid.sharding}{in_node(grid)})" if grid.sharding != PLAIN_SHARDING else "")
            for grid in self.grids
        )
        chunks = f" of {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        checkpointing = ", checkpointing" if self.checkpointing else ""
        microbatches = f"{self.num_microbatches} microbatch{'es' if self.num_microbatches > 1 else ''}"
        return f"{self.placement}: {grids}, {microbatches}, {self.schedule}{chunks}{checkpointing}"


def split_layers(num_layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage; when they do not divide, the first stages hold one more.

    The last stage also holds the head and the loss, so it is the one to spare.
    """
    if pp > num_layers:
        raise UserError(f"{num_layers} layers cannot be split into {pp} pipeline stages")
    small, extra = divmod(num_layers, pp)
    return _ranges([small + (stage < extra) for stage in range(pp)])


def _ranges(counts: Sequence[int]) -> list[range]:
    stages, start = [], 0
    for count in counts:
        stages.append(range(start, start + count))
        start += count
    return stages
