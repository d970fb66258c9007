"""Recompute just enough: which layers of each stage of a plan are recomputed in backward so that the plan fits.

A recomputed layer keeps only its input, or also what attention makes, and computes the rest of its forward again in
backward. A plan that fits without recomputed layers has none; in any other plan, each device is at the lowest level
(`levels`) with which it fits. Where encoders share the LLM's devices, the same share of their layers is recomputed on
all devices, and LLM layers are recomputed only after all of the encoders'. For encoders are narrower, so they free more
memory for each second of computing, and they hold more microbatches at a time.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator

import numpy as np

from dflop.models import ModelSpec
from dflop.plan import PLACEMENTS
from dflop.plan.trained import TrainedSet
from dflop.search.candidate import PlanPricer
from dflop.search.levels import Counts, Levels

__all__ = ["JustEnough"]

# Where a single sample needs more memory than whole batches, all devices recompute one such fraction of their layers
# more, until the sample fits. `JustEnough.fewer` goes down by the same fraction.
_PARTS = 8


class JustEnough:
    """Finds the layers to recompute in plans, on devices of `limit_bytes`."""

    def __init__(self, spec: ModelSpec, trained: TrainedSet, limit_bytes: float) -> None:
        self._spec, self._trained, self._limit_bytes = spec, trained.among(spec.modules), limit_bytes
        self._last_beyond = 0  # the batch that did not fit the last time: it is likely not to fit again

    def of(self, pricer: PlanPricer) -> PlanPricer | None:
        """The pricer of the plan with just enough recomputed, and no less than it already recomputes.

        None where the plan does not fit even with all layers recomputed.
        """
        levels = Levels(pricer.plan, self._spec, self._trained, spares_attention=pricer.spares_attention)
        for most in self._most(levels):
            everything = pricer.recomputing(levels.plan_at(most))
            if everything.alone_bytes() > self._limit_bytes:
                continue
            fullest, needed_bytes = everything.fullest_batch(self._limit_bytes, self._last_beyond)
            if needed_bytes <= self._limit_bytes:
                break
            self._last_beyond = fullest
        else:
            return None
        counts, batches = {module: np.minimum(levels.now[module], end) for module, end in most.items()}, set()
        while needed_bytes > self._limit_bytes or not batches:
            if fullest in batches:  # orders that fill bubbles depend on free memory: fewer layers may then not fit
                return everything
            batches.add(fullest)
            counts = self._fewest(pricer, levels, batches, counts, most)
            enough = pricer.recomputing(levels.plan_at(counts))
            fullest, needed_bytes = enough.fullest_batch()
        while enough.alone_bytes() > self._limit_bytes:
            counts = {module: np.minimum(counts[module] - (-end // _PARTS), end) for module, end in most.items()}
            enough = pricer.recomputing(levels.plan_at(counts))
        return enough

    def _most(self, levels: Levels) -> Iterator[Counts]:
        """What may need least memory: all layers recomputed, or all but one of each device's.

        Recomputing a device's last layer frees no memory at that device's peak, and keeps the layer's input, too. Where
        modules share devices, and the peak is in the LLM, all layers of the encoders are recomputed.
        """
        most, but_one = levels.most, levels.all_but_one
        yield most
        if len(most) > 1:
            yield most | {"llm": but_one["llm"]}
        yield but_one

    def fewer(self, pricer: PlanPricer) -> Iterator[PlanPricer]:
        """The plan at ever lower levels, by an eighth of them at a time: first of the LLM's, then of the encoders'."""
        spares_attention = bool(pricer.plan.grid("llm").attention_kept)
        levels = Levels(pricer.plan, self._spec, self._trained, spares_attention=spares_attention)
        counts = dict(levels.now)
        of_llm, of_encoders = (
            {"llm": counts["llm"]},
            {module: each for module, each in counts.items() if module != "llm"},
        )
        for part in (of_llm, of_encoders):
            for parts in reversed(range(_PARTS) if any(count.any() for count in part.values()) else ()):
                lower = counts | {module: each * parts // _PARTS for module, each in part.items()}
                yield pricer.recomputing(levels.plan_at(lower))
            counts |= {module: 0 * each for module, each in part.items()}

    def _fewest(
        self, pricer: PlanPricer, levels: Levels, batches: Collection[int], least: Counts, most: Counts
    ) -> Counts:
        """The lowest levels, from `least` to `most`, with which these batches fit."""
        encoders = {module: count for module, count in most.items() if module != "llm"}
        if PLACEMENTS[pricer.plan.placement].shares_ranks and encoders:
            # All devices recompute the same share of the encoders' layers.
            num_shares = max(1, *(count.max() for count in encoders.values()))
            first = min(int(least[name].min()) * num_shares // max(1, count.max()) for name, count in encoders.items())
            shares = [
                least
                | {name: np.maximum(least[name], -(-share * count // num_shares)) for name, count in encoders.items()}
                for share in range(first, num_shares + 1)
            ]

            def fits(place: int) -> bool:
                needed = pricer.recomputing(levels.plan_at(shares[place])).bytes_along_pipeline(batches)
                return max(peaks.max() for peaks in needed.values()) <= self._limit_bytes

            place = bisect_left(range(len(shares)), True, key=fits)
            if place < len(shares):
                return shares[place]
            least = shares[-1]
        return self._of_devices(pricer, levels, batches, least, most)

    def _of_devices(
        self, pricer: PlanPricer, levels: Levels, batches: Collection[int], fewest: Counts, enough: Counts
    ) -> Counts:
        """For each device, the lowest level from `fewest` to `enough` with which it fits; all of `enough` fit."""
        while any((fewest[module] < enough[module]).any() for module in enough):
            counts = {module: (fewest[module] + count) // 2 for module, count in enough.items()}
            needed = pricer.recomputing(levels.plan_at(counts)).bytes_along_pipeline(batches)
            fits = {module: peaks <= self._limit_bytes for module, peaks in needed.items()}
            enough = {module: np.where(fits[module], counts[module], count) for module, count in enough.items()}
            fewest = {
                module: np.minimum(np.where(fits[module], count, counts[module] + 1), enough[module])
                for module, count in fewest.items()
            }
        return enough
