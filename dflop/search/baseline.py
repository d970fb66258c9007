"""Baselines: common ways to train, priced by the same simulator on the same batches as our plan.

Which there are, and how each finds its plan, is in `comparison/systems`. Here is what is said of one.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflop.plan import Plan, read_plan_file
from dflop.search.candidate import Candidate

__all__ = ["TODAY", "Baseline", "read_baselines"]

TODAY = "today's layout, random batches (plan.today)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """One way to train without our planner: the fastest plan of its kind, `priced`. Where no plan of the kind is
    possible, `priced` is None and `why_not` says why."""

    name: str
    priced: Candidate | None
    why_not: str = "nothing of the kind fits into memory"

    @property
    def plan(self) -> Plan | None:
        return self.priced and self.priced.plan

    @property
    def step_s(self) -> float:
        return self.priced.step_s if self.priced else np.inf

    @property
    def memory_bytes(self) -> float:
        """The memory of the fullest device."""
        return max(self.priced.memory_bytes.values()) if self.priced else np.nan

    def beside(self, best: Candidate) -> dict[str, object]:
        """The baseline's entry in `plan.yaml`, compared with the chosen plan.

        `over_batches` are the least and the largest ratio of step times over the batches.
        """
        if self.priced is None:
            return {"name": self.name, "why_not": self.why_not}
        ratios = np.divide(self.priced.steps_s, best.steps_s)
        return {
            "name": self.name,
            "step_s": float(f"{self.step_s:.6g}"),
            "would_take": f"{self.step_s / best.step_s:.3f}x as long",
            "over_batches": [round(float(ratio), 4) for ratio in np.percentile(ratios, (0, 100))],
            "idle": round(self.priced.idle, 4),
            "memory_bytes": round(self.memory_bytes),
            "plan": str(self.plan),
        }


def read_baselines(plan: Path) -> dict[str, str]:
    """The text of each baseline in a `plan.yaml`: how long it would take, or why it is not possible.

    A `plan.yaml` written by hand has no baselines.
    """
    said = read_plan_file(plan, "baselines").get("baselines", [])
    return {baseline["name"]: baseline.get("would_take") or baseline["why_not"] for baseline in said}
