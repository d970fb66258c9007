"""How schedules reach the ranks: the first rank publishes what the schedule service decides, and all ranks read it.

Schedules travel through the process group's key-value store, ahead of the step that needs them. The time spent waiting
for one is measured. When the service dies or hangs, the first rank decides by `lpt` itself, warns, and restarts the
service once. Only the first rank writes the schedule of a step, and only once, so that all ranks read the same one
whatever fails.
"""

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch.distributed as dist

from dflop.base import UserError
from dflop.config import Config
from dflop.loading.dataset import MicrobatchJob, SampleRef
from dflop.loading.shared_samples import SampleGroup, SharedSample
from dflop.schedule import BatchScheduler, MeasuredStep, StepSchedule
from dflop.schedule.service import ScheduleService, open_scheduler
from dflop.shapes.reader import MediumSize
from dflop.step import Node

__all__ = ["JobStream", "ScheduleFeed", "SchedulePublisher", "sample_group", "samples_of"]

_FAILED = b"failed: "
_JOIN_S = 5.0


class SchedulePublisher(threading.Thread):
    """The first rank's thread, which passes the service's schedules on to the store."""

    def __init__(
        self,
        store: dist.Store,
        config: Config,
        *,
        shapes: Path,
        costs: Path,
        plan: Path,
        corrections: Path,
        first_step: int,
    ) -> None:
        super().__init__(daemon=True, name="schedule-publisher")
        self._store, self._config, self._first_step = store, config, first_step
        self._artifacts = {"shapes": shapes, "costs": costs, "plan": plan}
        self._corrections = corrections
        self.service = self._start_service(first_step)
        self._serves, self._num_restarts = True, 0
        self._stand_in: BatchScheduler | None = None
        self._closed = False
        self._at_step, self._progress = first_step, threading.Condition()

    def run(self) -> None:
        for step in range(self._first_step, self._config.train.steps):
            try:
                encoded = self._from_service(step) or self._from_stand_in(step)
                if encoded is None:
                    return  # closed
                self._store.set(f"schedule/{step}", encoded)
            except Exception as error:
                # Every rank waits for this step's schedule: tell them, so that none waits forever.
                self._store.set(f"schedule/{step}", _FAILED + f"{type(error).__name__}: {error}".encode())
                raise

    def step_started(self, step: int, measured: MeasuredStep | None) -> None:
        """Tell the service that a step begins, and the measured times of an earlier step, if they are known by now."""
        with self._progress:
            if measured:
                self.service.observe(measured)
            self.service.step_started(step)
            self._at_step = step
            self._progress.notify_all()
        if step - 2 >= self._first_step:
            self._store.delete_key(f"schedule/{step - 2}")

    def close(self) -> None:
        """Stop the service and this thread."""
        with self._progress:
            self._closed = True
            self._progress.notify_all()
        self.service.kill()
        if self.is_alive():
            self.join(_JOIN_S)
        self.service.close()

    def _start_service(self, first_step: int) -> ScheduleService:
        return ScheduleService(self._config, **self._artifacts, corrections=self._corrections, first_step=first_step)

    def _from_service(self, step: int) -> bytes | None:
        """The service's schedule of a step; None if the service is gone, or was restarted for later steps."""
        if not self._serves or step < self.service.first_step:
            return None
        encoded = self.service.next()
        if encoded is None and not self._closed:
            self._replace_service(step)
        return encoded

    def _replace_service(self, step: int) -> None:
        """Restart the service, but only once. It gets `lookahead_steps` steps to start up."""
        self.service.kill()
        why = self.service.why_none
        onward = step + self._config.schedule.lookahead_steps
        self._serves = self._num_restarts == 0 and onward < self._config.train.steps
        until = f"up to step {onward + 1}, where a restarted one goes on" if self._serves else "from here on"
        policy = self._stand_in_config.schedule.policy
        print(
            f"dflop: warning: the schedule service {why} before step {step + 1}; policy {policy} decides {until}",
            file=sys.stderr,
            flush=True,
        )
        if self._serves:
            self._num_restarts += 1
            with self._progress:
                if not self._closed:
                    self.service.close()
                    self.service = self._start_service(onward)

    def _from_stand_in(self, step: int) -> bytes | None:
        """This process's own decision, which depends on nothing but the step; None when closed."""
        with self._progress:
            ahead = self._config.schedule.lookahead_steps
            self._progress.wait_for(lambda: self._closed or self._at_step >= step - ahead)
            if self._closed:
                return None
        if self._stand_in is None:
            self._stand_in = open_scheduler(self._stand_in_config, **self._artifacts)
        return self._stand_in.schedule_what_fits(step).to_bytes()

    @property
    def _stand_in_config(self) -> Config:
        """The config with policy `lpt`, which takes milliseconds; unchanged if all runs must decide alike."""
        if self._config.schedule.deterministic:
            return self._config
        return dataclasses.replace(self._config, schedule=dataclasses.replace(self._config.schedule, policy="lpt"))


class ScheduleFeed:
    """One rank's reader. `get(step)` waits for a schedule, and `waited_s[step]` is how many seconds it waited."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store.clone()
        self._schedules: dict[int, StepSchedule] = {}
        self.waited_s: dict[int, float] = {}

    def get(self, step: int) -> StepSchedule:
        """The schedule of a step; waits until it is published.

        Raises:
            UserError: when the step could not be scheduled.
        """
        if step not in self._schedules:
            started = time.monotonic()
            message = self._store.get(f"schedule/{step}")
            if message.startswith(_FAILED):
                raise UserError(f"step {step + 1} could not be scheduled: {message.removeprefix(_FAILED).decode()}")
            self._schedules[step] = StepSchedule.from_bytes(message)
            self.waited_s[step] = time.monotonic() - started
        return self._schedules[step]

    def forget(self, step: int) -> None:
        """Drop the schedule of a step that has ended."""
        self._schedules.pop(step, None)
        self.waited_s.pop(step, None)


class Schedules(Protocol):
    """Anything that gives the schedules of steps."""

    def get(self, step: int) -> StepSchedule: ...


@dataclasses.dataclass(frozen=True, slots=True)
class JobStream:
    """What a rank's nodes load, step after step, as a sampler for torch's DataLoader.

    `forwards(slots)` gives node and microbatch of each of the rank's forwards that reads records, in their order with a
    step's slots (`StepSchedule.slots`). `cp` is that of the LLM's grid.
    """

    feed: Schedules
    forwards: Callable[[np.ndarray | None], tuple[tuple[Node, int], ...]]
    steps: range
    cp: int = 1

    @property
    def num_forwards(self) -> int:
        """The number of forwards that read records, which is the same in every step."""
        return len(self.forwards(None))

    def __iter__(self) -> Iterator[tuple[Node, MicrobatchJob]]:
        """Each job with its node. If the rank reads no records, no schedule is waited for."""
        for step in self.steps if self.num_forwards else ():
            schedule = self.feed.get(step)
            for node, microbatch in self.forwards(schedule.slots):
                yield node, job_of(schedule, node, microbatch, self.cp)


def job_of(schedule: StepSchedule, node: Node, microbatch: int, cp: int = 1) -> MicrobatchJob:
    """What one node loads for one microbatch: for the LLM all samples of its replica, for an encoder those that this
    replica encodes. `cp` is that of the LLM's grid.

    Raises:
        UserError: when the schedule holds no sizes of media.
    """
    if schedule.media is None:
        raise UserError("shapes.duckdb holds no sizes of media; make it again with `dflop profile-shapes`")
    chosen = samples_of(schedule, node, microbatch)
    shares, whole_kept = (), ()
    if schedule.degree is not None:
        all_kept = schedule.kept_tokens.sum(axis=1)
        for rows in schedule.shared_samples():
            all_kept[rows] = all_kept[rows].sum()
        shares = tuple(zip(schedule.share[chosen].tolist(), schedule.degree[chosen].tolist(), strict=True))
        whole_kept = tuple(all_kept[chosen].tolist())
    return MicrobatchJob(
        samples=tuple(
            SampleRef(str(source), int(row))
            for source, row in zip(schedule.source[chosen], schedule.row[chosen], strict=True)
        ),
        media=tuple(tuple(MediumSize(*size) for size in sizes.tolist()) for sizes in schedule.media[chosen].of_each()),
        kept_tokens=tuple(map(tuple, schedule.kept_tokens[chosen].tolist())),
        llm_tokens=tuple(schedule.sample_tokens[chosen].tolist()),
        encoder_rank=tuple(map(tuple, schedule.encoder_rank[chosen].tolist())),
        shares=shares,
        whole_kept=whole_kept,
        group=sample_group(schedule, node, microbatch, cp) if node.module == "llm" else None,
    )


def sample_group(schedule: StepSchedule, node: Node, microbatch: int, cp: int) -> SampleGroup | None:
    """How an LLM replica and its neighbours, `cp` in all, share samples in a microbatch; None if they share none."""
    begin = node.dp_rank - node.dp_rank % cp
    rows = np.flatnonzero(samples_of(schedule, node, microbatch)).tolist()
    samples = tuple(
        SharedSample(
            first=int(schedule.llm_dp_rank[shares[0]]) - begin,
            num_tokens=int(schedule.sample_tokens[shares[0]]),
            kept_tokens=tuple(map(tuple, schedule.kept_tokens[shares].tolist())),
            row=next((rows.index(row) for row in shares if row in rows), None),
        )
        for shares in schedule.shared_samples()
        if schedule.microbatch[shares[0]] == microbatch and begin <= schedule.llm_dp_rank[shares[0]] < begin + cp
    )
    return SampleGroup(cp, node.dp_rank - begin, samples) if samples else None


def samples_of(schedule: StepSchedule, node: Node, microbatch: int):
    """Mask, bool [num_samples], of a node's samples in a microbatch."""
    in_microbatch = schedule.microbatch == microbatch
    if node.module == "llm":
        return in_microbatch & (schedule.llm_dp_rank == node.dp_rank)
    column = schedule.encoders.index(node.module)
    return in_microbatch & (schedule.encoder_rank[:, column] == node.dp_rank) & (schedule.num_items[:, column] > 0)
