"""Schedules reach the ranks: the first rank publishes what the service decides, all ranks read it.

They travel through the process group's key-value store, ahead of the step that needs them; time spent
waiting for one is measured. When the service dies the first rank decides by `lpt` itself and says so once.
"""

import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from dflop.config import Config
from dflop.data.loading import MicrobatchJob, SampleRef
from dflop.errors import UserError
from dflop.pipeline import Node
from dflop.scheduling import BatchScheduler, StepSchedule
from dflop.scheduling.service import ScheduleService, open_scheduler

__all__ = ["JobStream", "ScheduleFeed", "SchedulePublisher", "samples_of"]

_FAILED = "failed: "


class SchedulePublisher(threading.Thread):
    """The first rank's thread from the service's output to the store."""

    def __init__(
        self, store: dist.Store, config: Config, *, shapes: Path, costs: Path, plan: Path, first_step: int
    ) -> None:
        super().__init__(daemon=True, name="schedule-publisher")
        self._store, self._config, self._first_step = store, config, first_step
        self._artifacts = {"shapes": shapes, "costs": costs, "plan": plan}
        self.service = ScheduleService(config, **self._artifacts, first_step=first_step)
        self._closed = False
        self._at_step, self._progress = first_step, threading.Condition()

    def run(self) -> None:
        stand_in: BatchScheduler | None = None
        for step in range(self._first_step, self._config.train.steps):
            try:
                schedule = None if stand_in else self.service.next()
                if self._closed:
                    return
                if schedule is None:
                    stand_in = stand_in or self._open_stand_in(step)
                    self._wait_for_step(step - self._config.schedule.lookahead_steps)
                    schedule = stand_in.schedule(step)
            except Exception as error:
                # Every rank waits for this step: tell them, so that none waits for ever.
                self._store.set(f"schedule/{step}", f"{_FAILED}{type(error).__name__}: {error}")
                raise
            self._store.set(f"schedule/{step}", schedule.to_json())

    def step_started(self, step: int) -> None:
        self.service.step_started(step)
        with self._progress:
            self._at_step = step
            self._progress.notify_all()
        if step - 2 >= self._first_step:
            self._store.delete_key(f"schedule/{step - 2}")

    def close(self) -> None:
        with self._progress:
            self._closed = True
            self._progress.notify_all()
        self.service.close()

    def _wait_for_step(self, step: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._closed or self._at_step >= step)

    def _open_stand_in(self, step: int) -> BatchScheduler:
        print(
            f"dflop: the schedule service ended before step {step}; going on with policy lpt",
            file=sys.stderr,
            flush=True,
        )
        lpt = dataclasses.replace(self._config.schedule, policy="lpt")
        return open_scheduler(dataclasses.replace(self._config, schedule=lpt), **self._artifacts)


class ScheduleFeed:
    """One rank's reader. `get(step)` waits for a schedule; `waited_s[step]` says for how long."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store.clone()
        self._schedules: dict[int, StepSchedule] = {}
        self.waited_s: dict[int, float] = {}

    def get(self, step: int) -> StepSchedule:
        if step not in self._schedules:
            started = time.monotonic()
            message = self._store.get(f"schedule/{step}").decode()
            if message.startswith(_FAILED):
                raise UserError(f"step {step} could not be scheduled: {message.removeprefix(_FAILED)}")
            self._schedules[step] = StepSchedule.from_json(message)
            self.waited_s[step] = time.monotonic() - started
        return self._schedules[step]

    def forget(self, step: int) -> None:
        self._schedules.pop(step, None)
        self.waited_s.pop(step, None)


@dataclasses.dataclass(frozen=True, slots=True)
class JobStream:
    """The microbatches of one node, step after step, as a sampler for torch's DataLoader."""

    feed: ScheduleFeed
    node: Node
    num_microbatches: int
    steps: range

    def __iter__(self) -> Iterator[MicrobatchJob]:
        for step in self.steps:
            schedule = self.feed.get(step)
            for microbatch in range(self.num_microbatches):
                yield job_of(schedule, self.node, microbatch)


def job_of(schedule: StepSchedule, node: Node, microbatch: int) -> MicrobatchJob:
    """What one node loads for one microbatch: an encoder the samples with media, the LLM all of its own."""
    chosen = samples_of(schedule, node, microbatch)
    return MicrobatchJob(
        samples=tuple(
            SampleRef(str(source), int(row))
            for source, row in zip(schedule.source[chosen], schedule.row[chosen], strict=True)
        ),
        kept_vision_tokens=tuple(map(int, schedule.kept_vision_tokens[chosen])),
        encoder_rank=tuple(map(int, schedule.encoder_rank[chosen])),
    )


def samples_of(schedule: StepSchedule, node: Node, microbatch: int):
    """Mask [num_samples] of a node's samples in a microbatch."""
    in_microbatch = schedule.microbatch == microbatch
    if node.module == "llm":
        return in_microbatch & (schedule.llm_dp_rank == node.dp_rank)
    return in_microbatch & (schedule.encoder_rank == node.dp_rank) & (schedule.num_items > 0)
