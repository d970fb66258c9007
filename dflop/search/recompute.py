"""Recompute just enough: how many layers of each stage of a plan are recomputed in backward so that the plan fits.

A recomputed layer keeps only its input, and computes its forward again in backward. A plan that fits without recomputed
layers has none; in any other plan, each device recomputes the fewest layers with which it fits. Where encoders share
the LLM's devices, the same share of their layers is recomputed on all devices, and LLM layers are recomputed only after
all of the encoders'. For encoders are narrower, so they free more memory for each second of computing, and they hold
more microbatches at a time.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dflop.models import ModelSpec
from dflop.plan import PLACEMENTS, Plan
from dflop.plan.trained import TrainedSet
from dflop.search.candidate import PlanPricer

__all__ = ["JustEnough", "of_stages", "with_recomputed"]

# By module, a number of layers on each of its pipeline ranks, [pp].
Counts = Mapping[str, np.ndarray]
# Where a single sample needs more memory than whole batches, all devices recompute one such fraction of their layers
# more, until the sample fits. `JustEnough.fewer` goes down by the same fraction.
_PARTS = 8


def with_recomputed(plan: Plan, counts: Counts, spec: ModelSpec) -> Plan:
    """The plan with `counts` layers recomputed on each device. A device's chunks get them in turns."""
    if not any(count.any() for count in counts.values()):
        return replace(plan, grids=tuple(replace(grid, recomputed=()) for grid in plan.grids), checkpointing=False)
    grids, is_everything = [], True
    for grid in plan.grids:
        layers = tuple(len(part) for part in plan.layers_of(grid.module, spec.module(grid.module).num_layers))
        recomputed = of_stages(counts[grid.module], layers)
        grids.append(replace(grid, recomputed=recomputed))
        is_everything &= recomputed == layers
    if is_everything:
        grids = [replace(grid, recomputed=()) for grid in grids]
    return replace(plan, grids=tuple(grids), checkpointing=True)


def of_stages(counts: np.ndarray, layers: Sequence[int]) -> tuple[int, ...]:
    """How many layers each stage recomputes where each pipeline rank recomputes `counts` [pp] layers.

    `layers` is the number of layers in each stage.
    """
    if len(counts) == len(layers):
        return tuple(map(min, counts.tolist(), layers))
    pp, recomputed = len(counts), [0] * len(layers)
    for device, count in enumerate(counts.tolist()):
        recomputed[device::pp] = _in_turns(count, layers[device::pp])
    return tuple(recomputed)


def _in_turns(count: int, most: Sequence[int]) -> list[int]:
    """`count` divided into shares by handing it out one by one, none above its entry in `most`."""
    shares = [0] * len(most)
    while sum(shares) < min(count, sum(most)):
        for place, end in enumerate(most):
            shares[place] += sum(shares) < count and shares[place] < end
    return shares


class JustEnough:
    """Finds the layers to recompute in plans, on devices of `limit_bytes`."""

    def __init__(self, spec: ModelSpec, trained: TrainedSet, limit_bytes: float) -> None:
        self._spec, self._trained, self._limit_bytes = spec, trained.among(spec.modules), limit_bytes
        self._last_beyond = 0  # the batch that did not fit the last time: it is likely not to fit again

    def of(self, pricer: PlanPricer) -> PlanPricer | None:
        """The pricer of the plan with just enough layers recomputed, and no fewer than it already recomputes.

        None where the plan does not fit even with all layers recomputed.
        """
        for most in self._most(pricer.plan):
            everything = self._recomputing(pricer, most)
            if everything.alone_bytes() > self._limit_bytes:
                continue
            fullest, needed_bytes = everything.fullest_batch(self._limit_bytes, self._last_beyond)
            if needed_bytes <= self._limit_bytes:
                break
            self._last_beyond = fullest
        else:
            return None
        counts, batches = {module: self._recomputed(pricer.plan, module, end) for module, end in most.items()}, set()
        while needed_bytes > self._limit_bytes or not batches:
            if fullest in batches:  # orders that fill bubbles depend on free memory: fewer layers may then not fit
                return everything
            batches.add(fullest)
            counts = self._fewest(pricer, batches, counts, most)
            enough = self._recomputing(pricer, counts)
            fullest, needed_bytes = enough.fullest_batch()
        while enough.alone_bytes() > self._limit_bytes:
            counts = {module: np.minimum(counts[module] - (-end // _PARTS), end) for module, end in most.items()}
            enough = self._recomputing(pricer, counts)
        return enough

    def _most(self, plan: Plan) -> Iterator[Counts]:
        """What may need least memory: all layers recomputed, or all but one of each device's.

        Recomputing a device's last layer frees no memory at that device's peak, and keeps the layer's input, too. Where
        modules share devices, and the peak is in the LLM, all layers of the encoders are recomputed.
        """
        most = {grid.module: self._num_layers(plan, grid.module) for grid in plan.grids}
        but_one = {module: np.maximum(count - 1, 0) for module, count in most.items()}
        yield most
        if len(most) > 1:
            yield most | {"llm": but_one["llm"]}
        yield but_one

    def fewer(self, pricer: PlanPricer) -> Iterator[PlanPricer]:
        """The plan with ever fewer recomputed layers, by an eighth of them at a time: first of the LLM's, then of the
        encoders'."""
        most = {grid.module: self._num_layers(pricer.plan, grid.module) for grid in pricer.plan.grids}
        counts = {module: self._recomputed(pricer.plan, module, end) for module, end in most.items()}
        of_llm, of_encoders = (
            {"llm": counts["llm"]},
            {module: each for module, each in counts.items() if module != "llm"},
        )
        for part in (of_llm, of_encoders):
            for parts in reversed(range(_PARTS) if any(count.any() for count in part.values()) else ()):
                yield self._recomputing(
                    pricer, counts | {module: each * parts // _PARTS for module, each in part.items()}
                )
            counts |= {module: 0 * each for module, each in part.items()}

    def _num_layers(self, plan: Plan, module: str) -> np.ndarray:
        """How many layers of a module each of its pipeline ranks can recompute, [pp]."""
        pp = plan.grid(module).pp
        ways = self._trained.ways(module)
        if ways.num_still == len(ways.layers):
            return np.zeros(pp, dtype=int)
        layers = plan.layers_of(module, self._spec.module(module).num_layers)
        return np.array([len(part) for part in layers]).reshape(-1, pp).sum(axis=0)

    def _recomputed(self, plan: Plan, module: str, most: np.ndarray) -> np.ndarray:
        """How many layers of a module each of its pipeline ranks recomputes, at most `most`, [pp]."""
        recomputed = plan.recomputed_of(module, self._spec.module(module).num_layers)
        return np.minimum(np.reshape(recomputed, (-1, len(most))).sum(axis=0), most)

    def _recomputing(self, pricer: PlanPricer, counts: Counts) -> PlanPricer:
        return pricer.recomputing(with_recomputed(pricer.plan, counts, self._spec))

    def _fewest(self, pricer: PlanPricer, batches: Collection[int], least: Counts, most: Counts) -> Counts:
        """The fewest layers, from `least` to `most`, with which these batches fit."""
        encoders = {module: count for module, count in most.items() if module != "llm"}
        if PLACEMENTS[pricer.plan.placement].shares_ranks and encoders:
            # All devices recompute the same share of the encoders' layers.
            num_levels = max(1, *(count.max() for count in encoders.values()))
            first = min(int(least[name].min()) * num_levels // max(1, count.max()) for name, count in encoders.items())
            levels = [
                least
                | {name: np.maximum(least[name], -(-level * count // num_levels)) for name, count in encoders.items()}
                for level in range(first, num_levels + 1)
            ]

            def fits(level: int) -> bool:
                needed = self._recomputing(pricer, levels[level]).bytes_along_pipeline(batches)
                return max(peaks.max() for peaks in needed.values()) <= self._limit_bytes

            level = bisect_left(range(len(levels)), True, key=fits)
            if level < len(levels):
                return levels[level]
            least = levels[-1]
        return self._of_devices(pricer, batches, least, most)

    def _of_devices(self, pricer: PlanPricer, batches: Collection[int], fewest: Counts, enough: Counts) -> Counts:
        """For each device, the fewest layers from `fewest` to `enough` with which it fits; all of `enough` fit."""
        while any((fewest[module] < enough[module]).any() for module in enough):
            counts = {module: (fewest[module] + count) // 2 for module, count in enough.items()}
            needed = self._recomputing(pricer, counts).bytes_along_pipeline(batches)
            fits = {module: peaks <= self._limit_bytes for module, peaks in needed.items()}
            enough = {module: np.where(fits[module], counts[module], count) for module, count in enough.items()}
            fewest = {
                module: np.minimum(np.where(fits[module], count, counts[module] + 1), enough[module])
                for module, count in fewest.items()
            }
        return enough
