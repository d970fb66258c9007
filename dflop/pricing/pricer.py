"""Pricing an assignment: from who computes which samples to the times of a step, by the cost model.

`Pricer` is where a plan, a model's costs and a batch's shapes meet, and where planning and scheduling ask. It prices
times itself; what devices hold is `memory`'s, the question that a batch poses `batch_problem`'s.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from dflop.balancing import BatchProblem
from dflop.config import ClusterConfig
from dflop.costs import CostModel, Loads
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.parallelism import PLACEMENTS, SCHEDULES, Plan
from dflop.pipeline import (
    BubbleFiller,
    CompiledPlan,
    Node,
    StageTimes,
    Timeline,
    compile_plan,
    nodes_of,
    simulate,
    simulate_step_s,
)
from dflop.pricing.assignment import Assignment, Cells, cells_of, deal_media
from dflop.pricing.batch_problem import least_step_s, pose_problem
from dflop.pricing.correction import NO_CORRECTIONS, Corrections
from dflop.pricing.edge_bytes import edge_bytes_of
from dflop.pricing.memory import PlanMemory
from dflop.pricing.stage_costs import StageCosts
from dflop.pricing.transfers import Transfers

__all__ = ["BYTES_PER_VALUE", "WEIGHT_SHARE", "Pricer"]

BYTES_PER_VALUE = {"fp32": 4, "bf16": 2, "fp64": 8}
# Of a backward pass, where the costs do not know better.
WEIGHT_SHARE = 0.5


class Pricer:
    """Stage times, step times and memory of one plan. The encoders of shapes must be the plan's, in its order."""

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        spec: ModelSpec,
        cluster: ClusterConfig,
        *,
        frozen: Collection[str] = (),
        precision: str = "fp32",
    ) -> None:
        self.plan, self.costs = plan, costs
        self.placement = PLACEMENTS[plan.placement]
        self.transfers = Transfers(plan, costs.links, cluster)
        sharing = {grid.module: self.transfers.sharing_link(grid.module) for grid in plan.grids if grid.gathers}
        self.stage_costs = StageCosts(
            plan, costs, spec, frozen, sharing, BYTES_PER_VALUE[precision], cluster.hides_transfers
        )
        self.compiled = compile_plan(plan, frozen)
        self._with_slots = lru_cache(maxsize=16)(lambda slots: compile_plan(plan, frozen, self._unpacked(slots)))
        self.feature_bytes = spec.feature_size * BYTES_PER_VALUE[precision]
        self.edge_bytes = edge_bytes_of(plan, spec, BYTES_PER_VALUE[precision])
        self.memory = PlanMemory(self.stage_costs, self.compiled, cluster, self.edge_bytes)
        self.stages = self.stage_costs.stages

    @property
    def corrections(self) -> Corrections:
        return self.stage_costs.corrections

    def corrected(self, corrections: Corrections = NO_CORRECTIONS) -> "Pricer":
        """The same plan priced by the cost table with these corrections, and no others."""
        other = copy.copy(self)  # what is compiled and cached holds no times of computations
        other.stage_costs = self.stage_costs.corrected(corrections)
        return other

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """What the rows of stage times stand for."""
        return nodes_of(self.plan)

    def problem(self, shapes: SampleShapes) -> BatchProblem:
        """The batch as a balancing problem (`pose_problem`)."""
        return pose_problem(self.stage_costs, self.memory, shapes)

    def assign(self, shapes: SampleShapes, llm_dp_rank: np.ndarray, microbatch: np.ndarray) -> Assignment:
        """Complete an assignment by the replicas that encode the samples' media (`deal_media`), and by the slots of
        encoders where the plan's placement has such (`filled`)."""
        return self.filled(shapes, deal_media(self.plan, shapes, llm_dp_rank, microbatch))

    def filled(self, shapes: SampleShapes, assignment: Assignment) -> Assignment:
        """The assignment with the fastest order known that memory holds, or else the one that holds least at a time;
        as it is where the plan has one order for all batches, or where memory holds none."""
        if self.filler is None:
            return assignment
        cells = cells_of(self.plan, shapes, assignment)
        of_stages, limit_bytes = self.memory.of_stages(cells), self.memory.limit_bytes
        if self._least_bytes(of_stages) > limit_bytes:
            return assignment
        times = self._times(shapes, assignment, cells)
        least_bytes, best = np.inf, assignment
        for slots in self._fillings(times):
            needed_bytes = self.memory.fullest(of_stages, self.order(slots))
            if needed_bytes < least_bytes:
                least_bytes, best = needed_bytes, replace(assignment, slots=slots)
            if needed_bytes <= limit_bytes:
                break
        return best

    def _least_bytes(self, of_stages: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
        """What the fullest device holds at least, whatever the slots."""
        assert self.filler is not None
        alone = [
            (kept, passing if stage.module == "llm" else np.zeros_like(passing))
            for stage, (kept, passing) in zip(self.stages, of_stages, strict=True)
        ]
        return self.memory.fullest(alone, self._least_held)

    def _fillings(self, times: StageTimes) -> Iterator[np.ndarray | None]:
        """Slots to be tried, None for the colocated order: the fastest known, the other, and slower ones that hold ever
        fewer microbatches of the encoders."""
        assert self.filler is not None
        num_microbatches = self.plan.num_microbatches
        both = [None, self.filler.slots(times, num_microbatches)]
        yield from sorted(both, key=lambda slots: simulate_step_s(self.order(slots), times))
        while num_microbatches > 1:
            num_microbatches //= 2
            yield self.filler.slots(times, num_microbatches)

    @cached_property
    def _least_held(self) -> CompiledPlan:
        assert self.filler is not None
        return self.filler.least_held(self.compiled)

    def order(self, slots: np.ndarray | None) -> CompiledPlan:
        """The plan's order with these slots of encoders."""
        return self.compiled if slots is None else self._with_slots(slots.tobytes())

    def _unpacked(self, slots: bytes) -> np.ndarray:
        return np.frombuffer(slots, dtype=np.int64).reshape(2, self.plan.grid("llm").pp, self.plan.num_microbatches)

    @cached_property
    def filler(self) -> BubbleFiller | None:
        """What finds slots, where the plan's placement has such."""
        return BubbleFiller(self.plan, self.stage_costs.frozen) if self.placement.fills_bubbles else None

    def stage_times(self, shapes: SampleShapes, assignment: Assignment) -> StageTimes:
        """Predicted seconds of every computation, transfer and gradient sync of the step.

        The weights' part of a backward is taken to be half of it: the gradients of a matrix's input and of its weights
        are products of the same size. Attention, which has no weights, is thereby shared out too.
        """
        return self._times(shapes, assignment, cells_of(self.plan, shapes, assignment))

    def _times(self, shapes: SampleShapes, assignment: Assignment, cells: Mapping[str, Cells]) -> StageTimes:
        forward_s, backward_s = self.stage_costs.stage_times({name: own.loads for name, own in cells.items()})
        splits = SCHEDULES[self.plan.schedule].splits_backward
        return StageTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=WEIGHT_SHARE * backward_s * self.trains[:, None] if splits else None,
            chain_s=self.transfers.chain_s({name: own.edge_tokens for name, own in cells.items()}, self.edge_bytes),
            bridges=self.transfers.bridges(
                assignment.encoder_rank,
                assignment.llm_dp_rank,
                assignment.microbatch,
                shapes.kept_tokens * self.feature_bytes,
            ),
            sync_s=self.sync_s,
        )

    def loads(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, Loads]:
        """Each module's loads, arrays [dp, num_microbatches]."""
        return {module: own.loads for module, own in cells_of(self.plan, shapes, assignment).items()}

    def step_s(self, shapes: SampleShapes, assignment: Assignment) -> float:
        return simulate_step_s(self.order(assignment.slots), self.stage_times(shapes, assignment))

    def timeline(self, times: StageTimes, slots: np.ndarray | None) -> Timeline:
        """Of an assignment with such times and slots."""
        return simulate(self.order(slots), times)

    def lower_bound_s(self, shapes: SampleShapes) -> float:
        """No schedule of this batch is faster."""
        return least_step_s(self.stage_costs, shapes)

    def memory_bytes(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, float]:
        """Predicted peak of each module's fullest rank: what is resident, and the microbatches in flight."""
        return self.memory.of_modules(cells_of(self.plan, shapes, assignment), self.order(assignment.slots))

    def activation_bytes(self, shapes: SampleShapes, assignment: Assignment, order: CompiledPlan) -> np.ndarray:
        """What each worker's ranks hold of microbatches at most, [num_workers]."""
        return self.memory.peak_bytes(cells_of(self.plan, shapes, assignment), order)

    def extrapolated(self, shapes: SampleShapes, assignment: Assignment) -> np.ndarray:
        """Which nodes' microbatches hold loads outside of what was measured, bool [num_nodes, num_microbatches]."""
        by_module = self._outside(shapes, assignment)
        return np.concatenate([by_module[stage.module] for stage in self.stages])

    def extrapolated_share(self, shapes: SampleShapes, assignment: Assignment) -> float:
        """The share of the microbatches whose loads lie outside of what was measured."""
        return float(np.concatenate([flags.ravel() for flags in self._outside(shapes, assignment).values()]).mean())

    def _outside(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, np.ndarray]:
        """By module, bool [dp, num_microbatches]."""
        loads = self.loads(shapes, assignment)
        return {
            grid.module: self.costs.is_extrapolated(
                grid.module, grid.tp, loads[grid.module], checkpointing=self.plan.checkpointing
            )
            for grid in self.plan.grids
        }

    @cached_property
    def trains(self) -> np.ndarray:
        """Which nodes compute gradients of weights, [num_nodes]."""
        own = [stage.module not in self.stage_costs.frozen for stage in self.stages]
        return np.repeat(own, [stage.dp for stage in self.stages])

    @cached_property
    def sync_s(self) -> np.ndarray:
        """The gradient sync of each node, [num_nodes]."""
        own = [self.transfers.gradient_sync_s(stage, self.stage_costs.sync_bytes(stage)) for stage in self.stages]
        return np.repeat(own, [stage.dp for stage in self.stages]) * self.trains
