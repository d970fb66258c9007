"""The costs of a plan's stages by the cost model, each computed for all its replicas and microbatches together.

The costs of stages of one kind (such as those in the middle of a module with equally many layers) are computed once. A
module whose replicas share parameters is one stage, and its passes are those of `costs.sharded`.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from dflop.base import UserError
from dflop.costs import (
    NO_WORKING_BYTES,
    PARTS,
    CostModel,
    Link,
    Loads,
    Moving,
    Resident,
    ShardedPass,
    StageKind,
    StageMemory,
    hidden_sync_shares,
    resident_parts,
    sharded_passes,
    stage_kinds,
    sync_bytes,
    update_bytes,
    working_bytes,
)
from dflop.costs.forms import PackedTerms, pack_terms
from dflop.models import ModelSpec
from dflop.models.loads import Coefficients
from dflop.plan import Plan
from dflop.plan.trained import TrainedSet
from dflop.schedule.correction import NO_CORRECTIONS, Corrections
from dflop.shapes import SampleShapes
from dflop.step import StageReplicas, stages_of

__all__ = ["StageCosts", "loads_of"]

T = TypeVar("T")


def loads_of(module: str, shapes: SampleShapes) -> Loads:
    """The loads that each sample adds to a module, arrays [num_samples].

    An encoder gets items, and the squared lengths of the runs in which they attend to each other; the LLM gets tokens,
    and those of other shares of the same samples (`SampleShapes.foreign_tokens`).
    """
    nothing = np.zeros(len(shapes))
    if module != "llm":
        return Loads(shapes.items_of(module).astype(float), nothing, shapes.sum_sq_of(module), nothing)
    tokens = shapes.llm_tokens.astype(float)
    return Loads(shapes.foreign_tokens, tokens, shapes.sum_sq_tokens, shapes.target_tokens.astype(float))


class StageCosts:
    """Seconds and bytes of a plan's stages, by a cost model and its learned corrections."""

    corrections = NO_CORRECTIONS

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        spec: ModelSpec,
        trained: TrainedSet,
        sharing_links: Mapping[str, Link],
        value_bytes: int,
        is_hidden: bool,
    ) -> None:
        """`sharing_links` (`Transfers.sharing_link`) are those of the modules whose replicas share parameters.

        A parameter takes `value_bytes`; `is_hidden` is whether devices compute while parameters move.
        """
        self.plan, self.costs, self.trained, self._value_bytes = plan, costs, trained, value_bytes
        self.stages = stages_of(plan)
        # The kinds of each module's stages, without repetition, and the index of each stage's kind among them.
        self._kinds: dict[str, list[StageKind]] = {}
        self._places: dict[str, list[int]] = {}
        for grid in plan.grids:
            num_layers = spec.module(grid.module).num_layers
            layers = [len(part) for part in plan.layers_of(grid.module, num_layers)]
            recomputed = plan.recomputed_of(grid.module, num_layers)
            kept = plan.attention_kept_of(grid.module)
            if any(kept) and (grid.module, grid.layout) not in costs.attention_bytes:
                raise UserError(
                    f"the plan has `grids.{grid.module}.attention_kept`, and costs do not say what attention keeps: "
                    "run `dflop profile-costs` and `dflop fit-costs` again, or leave it out"
                )
            offloaded = plan.offloaded_of(grid.module, num_layers)
            kinds = stage_kinds(grid.module, grid.layout, layers, recomputed, trained, kept, offloaded)
            self._kinds[grid.module] = list(dict.fromkeys(kinds))
            self._places[grid.module] = [self._kinds[grid.module].index(kind) for kind in kinds]
        # For modules whose replicas share parameters: forward and backward, and the bytes that passes need.
        self._sharded: dict[str, tuple[ShardedPass, ShardedPass]] = {}
        self._working_bytes = {grid.module: NO_WORKING_BYTES for grid in plan.grids}
        for module, link in sharing_links.items():
            (kind,) = self._kinds[module]
            sizes = {part: costs.parameter_bytes[module, kind.layout, part] for part in PARTS}
            how = {"value_bytes": value_bytes, "trained_bytes": costs.trained_bytes(kind)}
            moving = Moving.over(sizes, link.latency_s, 1 / link.bytes_per_s, **how)
            self._sharded[module] = sharded_passes(kind, moving, is_hidden=is_hidden)
            self._working_bytes[module] = working_bytes(module, sizes, **how)
        self._hidden_shares: dict[StageKind, tuple[float, float]] = {}  # by kind of stage

    def corrected(self, corrections: Corrections) -> "StageCosts":
        """The same stages, with these corrections instead of the present ones."""
        other = copy.copy(self)
        other.corrections = corrections
        return other

    def stage_times(self, of_module: dict[str, Loads]) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds, [num_nodes, num_microbatches], for modules' loads [dp, num_microbatches]."""
        forward_s, backward_s = [], []
        for grid in self.plan.grids:
            loads = of_module[grid.module]
            times = self._times(grid.module, loads)
            if grid.module in self.corrections.factors:
                factors = self.corrections.at(grid.module, loads)
                times = [(forward * factors[0], backward * factors[1]) for forward, backward in times]
            forward_s += self._of_stages(grid.module, [forward for forward, _ in times])
            backward_s += self._of_stages(grid.module, [backward for _, backward in times])
        return np.concatenate(forward_s), np.concatenate(backward_s)

    def _times(self, module: str, loads: Loads) -> list[tuple[np.ndarray, np.ndarray]]:
        """Forward and backward seconds of each of the module's kinds of stages, without corrections."""
        if module not in self._sharded:
            return self.costs.stage_times(self._kinds[module], loads)
        (kind,) = self._kinds[module]
        # A replica without work counts as 0 s here: it takes part in the gathers and waits for the other replicas, and
        # the simulator adds this wait.
        empty = (loads.num_items == 0) & (loads.num_tokens == 0)
        parts = dict.fromkeys(part for part, _ in (*kind.parts, *kind.parts_with_backward))
        part_s = self.costs.part_times(module, kind.layout, loads, list(parts))
        passes = zip(self._sharded[module], part_s, strict=True)
        forward_s, backward_s = (np.where(empty, 0.0, sharded.seconds(of_part)) for sharded, of_part in passes)
        return [(forward_s, backward_s)]

    def time_forms(self) -> tuple[PackedTerms, PackedTerms]:
        """Forward and backward seconds of each stage as terms of its microbatch's loads, without corrections.

        A stage's last term has a `least` of minus infinity; where replicas share no parameters, it is the only one.
        """
        forward, backward = zip(*map(self._time_terms, self.stages), strict=True)
        return pack_terms(forward), pack_terms(backward)

    def _time_terms(self, stage: StageReplicas) -> tuple[list[tuple[Coefficients, float]], ...]:
        kind = self.kind(stage)
        if stage.module not in self._sharded:
            return tuple([(form, -np.inf)] for form in self.costs.time_forms(kind))
        of_parts = self.costs.part_forms(stage.module, kind.layout)
        return tuple(
            [
                *((count * of_part[part], count * float(moved_s)) for part, count, moved_s in sharded.terms),
                (Coefficients(float(sharded.exposed_s), (0.0,) * 4), -np.inf),
            ]
            for sharded, of_part in zip(self._sharded[stage.module], of_parts, strict=True)
        )

    def memories(self, module: str, loads: Loads) -> list[StageMemory]:
        """The memory of microbatches on each of the module's stages; stages of one kind share one object."""
        return self._of_stages(
            module, self.costs.stage_memories(self._kinds[module], loads, self._working_bytes[module])
        )

    def memory_forms(self, stage: StageReplicas) -> tuple[Coefficients, list[Coefficients]]:
        """`memories` of one stage as functions of a microbatch's loads (`CostModel.stage_memory_forms`)."""
        return self.costs.stage_memory_forms(self.kind(stage), self._working_bytes[stage.module])

    def host_bytes(self, module: str, loads: Loads) -> np.ndarray:
        """What microbatches keep in host memory on each of the module's nodes, [num_nodes, num_microbatches]."""
        a_layer = self.costs.activations[module, self.plan.grid(module).layout, "layer", False](loads)
        return np.concatenate(self._of_stages(module, [kind.num_offloaded * a_layer for kind in self._kinds[module]]))

    def resident_bytes(self, stage: StageReplicas) -> float:
        """Bytes of parameters, gradients and the rank's share of optimiser state."""
        return sum(self.resident_parts(stage))

    def resident_parts(self, stage: StageReplicas) -> Resident:
        """The parts of `resident_bytes`."""
        return self._resident(stage, offloads_optimizer=self.plan.offloads_optimizer)

    def offloaded_state_bytes(self, stage: StageReplicas) -> float:
        """Bytes of the rank's share of optimiser state, if it is in host memory between steps."""
        return self._resident(stage).optimizer if self.plan.offloads_optimizer else 0.0

    def _resident(self, stage: StageReplicas, **how: bool) -> Resident:
        both = self.costs.trained_and_frozen_bytes(self.kind(stage))
        return resident_parts(*both, stage.dp, **self._sharing(stage), **how)

    def sync_bytes(self, stage: StageReplicas) -> float:
        """Bytes that a sync of the stage's gradients moves (`costs.sync_bytes`)."""
        trained_bytes, _ = self.costs.trained_and_frozen_bytes(self.kind(stage))
        return float(sync_bytes(trained_bytes, **self._sharing(stage)))

    def update_s(self, stage: StageReplicas) -> float:
        """Seconds of the optimiser's step on the rank's share of the stage, without copies of an offloaded state."""
        trained_bytes, _ = self.costs.trained_and_frozen_bytes(self.kind(stage))
        return update_bytes(trained_bytes, stage.dp, **self._sharing(stage)) / self.costs.update_bytes_per_s

    def hidden_sync_shares(self, stage: StageReplicas) -> tuple[float, float]:
        """The shares of the stage's gradient sync that may run beside its last backward, and beside its first forward
        (`costs.hidden_sync_shares`)."""
        kind = self.kind(stage)
        if kind not in self._hidden_shares:
            early, late = hidden_sync_shares(self.costs, kind, **self._sharing(stage))
            self._hidden_shares[kind] = float(early), float(late)
        return self._hidden_shares[kind]

    def _sharing(self, stage: StageReplicas) -> dict[str, int]:
        """Bytes of a parameter's value, and the number of replicas that share the stage's parameters."""
        return {"value_bytes": self._value_bytes, "num_shards": self.plan.grid(stage.module).num_shards}

    def additive_loads_s(self, module: str, loads: Loads, *, least: bool = False) -> np.ndarray:
        """Seconds that each sample adds to each pipeline rank, [pp, num_samples].

        With `least` they are a lower bound that holds in any microbatch. The shape bin of the sample's microbatch is
        not known yet: with `least` the smallest possible correction counts, else that of a mean microbatch.
        """
        added = [self.costs.additive_loads_s(kind, loads, least=least) for kind in self._kinds[module]]
        per_stage = self._of_stages(module, added)
        # A rank does all of its chunks' work.
        added_s = np.array(per_stage).reshape(-1, self.plan.grid(module).pp, len(per_stage[0])).sum(axis=0)
        if module not in self.corrections.factors:
            return added_s
        return added_s * (self.corrections.least(module, loads) if least else self._mean_correction(module, loads))

    def least_work_s(self, module: str, loads: Loads) -> np.ndarray:
        """The least seconds of all microbatches on each pipeline rank, in sum over the replicas, [pp], however these
        samples are grouped.

        Seconds are convex in loads: microbatches that are not empty take no less than as many equal ones (Jensen).
        """
        grid = self.plan.grid(module)
        number = np.arange(1, grid.dp * self.plan.num_microbatches + 1)
        times = self._times(module, Loads(*(load.sum() / number for load in loads)))
        of_stages = np.array(self._of_stages(module, [forward_s + backward_s for forward_s, backward_s in times]))
        of_ranks = of_stages.reshape(-1, grid.pp, len(number)).sum(axis=0)
        equal_s = (number * of_ranks).min(axis=1) * np.min(self.corrections.factors.get(module, 1.0))
        return np.maximum(equal_s, self.additive_loads_s(module, loads, least=True).sum(axis=1))

    def _mean_correction(self, module: str, loads: Loads) -> float:
        """The factor of a microbatch that holds an equal share of all samples."""
        grid = self.plan.grid(module)
        mean = Loads(*(np.array([load.sum() / (grid.dp * self.plan.num_microbatches)]) for load in loads))
        times = self._of_stages(module, self._times(module, mean))
        by_pass_s = np.array(times).sum(axis=(0, 2))
        total_s = by_pass_s.sum()
        return float(by_pass_s @ self.corrections.at(module, mean)[:, 0] / total_s) if total_s else 1.0

    def kind(self, stage: StageReplicas) -> StageKind:
        """The kind of a stage, for the cost model."""
        return self._kinds[stage.module][self._places[stage.module][stage.pp_stage]]

    def _of_stages(self, module: str, of_kinds: Sequence[T]) -> list[T]:
        """Values given by kind of stage, for each of the module's stages in order."""
        return [of_kinds[place] for place in self._places[module]]
