"""What the cost model says of a plan's stages, each asked for with all its replicas and microbatches together.

Stages that are alike (as many layers, in the middle of the module) are asked for once.
"""

import copy
from collections.abc import Collection

import numpy as np

from dflop.costs import CostModel, Loads, StageKind, StageMemory, resident_bytes, stage_kinds
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.models.loads import Coefficients
from dflop.pipeline import Plan, Stage, stages_of
from dflop.pricing.correction import NO_CORRECTIONS, Corrections

__all__ = ["StageCosts", "loads_of"]


def loads_of(module: str, shapes: SampleShapes) -> Loads:
    """What every sample brings to a module, arrays [num_samples]: items to an encoder, text to the LLM."""
    nothing = np.zeros(len(shapes))
    if module != "llm":
        return Loads(shapes.items_of(module).astype(float), nothing, nothing, nothing)
    tokens = shapes.llm_tokens.astype(float)
    return Loads(nothing, tokens, tokens**2, shapes.target_tokens.astype(float))


class StageCosts:
    """Seconds and bytes of a plan's stages, by a cost model and what was learned of its errors."""

    corrections = NO_CORRECTIONS

    def __init__(self, plan: Plan, costs: CostModel, spec: ModelSpec, frozen: Collection[str]) -> None:
        self.plan, self.costs, self.frozen = plan, costs, frozenset(frozen)
        self.stages = stages_of(plan)
        # Of each module's stages, in order.
        self.kinds: dict[str, list[StageKind]] = {}
        for grid in plan.grids:
            layers = [len(part) for part in plan.layers_of(grid.module, spec.module(grid.module).num_layers)]
            self.kinds[grid.module] = stage_kinds(grid.module, grid.tp, layers, checkpointing=plan.checkpointing)

    def corrected(self, corrections: Corrections) -> "StageCosts":
        """The same stages, with these corrections and no others."""
        other = copy.copy(self)
        other.corrections = corrections
        return other

    def has_backward(self, module: str) -> bool:
        """A frozen encoder has none; a frozen LLM still passes gradients on."""
        return module == "llm" or module not in self.frozen

    def stage_times(self, of_module: dict[str, Loads]) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds, [num_nodes, num_microbatches], of modules' loads [dp, num_microbatches]."""
        forward_s, backward_s = [], []
        for grid in self.plan.grids:
            loads = of_module[grid.module]
            factors = self.corrections.at(grid.module, loads)
            for forward, backward in self.costs.stage_times(self.kinds[grid.module], loads):
                forward_s.append(forward * factors[0])
                has_backward = self.has_backward(grid.module)
                backward_s.append(backward * factors[1] if has_backward else np.zeros_like(backward))
        return np.concatenate(forward_s), np.concatenate(backward_s)

    def time_forms(self) -> tuple[list[Coefficients], list[Coefficients]]:
        """Forward and backward seconds of each stage as functions of its microbatch's loads, without corrections."""
        forms = [self.costs.time_forms(self.kind(stage)) for stage in self.stages]
        has_backward = [self.has_backward(stage.module) for stage in self.stages]
        forward = [own for own, _ in forms]
        return forward, [own if has else 0.0 * own for (_, own), has in zip(forms, has_backward, strict=True)]

    def memories(self, of_module: dict[str, Loads]) -> list[StageMemory]:
        """Of each stage, without gradients and what the optimiser holds."""
        asked: dict[StageKind, StageMemory] = {}
        of_stages = []
        for stage in self.stages:
            kind = self.kind(stage)
            if kind not in asked:
                asked[kind] = self.costs.stage_memory(kind, of_module[stage.module])
            of_stages.append(asked[kind])
        return of_stages

    def parameter_bytes(self, stage: Stage) -> float:
        return self.costs.stage_parameter_bytes(self.kind(stage))

    def resident_bytes(self, stage: Stage) -> float:
        """Parameters, gradients, and the rank's share of optimiser state."""
        return resident_bytes(self.parameter_bytes(stage), stage.dp, is_frozen=stage.module in self.frozen)

    def additive_loads_s(self, module: str, loads: Loads, *, least: bool = False) -> np.ndarray:
        """Seconds that each sample adds to each pipeline stage, [pp, num_samples]; `least`: whatever the microbatch.

        Which shape bin its microbatch will fall into is not known yet: the smallest correction that may hold counts
        with `least`, else that of a mean microbatch, for all samples.
        """
        priced: dict[StageKind, np.ndarray] = {}
        for kind in self.kinds[module]:
            if kind not in priced:
                has_backward = self.has_backward(module)
                priced[kind] = self.costs.additive_loads_s(kind, loads, has_backward=has_backward, least=least)
        per_stage = [priced[kind] for kind in self.kinds[module]]
        # A rank does all of its chunks' work.
        added_s = np.array(per_stage).reshape(-1, self.plan.grid(module).pp, len(per_stage[0])).sum(axis=0)
        if module not in self.corrections.factors:
            return added_s
        return added_s * (self.corrections.least(module, loads) if least else self._mean_correction(module, loads))

    def _mean_correction(self, module: str, loads: Loads) -> float:
        """The factor of a microbatch that holds an equal share of all samples."""
        grid = self.plan.grid(module)
        mean = Loads(*(np.array([load.sum() / (grid.dp * self.plan.num_microbatches)]) for load in loads))
        times = self.costs.stage_times(self.kinds[module], mean)
        by_pass_s = np.array(times).sum(axis=(0, 2)) * (1.0, float(self.has_backward(module)))
        total_s = by_pass_s.sum()
        return float(by_pass_s @ self.corrections.at(module, mean)[:, 0] / total_s) if total_s else 1.0

    def kind(self, stage: Stage) -> StageKind:
        """A stage as the cost model knows it."""
        return self.kinds[stage.module][stage.pp_stage]
