"""The price of a plan: its step times on regrouped batches, its memory, and its bottleneck."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dflop.balance import Policy
from dflop.config import Config
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.models.loads import main_load
from dflop.plan import PLACEMENTS, Plan
from dflop.schedule import Assignment, Cells, Pricer, alone_bytes
from dflop.search.grouped_batches import GroupedBatches
from dflop.shapes import SampleShapes
from dflop.step import StageTimes, Timeline

__all__ = ["Candidate", "PlanPricer", "pricer_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A priced plan. Times are means over the batches.

    `steps_s` are the step times of the batches. `memory_bytes` is the peak of each module's fullest rank over the
    batches; the largest of them also covers any sample alone in a microbatch. `busy_s` are the seconds that each
    module's busiest rank computes. `extrapolated` is the share of microbatches with loads outside the measured range.
    `mean_load` is that of each module's microbatches, in items of encoders and tokens of the LLM.
    """

    plan: Plan
    num_batches: int
    steps_s: tuple[float, ...]
    idle: float
    memory_bytes: dict[str, float]
    busy_s: dict[str, float]
    extrapolated: float
    mean_load: dict[str, float]
    bottleneck: str

    @property
    def step_s(self) -> float:
        return float(np.mean(self.steps_s))


def pricer_of(plan: Plan, config: Config, spec: ModelSpec, costs: CostModel) -> Pricer:
    """The pricer of a plan for the config's cluster, trained modules and precision."""
    return Pricer(
        plan,
        costs,
        spec,
        config.cluster,
        trained=config.model.trained,
        precision=config.train.precision,
        audio=config.data.audio,
    )


class _Grouped(NamedTuple):
    """A batch as it is grouped for a plan."""

    shapes: SampleShapes
    assignment: Assignment
    cells: dict[str, Cells]


class PlanPricer:
    """Prices one plan, batch by batch.

    Samples are grouped by the quick form of `policy`, such as `RANDOM` for training without a scheduler.
    """

    def __init__(
        self, plan: Plan, config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches, policy: Policy
    ) -> None:
        self.plan, self._batches, self._costs = plan, batches, costs
        self._policy = policy
        self._assigned: dict[int, _Grouped] = {}
        self._pricer = pricer_of(plan, config, spec, costs)

    def recomputing(self, plan: Plan) -> "PlanPricer":
        """The pricer of a plan that differs from this one only in the layers that it recomputes."""
        other = copy.copy(self)
        other.plan, other._pricer = plan, self._pricer.recomputing(plan)
        if PLACEMENTS[plan.placement].fills_bubbles:
            other._assigned = {}  # the order of such a plan depends on how much memory is free
        return other

    @property
    def spares_attention(self) -> bool:
        """`GroupedBatches.spares_attention` in the plan's layout of the LLM."""
        return self._batches.spares_attention(self._costs, self.plan.grid("llm").layout)

    def memory_bytes(self, batch: int) -> dict[str, float]:
        """The peak bytes of each module's fullest rank."""
        return self._pricer.memory_bytes(*self._grouped(batch))

    def bytes_along_pipeline(self, batches: Iterable[int]) -> dict[str, np.ndarray]:
        """By module, the peak bytes over these batches of the fullest rank in each place of its pipeline, [pp]."""
        of_batches = [self._pricer.bytes_along_pipeline(*self._grouped(batch)) for batch in batches]
        return {grid.module: np.max([peaks[grid.module] for peaks in of_batches], axis=0) for grid in self.plan.grids}

    def fullest_batch(self, enough: float = np.inf, first: int = 0) -> tuple[int, float]:
        """The batch that needs most memory, and the bytes of the fullest rank; batch `first` is looked at first, and
        none behind one that needs more than `enough`."""
        fullest, most = first, -np.inf
        for batch in [first, *(other for other in range(len(self._batches)) if other != first)]:
            needed = max(self.memory_bytes(batch).values())
            if needed > most:
                fullest, most = batch, needed
            if most > enough:
                break
        return fullest, most

    def needed_bytes(self, enough: float = np.inf) -> float:
        """Bytes that the fullest rank needs for all batches, and for any one sample alone.

        From `enough` on, the result may be a lower bound.
        """
        needed = self.alone_bytes()
        for batch in range(len(self._batches)):
            if needed >= enough:
                break
            needed = max(needed, *self.memory_bytes(batch).values())
        return needed

    def alone_bytes(self) -> float:
        """Bytes of the fullest device with the sample that needs most, alone in its microbatch."""
        return float(alone_bytes(self._pricer, self._batches.largest).max())

    def host_bytes(self) -> float:
        """Bytes of host memory that the fullest device's offloaded layers and optimiser state take."""
        if not self.plan.offloads:
            return 0.0
        return max(self._pricer.host_bytes(*self._grouped(batch)) for batch in range(len(self._batches)))

    def step_s(self, batch: int) -> float:
        """The predicted step time of a batch, in seconds."""
        return self._pricer.step_s(*self._grouped(batch))

    def mean_step_s(self) -> float:
        """The mean step time over all batches, in seconds."""
        return float(np.mean([self.step_s(batch) for batch in range(len(self._batches))]))

    def stage_times(self, batch: int) -> StageTimes:
        """The predicted seconds of a batch's computations and transfers."""
        return self._pricer.stage_times(*self._grouped(batch))

    def candidate(self) -> Candidate:
        """The plan with all its figures."""
        steps, idles, extrapolated = [], [], []
        memory: dict[str, list[float]] = {}
        busy: dict[str, list[float]] = {}
        for batch in range(len(self._batches)):
            shapes, assignment, _ = self._grouped(batch)
            times = self.stage_times(batch)
            timeline = self._pricer.timeline(times, assignment.slots)
            steps.append(timeline.step_s)
            idles.append(timeline.idle)
            extrapolated.append(self._pricer.extrapolated_share(shapes, assignment))
            for module, size in self.memory_bytes(batch).items():
                memory.setdefault(module, []).append(size)
            for module, seconds in self._busiest_s(timeline.busy_s).items():
                busy.setdefault(module, []).append(seconds)
            if batch == 0:
                bottleneck = self._bottleneck(times, assignment.slots, timeline)
        memory_bytes = {module: max(sizes) for module, sizes in memory.items()}
        fullest = max(memory_bytes, key=memory_bytes.__getitem__)
        memory_bytes[fullest] = max(memory_bytes[fullest], self.alone_bytes())
        return Candidate(
            plan=self.plan,
            num_batches=len(self._batches),
            steps_s=tuple(steps),
            idle=float(np.mean(idles)),
            memory_bytes=memory_bytes,
            busy_s={module: float(np.mean(seconds)) for module, seconds in busy.items()},
            extrapolated=float(np.mean(extrapolated)),
            mean_load={grid.module: self._mean_load(grid.module) for grid in self.plan.grids},
            bottleneck=bottleneck,
        )

    def _grouped(self, batch: int) -> _Grouped:
        if batch not in self._assigned:
            shapes = self._batches.shapes[batch]
            assignment, cells = self._batches.assigned(self._policy, batch, self.plan)
            self._assigned[batch] = _Grouped(shapes, self._pricer.filled(shapes, assignment, cells), cells)
        return self._assigned[batch]

    def _mean_load(self, module: str) -> float:
        loads = [getattr(priced.cells[module].loads, main_load(module)) for priced in self._assigned.values()]
        return float(np.mean(loads))

    def _busiest_s(self, busy_s: np.ndarray) -> dict[str, float]:
        """Seconds that each module computes on its busiest rank; the chunks of a rank count together."""
        busiest = {}
        for grid in self.plan.grids:
            stages = [stage for stage in self._pricer.stages if stage.module == grid.module]
            per_rank = np.zeros((grid.pp, grid.dp))
            for stage in stages:
                per_rank[stage.pp_stage % grid.pp] += busy_s[stage.first_node : stage.first_node + grid.dp]
            busiest[grid.module] = float(per_rank.max())
        return busiest

    def _bottleneck(self, times: StageTimes, slots: np.ndarray | None, timeline: Timeline) -> str:
        """The largest part of the step: computing on the busiest rank, bridges, gradient syncs, or the bubble.

        The part of bridges, or of gradient syncs, is the time by which the step is shorter without them. The bubble is
        the rest of the step.
        """
        nowhere = replace(times.bridges, seconds=np.zeros_like(times.bridges.seconds))
        without = {
            "bridge": replace(times, bridges=nowhere),
            "gradient sync": replace(times, sync_s=0.0 * times.sync_s, early_sync_s=None, late_sync_s=None),
        }
        step_s = timeline.step_s
        shares = {name: step_s - self._pricer.timeline(changed, slots).step_s for name, changed in without.items()}
        busiest = self._busiest_s(timeline.busy_s)
        module = max(busiest, key=busiest.__getitem__)
        shares_ranks = PLACEMENTS[self.plan.placement].shares_ranks
        computing_s = sum(busiest.values()) if shares_ranks else busiest[module]
        shares["bubble"] = step_s - computing_s - sum(shares.values())
        shares[f"{module} compute"] = computing_s
        return max(shares, key=shares.__getitem__)
