"""The global batches that plans are priced on, and how each is regrouped for a number of replicas and microbatches.

Groups do not depend on the rest of a plan: a sample's load is its cost in each whole module, relative to the other
samples. So even buckets are computed once for all plans with as many of them.
"""

import numpy as np

from dflop.balance import DrawnBatch, Policy
from dflop.config import Config
from dflop.costs import PARTS, CostModel, Loads, StageKind
from dflop.models import ModelSpec
from dflop.plan.layout_key import LayoutKey
from dflop.schedule import GlobalBatches, loads_of, loads_without_plan, sums_by_cell
from dflop.schedule.sharing import degrees_of, most_shares
from dflop.shapes import SampleShapes
from dflop.shapes.shares import SampleDivider

__all__ = ["GroupedBatches"]

# How many batches are drawn: enough for `_ENOUGH_SAMPLES` samples, since large batches differ less from each other.
_LEAST_BATCHES, _MOST_BATCHES, _ENOUGH_SAMPLES = 2, 16, 4096
# How many divisions of batches into even buckets are kept.
_MOST_KEPT = 1024
# A share in the batches that plans are priced on has at most this part of what a device computes of a batch.
SEARCH_FILL = 0.05


class GroupedBatches:
    """The first global batches as training will draw them: `plan.search_batches`, or enough of them for a mean."""

    def __init__(self, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, cp: int = 1) -> None:
        """With `cp`, long samples are divided into up to so many shares, which are then grouped as samples are.

        Raises:
            UserError: when one batch would need more samples than there are, or a module has no costs.
        """
        costs.require_modules(module.name for module in spec.modules)
        size = config.train.global_batch_size
        num_batches = config.plan.search_batches or min(_MOST_BATCHES, max(_LEAST_BATCHES, _ENOUGH_SAMPLES // size))
        drawn = GlobalBatches.of(samples, size, config.seed)
        self.shapes = [samples.take(drawn[step]) for step in range(num_batches)]
        if cp > 1:
            divider, num_devices = SampleDivider(spec, config.data.audio), config.cluster.num_devices
            for batch, shapes in enumerate(self.shapes):
                loads = loads_without_plan(shapes, spec, costs)
                degree = degrees_of(loads, shapes, num_devices, cp, SEARCH_FILL)
                self.shapes[batch] = divider.divided(shapes, degree)
        self._text = [np.array(loads_of("llm", shapes)) for shapes in self.shapes]
        # A plan must hold every sample, drawn or not. It does so if it holds each of these.
        self.largest = samples.take(_largest(samples))
        if cp > 1:
            self.largest = divider.divided(self.largest, np.minimum(most_shares(self.largest), cp))
        self._spares: dict[LayoutKey, bool] = {}
        num_kept = max(1, _MOST_KEPT // num_batches)
        self.drawn = [
            DrawnBatch(loads_without_plan(shapes, spec, costs), shapes.llm_tokens, [config.seed, batch], num_kept)
            for batch, shapes in enumerate(self.shapes)
        ]

    def __len__(self) -> int:
        return len(self.shapes)

    def group(self, policy: Policy, batch: int, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """LLM replica and microbatch of each sample, [num_samples] each, by a policy's quick form."""
        return policy.quick(self.drawn[batch], dp, num_microbatches)

    def mean_text(self, policy: Policy, dp: int, num_microbatches: int) -> Loads:
        """The LLM's loads in each microbatch, as means over its replicas, [num_batches, num_microbatches]."""
        rows = []
        for batch, text in enumerate(self._text):
            _, microbatch = self.group(policy, batch, dp, num_microbatches)
            rows.append(sums_by_cell(microbatch, text, num_microbatches) / dp)
        return Loads(*np.stack(rows, axis=1))

    def spares_attention(self, costs: CostModel, layout: LayoutKey) -> bool:
        """Whether recomputing an LLM layer but for attention frees more bytes a second than recomputing it as a whole;
        False where there are no costs of it."""
        if ("llm", layout) not in costs.attention_bytes:
            return False
        if layout not in self._spares:
            loads = Loads(*(np.atleast_1d(sum(map(np.sum, column))) for column in zip(*self._text, strict=True)))
            kinds = [
                StageKind(module="llm", layout=layout, num_layers=1, is_first=False, is_last=False, **how)
                for how in ({}, {"num_recomputed": 1}, {"num_recomputed": 1, "num_attention_kept": 1})
            ]
            none_s, whole_s, spared_s = (float(backward_s[0]) for _, backward_s in costs.stage_times(kinds, loads))
            none, whole, spared = (float(own.activation_bytes[0]) for own in costs.stage_memories(kinds, loads))
            self._spares[layout] = (none - spared) * (whole_s - none_s) > (none - whole) * (spared_s - none_s)
        return self._spares[layout]

    def mean_part_s(self, costs: CostModel, layout: LayoutKey) -> tuple[float, float, float]:
        """Forward plus backward seconds that the mean sample adds to one LLM layer, the embedding and the head."""
        columns = zip(*self._text, strict=True)
        mean = Loads(*(np.atleast_1d(np.mean([load.mean() for load in column])) for column in columns))
        nothing = Loads(*np.zeros((4, 1)))
        with_one, without = (costs.part_times("llm", layout, loads, PARTS) for loads in (mean, nothing))
        layer_s, first_s, last_s = (
            float((sum(times[part] for times in with_one) - sum(times[part] for times in without))[0])
            for part in ("layer", "first", "last")
        )
        return layer_s, first_s, last_s


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
