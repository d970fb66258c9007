"""The scheduler as a process of its own, which works ahead of training.

`ScheduleService` starts the process and reads its schedules: the bytes of one `StepSchedule` after the other, each
after its length. The first one is empty. It says that the process is ready, with all its code compiled.

The process is `python -m dflop.schedule.service`. On stdin it gets its request, and then the trainer's progress and
the measured times of each step. It stays `lookahead_steps` ahead of the trainer and ends when stdin closes, so it
cannot outlive the trainer. Corrections of the cost table are written to a file of the run after every step that changed
them; a resumed run starts from them.
"""

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from dflop.balance import POLICIES, WORK_TIMEOUT_S
from dflop.base import UserError
from dflop.base.commands import COMMANDS
from dflop.base.numa import leave_cores_near
from dflop.config import Config, load_config, select_keys
from dflop.costs import CostModel
from dflop.models import ModelSpec, check_modules, load_model_spec
from dflop.plan import Plan, check_layers, load_plan
from dflop.schedule.correction_file import CorrectionFile
from dflop.schedule.correction_loop import CorrectionLoop, MeasuredStep
from dflop.schedule.global_batches import EvaluationBatches, GlobalBatches
from dflop.schedule.memory_limit import leave_out_too_large
from dflop.schedule.pricer import Pricer
from dflop.schedule.scheduler import BatchScheduler
from dflop.shapes import SampleShapes, load_samples

__all__ = ["ScheduleService", "open_evaluation", "open_scheduler"]

# The process counts as hanging when a step takes it longer than `_PATIENCE_S` plus `_LIMITS_OF_PATIENCE` times its time
# limit. It has `_STARTING_S` to get ready, because compiling on a busy machine takes minutes. Ranks wait ten minutes
# for a schedule before they give up.
_PATIENCE_S = 20.0
_LIMITS_OF_PATIENCE = 10
_STARTING_S = 420.0
_POLL_S = 0.2
# The format of the length in bytes that stands before each schedule.
_LENGTH = struct.Struct(">Q")


def open_scheduler(config: Config, *, shapes: Path, costs: Path, plan: Path) -> BatchScheduler:
    """The scheduler of a run, from its artifacts (read-only). Samples that no device can hold are left out."""
    samples, left_out, pricer = _open(config, shapes, costs, plan, evaluation=False)
    batches = GlobalBatches.of(samples, config.train.global_batch_size, config.seed)
    return BatchScheduler(samples, pricer, batches, config.schedule, config.seed, left_out, goes_on=True)


def open_evaluation(config: Config, *, shapes: Path, costs: Path, plan: Path) -> BatchScheduler:
    """As `open_scheduler`, for the samples that are held out: its steps are the batches of the evaluation set."""
    samples, left_out, pricer = _open(config, shapes, costs, plan, evaluation=True)
    batches = EvaluationBatches(len(samples), config.train.global_batch_size, pricer.plan.num_buckets)
    return BatchScheduler(samples, pricer, batches, config.schedule, config.seed, left_out)


def _open(
    config: Config, shapes: Path, costs: Path, plan: Path, *, evaluation: bool
) -> tuple[SampleShapes, pl.DataFrame, Pricer]:
    """The samples that the plan's devices can hold, rows of those that they cannot, and the plan's pricer."""
    spec, cost_model = load_model_spec(config.model), CostModel.load(costs)
    loaded = load_plan(plan)
    _check_plan(plan, loaded, spec, config.train.global_batch_size)
    samples, _ = load_samples(shapes, spec.encoders, evaluation=evaluation)
    cost_model.require_made_for(spec, config)
    pricer = Pricer(
        loaded,
        cost_model,
        spec,
        config.cluster,
        trained=config.model.trained,
        precision=config.train.precision,
        audio=config.data.audio,
    )
    samples, left_out = leave_out_too_large(pricer, samples, shares=POLICIES[config.schedule.policy].may_reorder)
    return samples, left_out, pricer


def _check_plan(path: Path, plan: Plan, spec: ModelSpec, global_batch_size: int) -> None:
    """Check a plan, which may be written by hand: it must have the model's modules and layers, and no more buckets than
    a batch can fill.

    Raises:
        UserError: naming what does not fit, and what would.
    """
    known, given = [module.name for module in spec.modules], [grid.module for grid in plan.grids]
    check_modules(spec, given, "plan.grids")
    if lacking := [name for name in known if name not in given]:
        raise UserError(
            f"{path}: `plan.grids` has no {lacking[0]}, which {spec.name} has; make the plan again with `dflop plan`"
        )
    if given != known:
        raise UserError(
            f"{path}: the plan's modules come as {', '.join(given)} and those of {spec.name} as {', '.join(known)}; "
            "give their grids, and their `rank_offset`, that order"
        )
    check_layers(path, plan, {module.name: module.num_layers for module in spec.modules})
    replicas = plan.grid("llm").dp
    if plan.num_buckets > global_batch_size:
        most = global_batch_size // replicas
        way_out = f"set `plan.num_microbatches` to at most {most}" if most else f"use dp: {global_batch_size} at most"
        raise UserError(
            f"{path}: {plan.num_buckets} microbatches ({plan.num_microbatches} in each of {replicas} LLM replicas) "
            f"cannot be filled by a batch of {global_batch_size} samples, and none may be empty; {way_out}, or "
            f"raise `train.global_batch_size` to {plan.num_buckets}"
        )


class ScheduleService:
    """Schedules of steps `[first_step, num_steps)`, one `next()` each, from the process beside training."""

    def __init__(
        self, config: Config, *, shapes: Path, costs: Path, plan: Path, corrections: Path, first_step: int
    ) -> None:
        """`corrections` is the file for learned corrections (`CorrectionFile`); it need not exist yet."""
        request = {
            "config": select_keys(config, COMMANDS["schedule"].reads),
            "shapes": str(shapes),
            "costs": str(costs),
            "plan": str(plan),
            "corrections": str(corrections),
            "first_step": first_step,
            "num_steps": config.train.steps,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dflop.schedule.service"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.first_step = first_step
        self._lookahead_steps = config.schedule.lookahead_steps
        self._patience_s = _PATIENCE_S + _LIMITS_OF_PATIENCE * config.schedule.time_limit_s
        if config.schedule.deterministic:
            self._patience_s += WORK_TIMEOUT_S
        self._received = bytearray()
        # The step of the next answer, and since when the process has been at work on it, or on getting ready.
        self._due_step, self._waits_since, self._is_ready = first_step, time.monotonic(), False
        self._at_step, self.why_none = first_step, ""
        os.set_blocking(self._process.stdin.fileno(), False)
        self._unsent = b""
        self._send(json.dumps(request))

    @property
    def pid(self) -> int:
        return self._process.pid

    def next(self) -> bytes | None:
        """The next step's schedule, encoded (`StepSchedule.to_bytes`).

        None when the process is gone, or silent for longer than any step takes; `why_none` then says which.
        """
        looked = time.monotonic()
        while (end := self._end_of_first()) is None:
            if select.select([self._process.stdout], [], [], _POLL_S)[0]:
                received = os.read(self._process.stdout.fileno(), 1 << 20)
                if not received:
                    self.why_none = "ended"
                    return None
                self._received += received
                self._note_readiness()
                continue
            # Time in which this process itself was suspended does not count as silence of the other one.
            self._waits_since += max(0.0, time.monotonic() - looked - 2 * _POLL_S)
            looked = time.monotonic()
            silent_s = looked - self._waits_since if self._is_due else 0.0
            if silent_s > (self._patience_s if self._is_ready else _STARTING_S):
                self.why_none = f"was silent for {silent_s:.0f} s"
                return None
        encoded = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        self._due_step += 1
        self._waits_since = time.monotonic()
        return encoded

    def _note_readiness(self) -> None:
        """Drop the empty schedule when it has come: from then on the process is at work on the first step."""
        if not self._is_ready and self._end_of_first() == _LENGTH.size:
            del self._received[: _LENGTH.size]
            self._is_ready, self._waits_since = True, time.monotonic()

    def _end_of_first(self) -> int | None:
        """The offset at which the first received schedule ends; None while it is not there completely."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        return end if len(self._received) >= end else None

    @property
    def _is_due(self) -> bool:
        """Whether the process is at work on the step that comes next."""
        return self._due_step - self._lookahead_steps <= self._at_step

    def step_started(self, step: int) -> None:
        """Tell the process that training begins `step`; it then works up to `step + lookahead_steps`."""
        was_due = self._is_due
        self._at_step = max(step, self._at_step)
        if self._is_due and not was_due:
            self._waits_since = time.monotonic()
        self._send(str(step))

    def observe(self, measured: MeasuredStep) -> None:
        """Tell the process a step's measured times. Call this before `step_started` of the step in which the schedules
        may use them."""
        self._send(measured.to_json())

    def kill(self) -> None:
        """Kill the process, whatever it is doing; `next` then returns None."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close its pipes. No thread may be inside `next`."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _send(self, line: str) -> None:
        """Write to the process without waiting, since a process that hangs does not read its pipe. Unsent bytes are
        sent first by the next call."""
        self._unsent += line.encode() + b"\n"
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # `next` will tell of a process that is gone
            self._unsent = self._unsent[os.write(self._process.stdin.fileno(), self._unsent) :]


def _serve() -> None:
    request = json.loads(sys.stdin.readline())
    config = load_config(request["config"])
    # Only schedules go to the original stdout: the prints of libraries must not come between them.
    schedules = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    progress = _Progress(request["first_step"])
    threading.Thread(target=progress.follow_stdin, daemon=True).start()
    scheduler = open_scheduler(config, **{name: Path(request[name]) for name in ("shapes", "costs", "plan")})
    file = CorrectionFile(Path(request["corrections"]), scheduler.pricer)
    loop = CorrectionLoop(scheduler, config.schedule, file.read())
    with scheduler.open():
        loop.prepare(request["first_step"])
        if config.cluster.device == "cpu":
            # From now on this process and CBC work ahead of time, while training waits for the ranks on the same cores.
            os.nice(19)
        _write(schedules, b"")
        for step in range(request["first_step"], request["num_steps"]):
            if not progress.wait_until(step - config.schedule.lookahead_steps):
                return
            for measured in progress.take_measured():
                loop.observe(measured)
            _write(schedules, loop.schedule(step).to_bytes())
            file.write(loop.learner)
        # Nothing is left to schedule, but the times of the last steps are of use to a resumed run.
        while progress.wait_for_measured():
            for measured in progress.take_measured():
                loop.observe(measured)
                loop.learn(measured.step)
            file.write(loop.learner)


def _write(schedules: BinaryIO, encoded: bytes) -> None:
    schedules.write(_LENGTH.pack(len(encoded)) + encoded)
    schedules.flush()


class _Progress:
    """The step that training is at, and the measured steps, as received over stdin."""

    def __init__(self, step: int) -> None:
        self._step, self._ended, self._changed = step, False, threading.Condition()
        self._measured: list[MeasuredStep] = []

    def follow_stdin(self) -> None:
        for line in sys.stdin:
            told: int | dict[str, Any] = json.loads(line)
            with self._changed:
                if isinstance(told, int):
                    self._step = told
                else:
                    self._measured.append(MeasuredStep.from_dict(told))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_until(self, step: int) -> bool:
        """Wait for the trainer to reach a step; False when the trainer is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._step >= step)
            return not self._ended

    def wait_for_measured(self) -> bool:
        """Wait for the measured times of a step; False when the trainer is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._measured)
            return not self._ended

    def take_measured(self) -> list[MeasuredStep]:
        with self._changed:
            taken, self._measured = self._measured, []
            return taken


if __name__ == "__main__":
    leave_cores_near()
    with contextlib.suppress(BrokenPipeError):  # the trainer has ended, and says why
        _serve()
    sys.stdout.flush()
    # The thread that reads stdin is still blocked in its read. A normal exit would destroy the interpreter under it.
    os._exit(0)
