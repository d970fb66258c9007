"""Where one rank's time goes: the time between the all-reduces that end two steps, split by what the rank did in it.

All ranks leave the all-reduce of a step's sums together, so that a step begins and ends there on all ranks. When a rank
contributes its sums, it cannot know yet how long it will wait in the all-reduce. That is the time that remains, and the
first rank computes it (`step_seconds`).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dflop.step import Op, Span
from dflop.step.run import Waits

__all__ = ["KNOWN_PARTS", "RankClock"]

# The parts of a step that a rank knows, in the order of `row`.
KNOWN_PARTS = ("computing", "data", "peers", "schedule", "sync", "optimiser", "other")


class RankClock:
    """The seconds of the current step by part, on the host's clock."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a new step now, and drop what was recorded before."""
        self._began, self._seconds = time.monotonic(), dict.fromkeys(KNOWN_PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time in the context as this part."""
        started = time.monotonic()
        yield
        self._seconds[name] += time.monotonic() - started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in the context in any step."""
        started = time.monotonic()
        yield
        self._began += time.monotonic() - started

    def add_pipeline(self, spans: Sequence[Span], waits: Waits, begin_s: float, end_s: float) -> None:
        """Add the pipeline's time between `begin_s` and `end_s`.

        Gaps between computations count as waits for data or for peers, as far as `waits` recorded them. On a GPU, where
        the host runs ahead, waits for peers are not recorded, and all gaps that are not waits for data count as such.
        """
        gaps = _gaps(sorted((span.start_s, span.end_s) for span in spans), begin_s, end_s)
        data_s = _overlap(gaps, waits.data)
        idle_s = sum(end - start for start, end in gaps) - data_s
        self._seconds["computing"] += sum(span.seconds for span in spans if span.op is not Op.SYNC_GRADIENTS)
        self._seconds["sync"] += sum(span.seconds for span in spans if span.op is Op.SYNC_GRADIENTS)
        self._seconds["data"] += data_s
        self._seconds["peers"] += idle_s if waits.peers is None else min(idle_s, _overlap(gaps, waits.peers))

    def row(self) -> list[float]:
        """The seconds of `KNOWN_PARTS` up to now, the rest as `other`."""
        known = dict(self._seconds)
        known["other"] += max(0.0, time.monotonic() - self._began - sum(known.values()))
        return list(known.values())

    def end(self) -> float:
        """End the step, and begin the next. Returns the seconds that the step took."""
        began = self._began
        self.restart()
        return self._began - began


def _gaps(busy: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """The intervals between `begin_s` and `end_s` that are in none of the `busy` intervals, which must be sorted."""
    gaps, free_from = [], begin_s
    for start, end in busy:
        if start > free_from:
            gaps.append((free_from, start))
        free_from = max(free_from, end)
    return [*gaps, (free_from, end_s)] if end_s > free_from else gaps


def _overlap(gaps: Sequence[tuple[float, float]], waits: Sequence[tuple[float, float]]) -> float:
    """The seconds of waits that lie in gaps. Both must be sorted, and free of overlaps among themselves."""
    seconds, place = 0.0, 0
    for start, end in waits:
        while place < len(gaps) and gaps[place][1] <= start:
            place += 1
        number = place
        while number < len(gaps) and gaps[number][0] < end:
            seconds += min(end, gaps[number][1]) - max(start, gaps[number][0])
            number += 1
    return seconds
