"""Where one rank's seconds go: the time from one step's sums to the next one's, divided by what the rank did in it.

All ranks leave the sums of a step together, so a step begins and ends there on all of them. What is not known of a step
when its sums are taken is how long this rank waits in them; that is what is left, and the first rank works it out
(`step_seconds`).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dflop.pipeline import Op, Span
from dflop.pipeline.run import Waits

__all__ = ["KNOWN_PARTS", "RankClock"]

# What a rank knows of its step, in the order of `row`.
KNOWN_PARTS = ("computing", "data", "peers", "schedule", "sync", "optimiser", "other")


class RankClock:
    """Seconds of the step that runs, on the host's clock."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A step begins now, and what was of it before is forgotten."""
        self._began, self._seconds = time.monotonic(), dict.fromkeys(KNOWN_PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside is of this part."""
        started = time.monotonic()
        yield
        self._seconds[name] += time.monotonic() - started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is of no step."""
        started = time.monotonic()
        yield
        self._began += time.monotonic() - started

    def add_pipeline(self, spans: Sequence[Span], waits: Waits, begin_s: float, end_s: float) -> None:
        """What the pipeline did between two times. On a GPU, where the host runs ahead, it waited where it computed
        nothing: for data as long as the host did, else for peers."""
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
        """How long the step took, which ends now; the next one begins."""
        began = self._began
        self.restart()
        return self._began - began


def _gaps(busy: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """The times between two that are in none of these intervals, which are sorted."""
    gaps, free_from = [], begin_s
    for start, end in busy:
        if start > free_from:
            gaps.append((free_from, start))
        free_from = max(free_from, end)
    return [*gaps, (free_from, end_s)] if end_s > free_from else gaps


def _overlap(gaps: Sequence[tuple[float, float]], waits: Sequence[tuple[float, float]]) -> float:
    """Seconds of the waits that lie in gaps; both are sorted, and neither overlap themselves."""
    seconds, place = 0.0, 0
    for start, end in waits:
        while place < len(gaps) and gaps[place][1] <= start:
            place += 1
        number = place
        while number < len(gaps) and gaps[number][0] < end:
            seconds += min(end, gaps[number][1]) - max(start, gaps[number][0])
            number += 1
    return seconds
