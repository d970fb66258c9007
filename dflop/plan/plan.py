"""Plans: a placement, one grid and sharding per module, the number of microbatches, checkpointing and the schedule.

The search chooses a plan, and the trainer follows it. `plan.yaml` holds one, with the prediction for which it was
chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflop.base import UserError
from dflop.plan.grid import Grid
from dflop.plan.placements import PLACEMENTS
from dflop.plan.schedules import PLAIN_SCHEDULE, SCHEDULES
from dflop.plan.shardings import PLAIN_SHARDING

__all__ = ["Plan", "split_layers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan. Its grids are in the order in which data flows: encoders first, the LLM last.

    `placement` and `schedule` are names in the tables `PLACEMENTS` and `SCHEDULES`. `num_chunks` is the number of
    separate groups of consecutive LLM layers that an LLM rank holds. With `checkpointing`, layers are recomputed in
    backward: all layers if no grid has `recomputed`. If some grids have it, the others recompute nothing and get zeros.
    With `offloads_optimizer`, the optimiser's moments and masters are in host memory between steps.

    Raises:
        UserError: when the grids do not fit the placement, or the numbers or checkpointing do not fit the schedule.
    """

    placement: str
    grids: tuple[Grid, ...]
    num_microbatches: int
    checkpointing: bool = False
    schedule: str = PLAIN_SCHEDULE
    num_chunks: int = 1
    offloads_optimizer: bool = False

    def __post_init__(self) -> None:
        if not self.grids or self.grids[-1].module != "llm":
            names = ", ".join(grid.module for grid in self.grids) or "no module"
            raise UserError(f"the plan has grids of {names}; it must have one of `llm`, after those of the encoders")
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
            self._check_stages(grid)
        if any(grid.recomputed for grid in self.grids):
            object.__setattr__(self, "grids", tuple(map(self._with_recomputed, self.grids)))

    def _check_stages(self, grid: Grid) -> None:
        """Check that `layers`, `recomputed` and `offloaded`, where the grid has them, hold one number for each pipeline
        stage."""
        ways_out = {
            "layers": "for an even split",
            "recomputed": "of all grids to recompute all layers",
            "offloaded": "to offload no layer",
        }
        for name in ways_out:
            given = getattr(grid, name)
            if given and len(given) != self.num_stages(grid.module):
                raise UserError(
                    f"{grid.module}: {name} is {list(given)}, but pp={grid.pp}"
                    + (f" with {self.num_chunks} chunks" if grid.module == "llm" and self.num_chunks > 1 else "")
                    + f" makes {_counted(self.num_stages(grid.module), 'stage')}; give one number a stage, or leave "
                    f"{name} out {ways_out[name]}"
                )
        if any(grid.recomputed) and not self.checkpointing:
            raise UserError(
                f"{grid.module}: recomputed is {list(grid.recomputed)}, but the plan has no checkpointing; use "
                "checkpointing: true, or leave recomputed out"
            )

    def _with_recomputed(self, grid: Grid) -> Grid:
        """The grid; if it has no `recomputed`, with a zero for each stage."""
        return grid if grid.recomputed else replace(grid, recomputed=(0,) * self.num_stages(grid.module))

    @property
    def world_size(self) -> int:
        return PLACEMENTS[self.placement].world_size(self.grids)

    @property
    def num_buckets(self) -> int:
        """The number of (LLM replica, microbatch) pairs of a step."""
        return self.grid("llm").dp * self.num_microbatches

    @property
    def offloads(self) -> bool:
        """Whether a part of the plan waits in host memory."""
        return self.offloads_optimizer or any(any(grid.offloaded) for grid in self.grids)

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
        """The number of a module's pipeline stages; each chunk of an LLM rank counts as one."""
        return self.grid(module).pp * (self.num_chunks if module == "llm" else 1)

    def layers_of(self, module: str, num_layers: int) -> list[range]:
        """The layers of each of a module's stages.

        Raises:
            UserError: when the plan's `layers` do not add up to `num_layers`, or there are more stages than layers.
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

    def recomputed_of(self, module: str, num_layers: int) -> tuple[int, ...]:
        """How many layers each of a module's stages recomputes in backward.

        Raises:
            UserError: naming the field of `plan.yaml` that is more than a stage's layers; also as `layers_of`.
        """
        layers = list(map(len, self.layers_of(module, num_layers)))
        given = self.grid(module).recomputed if self.checkpointing else (0,) * len(layers)
        for stage, (count, most) in enumerate(zip(given, layers, strict=False)):
            if count > most:
                raise UserError(
                    f"`plan.grids.{module}.recomputed[{stage}]` is {count}; the stage has {_counted(most, 'layer')}: "
                    f"use at most {most}"
                )
        return given or tuple(layers)

    def attention_kept_of(self, module: str) -> tuple[int, ...]:
        """How many of the layers that each of a module's stages recomputes are recomputed but for attention."""
        return self.grid(module).attention_kept or (0,) * self.num_stages(module)

    def offloaded_of(self, module: str, num_layers: int) -> tuple[int, ...]:
        """How many of its first layers each of a module's stages keeps in host memory. Never the last one: its tensors
        would have to come back at once.

        Raises:
            UserError: naming the field of `plan.yaml` that is more than the stage's other layers; also as
                `recomputed_of`.
        """
        recomputed, layers = self.recomputed_of(module, num_layers), self.layers_of(module, num_layers)
        given = self.grid(module).offloaded or (0,) * len(layers)
        for stage, (count, again, own) in enumerate(zip(given, recomputed, layers, strict=True)):
            if count > (most := max(0, min(len(own) - 1, len(own) - again))):
                raise UserError(
                    f"`plan.grids.{module}.offloaded[{stage}]` is {count}; the stage has "
                    f"{_counted(len(own), 'layer')}, recomputes {again} and never offloads the last: use at most {most}"
                )
        return given

    def to_dict(self) -> dict[str, Any]:
        """The section `plan` of `plan.yaml`; `plan_from_dict` reads it."""
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
                    "recomputed": list(grid.recomputed) or None,
                    "attention_kept": list(grid.attention_kept) or None,
                    "offloaded": list(grid.offloaded) or None,
                    "sharding": grid.sharding,
                    "shards": grid.shards,
                    "cp": grid.cp,
                }
                for grid in self.grids
            },
            "num_microbatches": self.num_microbatches,
            "checkpointing": self.checkpointing,
            "schedule": self.schedule,
            "num_chunks": self.num_chunks,
            "offloads_optimizer": self.offloads_optimizer,
        }

    def __str__(self) -> str:
        def in_node(grid: Grid) -> str:
            return f" of {grid.shards}" if grid.shards else ""

        grids = " + ".join(
            f"{grid.module} tp{grid.tp} pp{grid.pp} dp{grid.dp}"
            + (f" (layers {_joined(grid.layers)})" if grid.layers else "")
            + (f" (sharding {grid.sharding}{in_node(grid)})" if grid.sharding != PLAIN_SHARDING else "")
            + (f" (offloaded {_joined(grid.offloaded)})" if grid.offloaded else "")
            + (f" (samples over up to {grid.cp})" if grid.cp > 1 else "")
            for grid in self.grids
        )
        chunks = f" of {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        some = ", ".join(
            f"{grid.module} {_joined(grid.recomputed)}"
            + (f", {_joined(grid.attention_kept)} of them but for attention" if grid.attention_kept else "")
            for grid in self.grids
            if grid.recomputed
        )
        checkpointing = ", checkpointing" + (f" (layers {some})" if some else "")
        checkpointing = checkpointing if self.checkpointing else ""
        microbatches = f"{self.num_microbatches} microbatch{'es' if self.num_microbatches > 1 else ''}"
        away = ", optimizer offloaded" if self.offloads_optimizer else ""
        return f"{self.placement}: {grids}, {microbatches}, {self.schedule}{chunks}{checkpointing}{away}"


def _joined(counts: Sequence[int]) -> str:
    return "+".join(map(str, counts))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def split_layers(num_layers: int, pp: int) -> list[range]:
    """The layers of each pipeline stage, split evenly. If that is not possible, the first stages get one more.

    The last stage gets no more layers than the others, because it also holds the head and the loss.

    Raises:
        UserError: when there are more stages than layers.
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
