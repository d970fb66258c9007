"""Closing the loop: corrections learned from measured steps change later schedules; steps are measured while it pays.

`CorrectionLoop` wraps a `BatchScheduler`. It gets the measured times of steps, learns corrections from them, and
decides for every step that it schedules whether it is measured. With `correction: auto` a gate decides this. After a
window of measured steps, the simulator tells how much shorter the corrections make recent batches. Where this gain is
less than the cost of measuring, steps are not measured for a while; the corrections stay in use. No clock, file or
process is used here.
"""

import dataclasses
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflop.balance import POLICIES
from dflop.config import ScheduleConfig
from dflop.costs import Loads
from dflop.schedule.correction import NO_CORRECTIONS, Corrections, Learner
from dflop.schedule.lockstep import lasting_s
from dflop.schedule.pricer import Pricer
from dflop.schedule.scheduler import BatchScheduler
from dflop.schedule.step_schedule import StepSchedule

__all__ = ["REPORT_LAG_STEPS", "CorrectionLoop", "MeasuredStep"]

# Each rank reports a step at its end. When a step begins, all ranks have reported the step that is two before it.
REPORT_LAG_STEPS = 2
# The gate decides after `_WINDOW` measured steps, on the last `_NUM_TRIED` batches of them, and keeps measuring off for
# `_REST` steps.
_WINDOW, _NUM_TRIED, _REST = 16, 4, 96
# A smaller gain cannot be told from the chance differences between two searches.
_LEAST_GAIN = 0.005


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredStep:
    """Seconds that a step's computations took, [num_nodes, num_microbatches] in the order of `nodes_of`.

    `overhead` is the share of the step's time that was spent on reporting them.
    """

    step: int
    forward_s: np.ndarray
    backward_s: np.ndarray
    overhead: float

    def to_json(self) -> str:
        """The step as one line of JSON, for `from_dict`."""
        times = {"forward_s": self.forward_s.tolist(), "backward_s": self.backward_s.tolist()}
        return json.dumps({"step": self.step, **times, "overhead": self.overhead})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MeasuredStep":
        times = {name: np.array(values[name], dtype=float) for name in ("forward_s", "backward_s")}
        return cls(step=values["step"], **times, overhead=values["overhead"])


class CorrectionLoop:
    """`schedule(step)` for steps in ascending order, with corrections from the steps given to `observe`.

    A schedule uses the measured steps that are at least `lookahead_steps + REPORT_LAG_STEPS` before it, and no later
    ones, even if they are known: equal measurements give equal schedules.
    """

    def __init__(self, scheduler: BatchScheduler, config: ScheduleConfig, learner: Learner | None = None) -> None:
        self._scheduler, self._table = scheduler, scheduler.pricer.corrected()
        self._mode = config.correction
        # The gate tries batches without CBC, whose answers depend on the time it has.
        self._policy_tried = POLICIES[config.policy].without_cbc.name
        self.learner = learner or Learner()
        self._lag = config.lookahead_steps + REPORT_LAG_STEPS
        self._awaited: dict[int, StepSchedule] = {}
        self._reported: dict[int, MeasuredStep] = {}
        self._overheads: list[float] = []
        self._recent: deque[int] = deque(maxlen=_NUM_TRIED)
        self._rests_until = 0

    def prepare(self, step: int) -> None:
        """Compile all kernels that schedules need, with and without corrections, before training waits for a schedule.

        Compiled kernels are cached on disk, so this takes long only once for each installation.
        """
        self._scheduler.schedule_what_fits(step, self._policy_tried)
        if self._mode != "off":
            ones = self._table.corrected(Corrections(factors={"llm": NO_CORRECTIONS.table("llm")}))
            self._scheduler.priced_by(ones).schedule_what_fits(step, self._policy_tried)

    def schedule(self, step: int) -> StepSchedule:
        """Schedule a step with the present corrections, and decide whether it is measured.

        Raises:
            UserError: as `BatchScheduler.schedule_what_fits` does.
        """
        if self._mode == "off":
            return self._scheduler.schedule_what_fits(step)
        self.learn(step - self._lag)
        corrections = self.learner.corrections
        self._scheduler.pricer = self._table.corrected(corrections)
        if self._mode == "auto" and len(self._overheads) >= _WINDOW:
            if self.gain(list(self._recent)) < max(_LEAST_GAIN, float(np.median(self._overheads))):
                self._rests_until = step + _REST
            self._overheads.clear()
        measures = step >= self._rests_until
        schedule = dataclasses.replace(self._scheduler.schedule_what_fits(step), measures=measures)
        if measures:
            self._awaited[step] = schedule
        return schedule

    def observe(self, measured: MeasuredStep) -> None:
        """Take a step's measured times. A step that was scheduled before a restart, and not here, is ignored."""
        if measured.step in self._awaited:
            self._reported[measured.step] = measured

    def learn(self, last_step: int) -> None:
        """Learn from the measured steps up to this one."""
        steps = sorted(step for step in self._reported if step <= last_step)
        for step in steps:
            measured = self._reported.pop(step)
            self.learner.observe(_cells(self._table, self._awaited[step], measured))
            self._recent.append(step)
            if step >= self._rests_until:
                self._overheads.append(measured.overhead)
        for step in [step for step in self._awaited if step < last_step]:
            del self._awaited[step]

    def gain(self, steps: list[int]) -> float:
        """The share by which these steps are shorter when scheduled with corrections instead of by the table alone.

        Both schedules are priced with the corrections.
        """
        corrected = self._scheduler.pricer
        if not steps or corrected.corrections.factors == NO_CORRECTIONS.factors:
            return 0.0
        took_s = [
            sum(
                corrected.step_s(schedule.shapes, schedule.assignment)
                for schedule in (scheduler.schedule_what_fits(step, self._policy_tried) for step in steps)
            )
            for scheduler in (self._scheduler.priced_by(pricer) for pricer in (self._table, corrected))
        ]
        return 1 - took_s[1] / took_s[0]


def _cells(
    table: Pricer, schedule: StepSchedule, measured: MeasuredStep
) -> list[tuple[str, Loads, np.ndarray, np.ndarray]]:
    """For each pipeline stage: module, loads, the table's seconds and the measured ones, as `Learner.observe` takes."""
    of_module = table.loads(schedule.shapes, schedule.assignment)
    table_s = np.stack(table.stage_costs.stage_times(of_module))
    measured_s = np.stack([measured.forward_s, measured.backward_s])
    # Of replicas that wait for each other in every layer, only the slowest computed for all of its measured time.
    table_s = np.where(table_s == lasting_s(table.plan, table_s), table_s, 0.0)
    ends = np.cumsum([stage.dp for stage in table.stages])
    return [
        (stage.module, of_module[stage.module], table_s[:, end - stage.dp : end], measured_s[:, end - stage.dp : end])
        for stage, end in zip(table.stages, ends, strict=True)
    ]
