"""The global batches that plans are priced on, and how each is regrouped for a number of replicas and microbatches.

The grouping does not depend on the rest of a plan: a sample's load is its cost in each whole module, relative to the
other samples. So the grouping is computed once for all plans with the same number of buckets.
"""

from functools import lru_cache

import numpy as np

from dflop.balancing import dealt_at_random, quick_buckets, small_at_both_ends
from dflop.config import Config
from dflop.costs import PARTS, CostModel, Loads, StageKind
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.parallelism.layout_key import LayoutKey
from dflop.pricing import loads_of, sums_by_cell
from dflop.runtime.kernels import kernel
from dflop.scheduling import GlobalBatches

__all__ = ["GroupedBatches", "like_lengths"]

# How many batches are drawn: enough for `_ENOUGH_SAMPLES` samples, since large batches differ less from each other.
_LEAST_BATCHES, _MOST_BATCHES, _ENOUGH_SAMPLES = 2, 16, 4096


class GroupedBatches:
    """The first global batches as training will draw them: `plan.search_batches`, or enough of them for a mean."""

    def __init__(self, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> None:
        """Raise `UserError` when one batch would need more samples than there are, or a module has no costs."""
        costs.require_modules(module.name for module in spec.modules)
        size = config.train.global_batch_size
        num_batches = config.plan.search_batches or min(_MOST_BATCHES, max(_LEAST_BATCHES, _ENOUGH_SAMPLES // size))
        drawn = GlobalBatches(len(samples), size, config.seed)
        self.shapes = [samples.take(drawn[step]) for step in range(num_batches)]
        self._text = [np.array(loads_of("llm", shapes)) for shapes in self.shapes]
        # A plan must hold every sample, drawn or not. It does so if it holds each of these.
        self.largest = samples.take(_largest(samples))
        self._seed = config.seed
        self._loads_s = [_loads_s(shapes, spec, costs) for shapes in self.shapes]
        self._buckets = lru_cache(maxsize=1024)(self._bucketed)

    def __len__(self) -> int:
        return len(self.shapes)

    def balanced(self, batch: int, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """LLM replica and microbatch of each sample: even buckets, small ones first and last on every replica."""
        return _drawn_in_turns(*self._buckets(batch, dp * num_microbatches), dp, _places(num_microbatches))

    def random(self, batch: int, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """LLM replica and microbatch of each sample: random, with equally many samples a bucket, to within one."""
        rng = np.random.default_rng([self._seed, batch])
        return np.divmod(dealt_at_random(len(self.shapes[batch]), dp * num_microbatches, rng), num_microbatches)

    def by_length(self, batch: int, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """LLM replica and microbatch of each sample: samples of similar length share a microbatch (`like_lengths`).

        The batch is the same as with the other groupings, so that steps train on the same samples.
        """
        return like_lengths(self.shapes[batch].llm_tokens, dp, num_microbatches)

    def mean_text(self, grouping: str, dp: int, num_microbatches: int) -> Loads:
        """The LLM's loads in each microbatch, as means over its replicas, [num_batches, num_microbatches]."""
        rows = []
        for batch, text in enumerate(self._text):
            _, microbatch = getattr(self, grouping)(batch, dp, num_microbatches)
            rows.append(sums_by_cell(microbatch, text, num_microbatches) / dp)
        return Loads(*np.stack(rows, axis=1))

    def mean_part_s(self, costs: CostModel, layout: LayoutKey) -> tuple[float, float, float]:
        """Forward plus backward seconds that the mean sample adds to one LLM layer, the embedding and the head."""
        columns = zip(*self._text, strict=True)
        mean = Loads(*(np.atleast_1d(np.mean([load.mean() for load in column])) for column in columns))
        nothing = Loads(*np.zeros((4, 1)))
        with_one, without = (costs.part_times("llm", layout, own, PARTS) for own in (mean, nothing))
        layer_s, first_s, last_s = (
            float((sum(times[part] for times in with_one) - sum(times[part] for times in without))[0])
            for part in ("layer", "first", "last")
        )
        return layer_s, first_s, last_s

    def _bucketed(self, batch: int, num_buckets: int) -> tuple[np.ndarray, np.ndarray]:
        """Bucket of each sample, and the buckets, the largest first."""
        loads_s = self._loads_s[batch]
        bucket = quick_buckets(loads_s, num_buckets)
        load = np.bincount(bucket, weights=loads_s.sum(axis=1), minlength=num_buckets)
        return bucket, np.argsort(-load, kind="stable")


@lru_cache(maxsize=64)
def _places(num_microbatches: int) -> np.ndarray:
    """Where in its replica's order a microbatch comes, the largest first: those go to the middle."""
    places = np.empty(num_microbatches, dtype=np.int64)
    places[small_at_both_ends(-np.arange(num_microbatches))] = np.arange(num_microbatches)
    return places


@kernel
def _drawn_in_turns(bucket, by_load, dp, places):
    """Replica and microbatch of each sample. Replicas draw buckets in turns, in alternating directions, so that each
    gets about the same load; `places` [num_microbatches] says which microbatch the bucket of a turn becomes."""
    replica, microbatch = np.empty(len(by_load), dtype=np.int64), np.empty(len(by_load), dtype=np.int64)
    for turn in range(len(places)):
        for place in range(dp):
            drawn = by_load[turn * dp + (dp - 1 - place if turn % 2 else place)]
            replica[drawn], microbatch[drawn] = place, places[turn]
    return replica[bucket], microbatch[bucket]


def like_lengths(lengths: np.ndarray, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
    """Replica and microbatch of each sample, so that a microbatch has samples of similar length.

    Buckets get equally many samples, to within one. The longest samples come first. Within a microbatch, samples are
    dealt to the replicas in alternating directions.
    """
    order = np.argsort(-lengths, kind="stable")
    turn = np.arange(len(order)) * num_microbatches // len(order)
    rank, microbatch = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=np.int64)
    microbatch[order] = turn
    round_, place = np.divmod(np.arange(len(order)) - np.searchsorted(turn, turn), dp)
    rank[order] = np.where(round_ % 2 == 0, place, dp - 1 - place)
    return rank, microbatch


def _largest(samples: SampleShapes) -> np.ndarray:
    """Indices of samples such that any other sample is no larger than one of these in every size."""
    sizes = [samples.num_items, samples.llm_tokens, samples.target_tokens, samples.kept_tokens]
    if samples.sum_sq_items is not None:
        sizes.append(samples.sum_sq_items)
    sizes = np.column_stack(sizes).astype(np.int64)
    left, largest = np.arange(len(samples)), []
    while len(left):
        first = left[sizes[left].sum(axis=1).argmax()]
        largest.append(first)
        left = left[(sizes[left] > sizes[first]).any(axis=1)]
    return np.array(largest)


def _loads_s(shapes: SampleShapes, spec: ModelSpec, costs: CostModel) -> np.ndarray:
    """Seconds that each sample adds to each whole module, as shares of the batch's, [num_samples, num_modules]."""
    columns = []
    for module in spec.modules:
        layout = min(costs.layouts[module.name])
        whole = StageKind.whole(module.name, layout, module.num_layers)
        seconds = costs.additive_loads_s(whole, loads_of(module.name, shapes))
        columns.append(seconds / max(seconds.sum(), 1e-300))
    return np.column_stack(columns)
