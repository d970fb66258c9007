"""What a run says of its steps: a line of `metrics.jsonl` and a line on the screen for each, and warnings once."""

import json
import sys
from typing import Any

from dflop.costs import BEYOND_MEASURED
from dflop.scheduling import StepSchedule
from dflop.training.run_folder import RunFiles

__all__ = ["StepLog", "say_if_costs_are_of_another"]


class StepLog:
    """The first rank's log of a run of `num_steps` steps over `world_size` ranks."""

    def __init__(self, files: RunFiles, num_steps: int, world_size: int) -> None:
        self._metrics, self._prices = files.metrics, files.generation.prices
        self._num_steps, self._world_size = num_steps, world_size
        self._said_extrapolated = False

    def add(
        self, step: int, schedule: StepSchedule, totals: dict[str, float], step_s: float, pipeline_s: float
    ) -> None:
        """`totals` are sums over all ranks (waits: means) as the trainer makes them."""
        extrapolated = float(schedule.extrapolated.mean())
        if extrapolated and not self._said_extrapolated:
            self._said_extrapolated = True
            print(
                f"dflop: warning: step {step}: {extrapolated:.1%} of the ranks' microbatches {BEYOND_MEASURED}; said "
                "once, metrics.jsonl has the share of every step (`extrapolated`)",
                file=sys.stderr,
                flush=True,
            )
        # A rank's step is its computations plus its waits; ranks end the step together, at the all-reduce.
        idle = 1 - totals["busy_s"] / (self._world_size * step_s)
        line: dict[str, Any] = {
            "step": step,
            "loss": totals["loss"],
            "num_samples": len(schedule.sample_id),
            "num_tokens": int(schedule.llm_tokens.sum()),
            "num_items": int(schedule.num_items.sum()),
            "step_s": step_s,
            "pipeline_s": pipeline_s,
            "predicted_step_s": schedule.step_s,
            "idle": idle,
            "predicted_idle": schedule.idle,
            "wait_s": totals["wait_s"],
            "data_wait_s": totals["data_wait_s"],
            "grad_norm": totals["grad_norm"],
            "lr": totals["lr"],
            "policy": schedule.policy,
            "policy_status": schedule.status,
            "num_beyond_memory": schedule.num_beyond_memory,
            "deciding_s": schedule.deciding_s,
            "num_unreadable": int(totals["unreadable"]),
            "extrapolated": extrapolated,
            "corrections_version": schedule.corrections_version,
            "measures": schedule.measures,
            "generation": self._prices,
        }
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"step {step + 1}/{self._num_steps}  loss {totals['loss']:.3f}  {step_s:.2f} s  "
            f"{line['num_tokens'] / step_s:,.0f} tokens/s  idle {idle:.0%}  "
            f"schedule wait {totals['wait_s'] * 1e3:.1f} ms",
            flush=True,
        )


def say_if_costs_are_of_another(measured_on: str | None, running_on: str) -> None:
    """A warning when the costs were measured on another device than this; `measured_on` is None for analytic ones."""
    if measured_on not in (None, running_on):
        print(
            f"dflop: warning: the costs were measured on {measured_on!r} and this is {running_on!r}: the plan and "
            "the schedules follow another device; measure again with `dflop profile-costs` (`snakemake --forcerun "
            "profile_costs`) and give each device a `cluster.device_model` of its own",
            file=sys.stderr,
            flush=True,
        )
