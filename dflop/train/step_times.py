"""The measured times of steps, sent from every rank to the first one, which passes them on to the scheduler.

A rank writes its times to the process group's key-value store when it has ended a step. The first rank reads them when
the next but one begins, so that all are there and no rank waits. Only steps whose schedule asks for it are reported.
Passes beside which gradients or parameters are on their way are left out: their times hold more than computing.
"""

import json
import time

import numpy as np
import torch.distributed as dist

from dflop.schedule import REPORT_LAG_STEPS, MeasuredStep
from dflop.step import Op, Span

__all__ = ["StepReports"]

_WAY = {Op.FORWARD: 0, Op.BACKWARD: 1}
# Keys are reused after this many steps, when the first rank has read them long ago.
_NUM_SLOTS = 2 * REPORT_LAG_STEPS


class StepReports:
    """One rank's side: every rank sends its nodes' times, and the first one takes the times of all nodes."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        *,
        num_ranks: int,
        num_nodes: int,
        num_microbatches: int,
        overlaps: bool = False,
    ) -> None:
        """`overlaps` is `NodeModel.overlaps`: syncs run beside the first forward and the last backward."""
        # The passes that are left out: pass and microbatch.
        self._left_out = {(Op.FORWARD, 0), (Op.BACKWARD, num_microbatches - 1)} if overlaps else set()
        self._store, self._rank, self._num_ranks = store.clone(), rank, num_ranks
        self._shape = (2, num_nodes, num_microbatches)
        # By step: the seconds that it took, and the seconds that sending its times took.
        self._sent: dict[int, tuple[float, float]] = {}
        self._last_take_s = 0.0

    def send(self, step: int, spans: list[Span], step_s: float) -> None:
        """Write the times of a step, which took `step_s` seconds on this rank, for the first rank."""
        started = time.monotonic()
        seconds: dict[int, np.ndarray] = {}
        for span in spans:
            if span.op in _WAY and (span.op, span.microbatch) not in self._left_out:
                of_node = seconds.setdefault(span.node, np.zeros((2, self._shape[-1])))
                of_node[_WAY[span.op], span.microbatch] += span.seconds
        nodes = [[node, of_node.tolist()] for node, of_node in seconds.items()]
        self._store.set(self._key(step, self._rank), json.dumps([step, nodes]))
        self._sent = {known: spent for known, spent in self._sent.items() if known > step - _NUM_SLOTS}
        self._sent[step] = step_s, time.monotonic() - started

    def take(self, step: int) -> MeasuredStep | None:
        """On the first rank, when `step` begins: the times of the step before the last; None if it was not reported."""
        ended = step - REPORT_LAG_STEPS
        if ended not in self._sent:
            return None
        started = time.monotonic()
        step_s, sending_s = self._sent.pop(ended)
        seconds = np.zeros(self._shape)
        for line in self._store.multi_get([self._key(ended, rank) for rank in range(self._num_ranks)]):
            reported, nodes = json.loads(line)
            assert reported == ended, f"times of step {reported} where those of step {ended} ought to be"
            for node, of_node in nodes:
                seconds[:, node] = np.maximum(seconds[:, node], of_node)  # the slowest of a node's ranks counts
        # The time that this reading takes is not known yet, so that of the last one is used.
        overhead = (sending_s + self._last_take_s) / step_s
        self._last_take_s = time.monotonic() - started
        forward_s, backward_s = seconds
        return MeasuredStep(step=ended, forward_s=forward_s, backward_s=backward_s, overhead=overhead)

    def _key(self, step: int, rank: int) -> str:
        return f"measured/{step % _NUM_SLOTS}/{rank}"
