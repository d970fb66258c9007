"""Pricing an assignment: the times of a step from the samples of each replica and the cost model.

`Pricer` brings together a plan, a model's costs and a batch's shapes, for planning and scheduling. It computes times
itself; `plan_memory` computes bytes on devices, and `batch_problem` the balancing problem of a batch.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from dflop.balance import BatchProblem, DrawnBatch
from dflop.config import AudioConfig, ClusterConfig
from dflop.costs import CostModel, Loads
from dflop.models import ModelSpec
from dflop.plan import PLACEMENTS, Plan
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.schedule.assignment import Assignment, Cells, cells_of, deal_media, samples_alone
from dflop.schedule.batch_problem import least_step_s, loads_without_plan, pose_problem
from dflop.schedule.correction import NO_CORRECTIONS, Corrections
from dflop.schedule.edge_bytes import edge_bytes_of
from dflop.schedule.plan_memory import MicrobatchBytes, PlanMemory
from dflop.schedule.stage_costs import StageCosts
from dflop.schedule.transfers import Transfers
from dflop.shapes import SampleShapes
from dflop.shapes.shares import SampleDivider
from dflop.step import (
    BubbleFiller,
    CompiledPlan,
    Node,
    StageTimes,
    Timeline,
    compile_plan,
    nodes_of,
    peak_bytes,
    simulate,
    simulate_step_s,
)

__all__ = ["BYTES_PER_VALUE", "Pricer"]

BYTES_PER_VALUE = {"fp32": 4, "bf16": 2, "fp64": 8}


class Pricer:
    """Stage times, step times and memory of one plan.

    Methods take shapes whose encoders are the plan's, in its order. Those that take `cells` find the assignment's
    (`Pricer.cells`) by themselves where these are not given.
    """

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        spec: ModelSpec,
        cluster: ClusterConfig,
        *,
        trained: TrainedSet = EVERYTHING,
        precision: str = "fp32",
        audio: AudioConfig | None = None,
    ) -> None:
        """`audio` is needed for plans in which replicas share samples: without it, they share none."""
        self.plan, self.costs, trained = plan, costs, trained.among(spec.modules)
        self.placement = PLACEMENTS[plan.placement]
        self.transfers = Transfers(plan, costs.links, cluster)
        self.divider = SampleDivider(spec, audio) if audio and plan.grid("llm").cp > 1 else None
        if self.divider:
            token_bytes = spec.keys_and_values * BYTES_PER_VALUE[precision]
            sizes = spec.module("llm")
            num_groups = sizes.num_heads / sizes.num_kv_heads
            self.costs = costs.exchanging(token_bytes, self.transfers.exchange_byte_s(), num_groups)
        self._about = spec, cluster, trained, BYTES_PER_VALUE[precision]
        self.compiled = compile_plan(plan, trained)
        self._with_slots = lru_cache(maxsize=16)(lambda slots: compile_plan(plan, trained, self._unpacked(slots)))
        self.feature_bytes = spec.feature_size * BYTES_PER_VALUE[precision]
        self._price_stages()

    def _price_stages(self) -> None:
        """Set everything that depends on which layers the plan recomputes."""
        spec, cluster, trained, value_bytes = self._about
        sharing = {grid.module: self.transfers.sharing_link(grid.module) for grid in self.plan.grids if grid.gathers}
        self.stage_costs = StageCosts(
            self.plan, self.costs, spec, trained, sharing, value_bytes, cluster.hides_transfers
        )
        frozen = [grid.module for grid in self.plan.grids if not trained.trains(grid.module)]
        has_slots = cluster.device == "cuda"
        self.edge_bytes = edge_bytes_of(self.plan, spec, value_bytes, has_slots=has_slots, frozen=frozen)
        self.memory = PlanMemory(self.stage_costs, self.compiled, cluster, self.edge_bytes, is_tied=spec.has_tied_head)
        self.stages = self.stage_costs.stages

    @property
    def corrections(self) -> Corrections:
        return self.stage_costs.corrections

    def corrected(self, corrections: Corrections = NO_CORRECTIONS) -> "Pricer":
        """The same plan priced by the cost table with these corrections instead of the present ones."""
        other = copy.copy(self)  # the compiled plan and the cached properties do not depend on times of computations
        other.stage_costs = self.stage_costs.corrected(corrections)
        return other

    def recomputing(self, plan: Plan) -> "Pricer":
        """The pricer of a plan that differs from this one only in the layers that it recomputes."""
        other = copy.copy(self)  # the compiled plan does not depend on the recomputed layers
        other.plan = plan
        other._price_stages()
        return other

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that the rows of stage times belong to."""
        return nodes_of(self.plan)

    @property
    def on_gpus(self) -> bool:
        """Whether devices compute, and not the cores that the scheduler runs on."""
        return self._about[1].device == "cuda"

    def problem(self, shapes: SampleShapes) -> BatchProblem:
        """The batch as a balancing problem (`pose_problem`)."""
        return pose_problem(self.stage_costs, self.memory, shapes)

    def drawn(self, shapes: SampleShapes, seed: Sequence[int]) -> DrawnBatch:
        """The batch as the search of plans sees it, without a plan. Policies draw from `seed`."""
        return DrawnBatch(loads_without_plan(shapes, self._about[0], self.costs), shapes.llm_tokens, seed, num_kept=1)

    def assign(self, shapes: SampleShapes, llm_dp_rank: np.ndarray, microbatch: np.ndarray) -> Assignment:
        """Complete an assignment with the replicas that encode the samples' media (`deal_media`), and, where the plan's
        placement fills bubbles, with the slots of encoders (`filled`)."""
        return self.filled(shapes, deal_media(self.plan, shapes, llm_dp_rank, microbatch))

    def filled(
        self, shapes: SampleShapes, assignment: Assignment, cells: Mapping[str, Cells] | None = None
    ) -> Assignment:
        """The assignment with the slots of the fastest known order that fits into memory.

        Where none of the tried orders fits, it gets the order that needs least memory. It is returned unchanged where
        the plan has one order for all batches, or where no order can fit.
        """
        if self.filler is None:
            return assignment
        cells = cells or self.cells(shapes, assignment)
        of_stages, limit_bytes = self.memory.of_stages(cells), self.memory.limit_bytes
        if self._least_bytes(of_stages) > limit_bytes:
            return assignment
        times = self.stage_times(shapes, assignment, cells)
        least_bytes, best = np.inf, assignment
        for slots in self._fillings(times):
            needed_bytes = self.memory.fullest(of_stages, self.order(slots))
            if needed_bytes < least_bytes:
                least_bytes, best = needed_bytes, replace(assignment, slots=slots)
            if needed_bytes <= limit_bytes:
                break
        return best

    def _least_bytes(self, of_stages: Sequence[MicrobatchBytes]) -> float:
        """A lower bound of the fullest device's bytes over all slots."""
        assert self.filler is not None
        alone = [
            sizes._replace(
                passing=sizes.passing if stage.module == "llm" else 0 * sizes.passing, edge_tokens=0 * sizes.edge_tokens
            )
            for stage, sizes in zip(self.stages, of_stages, strict=True)
        ]
        return self.memory.fullest(alone, self._least_held)

    def _fillings(self, times: StageTimes) -> Iterator[np.ndarray | None]:
        """Slots to try, None for the colocated order: that order and the filler's slots, the faster of the two first;
        then slots that hold the encoders' activations of ever fewer microbatches."""
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
        """The search for slots, where the plan's placement fills bubbles."""
        return BubbleFiller(self.plan, self.stage_costs.trained) if self.placement.fills_bubbles else None

    def alone(self, shapes: SampleShapes) -> dict[str, Cells]:
        """The loads of each sample by itself, [num_samples]."""
        return samples_alone(self.plan, shapes)

    def cells(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, Cells]:
        """The loads of every replica of each module in every microbatch, whichever layers are recomputed."""
        return cells_of(self.plan, shapes, assignment)

    def stage_times(
        self, shapes: SampleShapes, assignment: Assignment, cells: Mapping[str, Cells] | None = None
    ) -> StageTimes:
        """Predicted seconds of every computation, transfer and gradient sync of the step."""
        cells = cells or self.cells(shapes, assignment)
        forward_s, backward_s = self.stage_costs.stage_times({name: cell.loads for name, cell in cells.items()})
        return StageTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            chain_s=self.transfers.chain_s({name: cell.edge_tokens for name, cell in cells.items()}, self.edge_bytes),
            bridges=self.transfers.bridges(
                assignment.encoder_rank,
                assignment.llm_dp_rank,
                assignment.microbatch,
                shapes.kept_tokens * self.feature_bytes,
            ),
            sync_s=self.sync_s,
            early_sync_s=self.early_sync_s,
            late_sync_s=self.late_sync_s,
        )

    def loads(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, Loads]:
        """Each module's loads, arrays [dp, num_microbatches]."""
        return {module: cell.loads for module, cell in self.cells(shapes, assignment).items()}

    def step_s(self, shapes: SampleShapes, assignment: Assignment, cells: Mapping[str, Cells] | None = None) -> float:
        """The predicted step time, in seconds, if every message begins when it is made."""
        return simulate_step_s(self.order(assignment.slots), self.stage_times(shapes, assignment, cells))

    def timeline(self, times: StageTimes, slots: np.ndarray | None) -> Timeline:
        """The timeline of an assignment with these times and slots, on GPUs with messages as these carry them."""
        return simulate(self.order(slots), times, carried=self.on_gpus)

    def lower_bound_s(self, shapes: SampleShapes) -> float:
        """A lower bound of the step time of any schedule of this batch, in seconds (`least_step_s`)."""
        return least_step_s(self.stage_costs, shapes)

    def memory_bytes(
        self, shapes: SampleShapes, assignment: Assignment, cells: Mapping[str, Cells] | None = None
    ) -> dict[str, float]:
        """Predicted peak bytes of each module's fullest rank, with parameters, optimiser state and microbatches."""
        return self.memory.of_modules(cells or self.cells(shapes, assignment), self.order(assignment.slots))

    def bytes_along_pipeline(
        self, shapes: SampleShapes, assignment: Assignment, cells: Mapping[str, Cells] | None = None
    ) -> dict[str, np.ndarray]:
        """`memory_bytes` in each place of each module's pipeline, [pp]."""
        return self.memory.along_pipeline(cells or self.cells(shapes, assignment), self.order(assignment.slots))

    def host_bytes(
        self, shapes: SampleShapes, assignment: Assignment, cells: Mapping[str, Cells] | None = None
    ) -> float:
        """The most bytes of host memory that a device's offloaded layers and optimiser state take at a time."""
        cells = cells or self.cells(shapes, assignment)
        kept = np.concatenate([self.stage_costs.host_bytes(module, cell.loads) for module, cell in cells.items()])
        nothing = np.zeros_like(kept)
        held = peak_bytes(self.order(assignment.slots), kept, nothing, nothing)
        for stage in self.stages:
            workers = slice(stage.first_worker, stage.first_worker + stage.dp * stage.span)
            held[workers] += self.stage_costs.offloaded_state_bytes(stage)
        return float(held.max())

    def activation_bytes(self, shapes: SampleShapes, assignment: Assignment, order: CompiledPlan) -> np.ndarray:
        """Peak bytes of microbatches on each worker's ranks, [num_workers]."""
        return self.memory.peak_bytes(self.cells(shapes, assignment), order)

    def extrapolated(self, shapes: SampleShapes, assignment: Assignment) -> np.ndarray:
        """Which nodes' microbatches have loads outside the measured range, bool [num_nodes, num_microbatches]."""
        by_module = self._outside(shapes, assignment)
        return np.concatenate([by_module[stage.module] for stage in self.stages])

    def extrapolated_share(self, shapes: SampleShapes, assignment: Assignment) -> float:
        """The share of the modules' microbatches whose loads lie outside the measured range."""
        return float(np.concatenate([flags.ravel() for flags in self._outside(shapes, assignment).values()]).mean())

    def _outside(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, np.ndarray]:
        """By module, which microbatches have loads outside the measured range, bool [dp, num_microbatches]."""
        loads = self.loads(shapes, assignment)
        return {
            grid.module: self.costs.is_extrapolated(
                grid.module, grid.layout, loads[grid.module], checkpointing=self.plan.checkpointing
            )
            for grid in self.plan.grids
        }

    @cached_property
    def trains(self) -> np.ndarray:
        """Which nodes compute gradients of weights, bool [num_nodes]."""
        is_synced = [self.stage_costs.sync_bytes(stage) > 0 for stage in self.stages]
        return np.repeat(is_synced, [stage.dp for stage in self.stages])

    @cached_property
    def sync_s(self) -> np.ndarray:
        """Seconds of each node's gradient sync and, between its two halves, of the optimiser's step, with the copies of
        an offloaded state, [num_nodes]."""
        between_s = [
            self.stage_costs.update_s(stage) + self.transfers.host_s(2 * self.stage_costs.offloaded_state_bytes(stage))
            for stage in self.stages
        ]
        return self._summed_s + np.repeat(between_s, [stage.dp for stage in self.stages])

    @cached_property
    def _summed_s(self) -> np.ndarray:
        seconds = [self.transfers.gradient_sync_s(stage, self.stage_costs.sync_bytes(stage)) for stage in self.stages]
        return np.repeat(seconds, [stage.dp for stage in self.stages]) * self.trains

    @cached_property
    def early_sync_s(self) -> np.ndarray | None:
        """The part of `sync_s` that may run beside each node's last backward, [num_nodes]; None if no device computes
        while it communicates."""
        return None if self._hidden_shares is None else self._summed_s * self._hidden_shares[0]

    @cached_property
    def late_sync_s(self) -> np.ndarray | None:
        """The part of `sync_s` that may run beside each node's first forward, as `early_sync_s`."""
        return None if self._hidden_shares is None else self._summed_s * self._hidden_shares[1]

    @cached_property
    def _hidden_shares(self) -> np.ndarray | None:
        """The shares of early and late parts of each node's sync, [2, num_nodes]."""
        _, cluster, _, _ = self._about
        if not cluster.hides_transfers:
            return None
        shares = [self.stage_costs.hidden_sync_shares(stage) for stage in self.stages]
        return np.repeat(shares, [stage.dp for stage in self.stages], axis=0).T
