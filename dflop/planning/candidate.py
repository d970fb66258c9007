"""The price of a plan: what its regrouped batches would take, and what keeps them from taking less."""

from dataclasses import dataclass, replace

import numpy as np

from dflop.config import Config
from dflop.costs import CostModel
from dflop.data import SampleShapes
from dflop.models import ModelSpec, why_family_cannot_run
from dflop.parallelism import PLACEMENTS, Plan
from dflop.pipeline import StageTimes, Timeline, why_not_runnable
from dflop.planning.grouped_batches import GroupedBatches
from dflop.pricing import Assignment, Pricer, alone_bytes

__all__ = ["Candidate", "PlanPricer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A priced plan; times are means over the batches, memory is the highest of them, or a single sample's.

    `steps_s` are the steps of each batch, `busy_s` is that of each module's busiest rank. `why_not_runnable` is None
    for a plan that can be trained today.
    """

    plan: Plan
    num_batches: int
    steps_s: tuple[float, ...]
    idle: float
    memory_bytes: dict[str, float]
    busy_s: dict[str, float]
    extrapolated: float
    bottleneck: str
    why_not_runnable: str | None

    @property
    def step_s(self) -> float:
        return float(np.mean(self.steps_s))


class PlanPricer:
    """Prices one plan, batch by batch. `grouping` is `balanced`, or `random` or `by_length`: training without a
    scheduler."""

    def __init__(
        self, plan: Plan, config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches, grouping: str
    ) -> None:
        self.plan, self._batches = plan, batches
        self._group = getattr(batches, grouping)
        self._family = spec.family
        self._assigned: dict[int, tuple[SampleShapes, Assignment]] = {}
        self._pricer = Pricer(
            plan, costs, spec, config.cluster, frozen=config.model.freeze, precision=config.train.precision
        )

    def memory_bytes(self, batch: int) -> dict[str, float]:
        """The peak of each module's fullest rank."""
        return self._pricer.memory_bytes(*self._grouped(batch))

    def alone_bytes(self) -> float:
        """What the largest sample takes at least, alone in its microbatch."""
        return float(alone_bytes(self._pricer, self._batches.largest).max())

    def step_s(self, batch: int) -> float:
        return self._pricer.step_s(*self._grouped(batch))

    def stage_times(self, batch: int) -> StageTimes:
        return self._pricer.stage_times(*self._grouped(batch))

    def candidate(self) -> Candidate:
        """All there is to say of the plan."""
        steps, idles, extrapolated = [], [], []
        memory: dict[str, list[float]] = {}
        busy: dict[str, list[float]] = {}
        for batch in range(len(self._batches)):
            shapes, assignment = self._grouped(batch)
            times = self._pricer.stage_times(shapes, assignment)
            timeline = self._pricer.timeline(times, assignment.slots)
            steps.append(timeline.step_s)
            idles.append(timeline.idle)
            extrapolated.append(self._pricer.extrapolated_share(shapes, assignment))
            for module, size in self._pricer.memory_bytes(shapes, assignment).items():
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
            bottleneck=bottleneck,
            why_not_runnable=why_family_cannot_run(self._family) or why_not_runnable(self.plan),
        )

    def _grouped(self, batch: int) -> tuple[SampleShapes, Assignment]:
        if batch not in self._assigned:
            shapes, llm = self._batches.shapes[batch], self.plan.grid("llm")
            grouped = self._group(batch, llm.dp, self.plan.num_microbatches)
            self._assigned[batch] = shapes, self._pricer.assign(shapes, *grouped)
        return self._assigned[batch]

    def _busiest_s(self, busy_s: np.ndarray) -> dict[str, float]:
        """Seconds that each module computes on its busiest rank; the chunks of a rank count together."""
        busiest = {}
        for grid in self.plan.grids:
            own = [stage for stage in self._pricer.stages if stage.module == grid.module]
            per_rank = np.zeros((grid.pp, grid.dp))
            for stage in own:
                per_rank[stage.pp_stage % grid.pp] += busy_s[stage.first_node : stage.first_node + grid.dp]
            busiest[grid.module] = float(per_rank.max())
        return busiest

    def _bottleneck(self, times: StageTimes, slots: np.ndarray | None, timeline: Timeline) -> str:
        """What takes most of the step: computing on the busiest rank, or what it waits for.

        What goes when bridges or gradient syncs take no time is theirs; the rest of the waiting is the bubble.
        """
        nowhere = replace(times.bridges, seconds=np.zeros_like(times.bridges.seconds))
        without = {
            "bridge": replace(times, bridges=nowhere),
            "gradient sync": replace(times, sync_s=np.zeros_like(times.sync_s)),
        }
        step_s = timeline.step_s
        shares = {name: step_s - self._pricer.timeline(own, slots).step_s for name, own in without.items()}
        busiest = self._busiest_s(timeline.busy_s)
        module = max(busiest, key=busiest.__getitem__)
        shares_ranks = PLACEMENTS[self.plan.placement].shares_ranks
        computing_s = sum(busiest.values()) if shares_ranks else busiest[module]
        shares["bubble"] = step_s - computing_s - sum(shares.values())
        shares[f"{module} compute"] = computing_s
        return max(shares, key=shares.__getitem__)
