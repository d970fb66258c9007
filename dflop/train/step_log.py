"""The log of a run's steps: for each a line of `metrics.jsonl` and a line on the screen, and each warning once."""

import contextlib
import json
import os
import statistics
import sys
from collections import deque
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from dflop.costs import BEYOND_MEASURED
from dflop.schedule import StepSchedule
from dflop.train.run_folder import MeasuredOn, RunFiles
from dflop.train.step_seconds import split_line
from dflop.train.trackers import Trackers

__all__ = ["StepLog", "say_if_costs_are_of_another"]


# The number of recent steps from which the remaining time is estimated.
_NUM_RECENT = 20


class StepLog:
    """The first rank's log of a run of `num_steps` steps over `world_size` ranks.

    A full disk does not stop training: lines that could not be written to `metrics.jsonl` are written with a later one.
    While checkpoints cannot be written, set `unsaved` to the reason: every line on the screen then says it.
    """

    def __init__(self, files: RunFiles, num_steps: int, world_size: int, trackers: Trackers | None = None) -> None:
        """`trackers` get every line as well."""
        self._trackers = trackers
        self._metrics, self._prices = files.metrics, files.generation.prices
        self._num_steps, self._world_size = num_steps, world_size
        self._said_extrapolated = False
        self._unwritten = ""
        self._recent_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self.unsaved: str | None = None

    def add(
        self,
        step: int,
        schedule: StepSchedule,
        totals: dict[str, float],
        step_s: float,
        pipeline_s: float,
        parts: np.ndarray,
        evaluated: tuple[float, float] | None = None,
    ) -> None:
        """Log a step. `totals` are the trainer's sums over all ranks (for waits, means), and `parts` are from
        `StepSeconds.of_step`. `evaluated` is the loss of the evaluation set after this step, and the seconds that
        evaluating took.
        """
        extrapolated = float(schedule.extrapolated.mean())
        if extrapolated and not self._said_extrapolated:
            self._said_extrapolated = True
            print(
                f"dflop: warning: step {step + 1}: {extrapolated:.1%} of the ranks' microbatches {BEYOND_MEASURED}; "
                "this warning comes once, metrics.jsonl has the share of every step (`extrapolated`)",
                file=sys.stderr,
                flush=True,
            )
        # A rank's step is its computations plus its waits; ranks end the step together, at the all-reduce.
        idle = 1 - totals["busy_s"] / (self._world_size * step_s)
        measured = {"step_s": step_s, "pipeline_s": pipeline_s, "idle": idle, "seconds": split_line(parts)}
        line = self._line(step, schedule, totals, measured, evaluated)
        self._recent_s.append(step_s)
        trouble = self._write(json.dumps(line) + "\n")
        if self._trackers:
            self._trackers.add(line)
        self._print(line, trouble)

    def _line(
        self,
        step: int,
        schedule: StepSchedule,
        totals: dict[str, float],
        measured: dict[str, Any],
        evaluated: tuple[float, float] | None,
    ) -> dict[str, Any]:
        """A step's line of metrics.jsonl."""
        return {
            "step": step,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "loss": totals["loss"],
            "evaluation_loss": evaluated[0] if evaluated else None,
            "num_samples": schedule.num_samples,
            "num_tokens": int(schedule.llm_tokens.sum()),
            "num_items": int(schedule.num_items.sum()),
            "step_s": measured["step_s"],
            "pipeline_s": measured["pipeline_s"],
            "predicted_step_s": schedule.step_s,
            "idle": measured["idle"],
            "predicted_idle": schedule.idle,
            "wait_s": totals["wait_s"],
            "data_wait_s": totals["data_wait_s"],
            "evaluation_s": evaluated[1] if evaluated else None,
            "seconds": measured["seconds"],
            "grad_norm": totals["grad_norm"],
            "lr": totals["lr"],
            "policy": schedule.policy,
            "policy_status": schedule.status,
            "num_beyond_memory": schedule.num_beyond_memory,
            "num_left_out": schedule.num_left_out,
            "deciding_s": schedule.deciding_s,
            "num_unreadable": int(totals["unreadable"]),
            "num_undecodable": int(totals["undecodable"]),
            "num_eager": int(totals["eager"]),
            "extrapolated": float(schedule.extrapolated.mean()),
            "corrections_version": schedule.corrections_version,
            "measures": schedule.measures,
            "generation": self._prices,
        }

    def _print(self, line: dict[str, Any], trouble: str | None) -> None:
        """A step's line on the terminal; `trouble` is why metrics.jsonl could not be written."""
        step, step_s, left_out = line["step"], line["step_s"], line["num_left_out"]
        to_go = timedelta(seconds=round(statistics.median(self._recent_s) * (self._num_steps - step - 1)))
        with contextlib.suppress(OSError):  # stdout may be a file on the full disk as well
            print(
                f"{datetime.now():%H:%M:%S}  step {step + 1}/{self._num_steps}  loss {line['loss']:.3f}  "
                f"lr {line['lr']:.2e}  {step_s:.2f} s  {line['num_tokens'] / step_s:,.0f} tokens/s  "
                f"idle {line['idle']:.0%}  schedule wait {line['wait_s'] * 1e3:.1f} ms  to go {to_go}"
                + (f"  evaluation loss {line['evaluation_loss']:.3f}" if line["evaluation_loss"] is not None else "")
                + (f"  samples left out: {left_out}, as the batch did not fit into memory" if left_out else "")
                + (f"  NOT SAVED: {self.unsaved}" if self.unsaved else "")
                + (f"  metrics.jsonl not written: {trouble}" if trouble else ""),
                flush=True,
            )

    def close(self) -> None:
        if self._trackers:
            self._trackers.close()

    def _write(self, line: str) -> str | None:
        """Append a line, and those before it that are not written yet; returns why that failed."""
        self._unwritten += line
        end = self._metrics.stat().st_size if self._metrics.exists() else 0
        try:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(self._unwritten)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self._metrics, end)  # remove what was written of the line
            return str(error)
        self._unwritten = ""
        return None


def say_if_costs_are_of_another(measured_on: MeasuredOn | None, running_on: MeasuredOn) -> None:
    """Warn if the costs were measured on another device, or with another kernel of attention; `measured_on` is None for
    analytic costs."""
    if measured_on is None:
        return
    again = "measure again with `dflop profile-costs` (`snakemake --forcerun profile_costs`)"
    said = []
    if measured_on.device != running_on.device:
        said.append(
            f"on {measured_on.device!r} and this is {running_on.device!r}: the plan and the schedules follow another "
            f"device; {again} and give each device a `cluster.device_model` of its own"
        )
    if measured_on.attention not in (None, running_on.attention):
        said.append(
            f"with the attention of {measured_on.attention!r} and this run has {running_on.attention!r}: the plan and "
            f"the schedules follow another kernel; install it here as well (`dflop doctor` names it), or {again}"
        )
    for line in said:
        print(f"dflop: warning: the costs were measured {line}", file=sys.stderr, flush=True)
