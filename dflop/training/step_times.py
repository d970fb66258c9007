"""What steps took, from every rank to the first one and on to the scheduler.

A rank leaves its times in the process group's key-value store when it has ended a step; the first rank takes all of
them once the next but one begins, when all are sure to be there: nobody waits. Only steps whose schedule asks for it
are reported.
"""

import json
import time

import numpy as np
import torch.distributed as dist

from dflop.pipeline import Op, Span
from dflop.scheduling import REPORT_LAG_STEPS, MeasuredStep

__all__ = ["StepReports"]

_WAY = {Op.FORWARD: 0, Op.BACKWARD: 1}
# Keys are used again after so many steps, when the first rank has long taken what they held.
_NUM_SLOTS = 2 * REPORT_LAG_STEPS


class StepReports:
    """One rank's side: every rank sends, the first one takes."""

    def __init__(self, store: dist.Store, *, num_nodes: int, num_microbatches: int) -> None:
        self._store, self._num_nodes, self._num_microbatches = store.clone(), num_nodes, num_microbatches
        # By step: the seconds it took, and those of them (and after them) that went into reporting.
        self._sent: dict[int, tuple[float, float]] = {}
        self._last_take_s = 0.0

    def send(self, step: int, node_index: int, spans: list[Span], step_s: float) -> None:
        """Leave a step's times, which took `step_s` on this rank, for the first rank."""
        started = time.monotonic()
        seconds = np.zeros((2, self._num_microbatches))
        for span in spans:
            if span.op in _WAY:
                seconds[_WAY[span.op], span.microbatch] += span.seconds
        self._store.set(self._key(step, node_index), json.dumps([step, *seconds.tolist()]))
        self._sent = {known: spent for known, spent in self._sent.items() if known > step - _NUM_SLOTS}
        self._sent[step] = step_s, time.monotonic() - started

    def take(self, step: int) -> MeasuredStep | None:
        """On the first rank, when `step` begins: what the one before the last took; None where it was not reported."""
        ended = step - REPORT_LAG_STEPS
        if ended not in self._sent:
            return None
        started = time.monotonic()
        step_s, sending_s = self._sent.pop(ended)
        lines = self._store.multi_get([self._key(ended, node) for node in range(self._num_nodes)])
        steps, forward_s, backward_s = zip(*map(json.loads, lines), strict=True)
        assert set(steps) == {ended}, f"times of steps {sorted(set(steps))} where those of step {ended} ought to be"
        # What taking costs is known when it is done: the last time stands for this one.
        overhead = (sending_s + self._last_take_s) / step_s
        self._last_take_s = time.monotonic() - started
        return MeasuredStep(
            step=ended, forward_s=np.array(forward_s), backward_s=np.array(backward_s), overhead=overhead
        )

    def _key(self, step: int, node_index: int) -> str:
        return f"measured/{step % _NUM_SLOTS}/{node_index}"
