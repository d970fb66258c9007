"""The global batches that plans are priced on, and how each is regrouped for a number of replicas and microbatches.

Groups do not depend on the rest of a plan: a sample's load is its cost in each whole module, relative to the other
samples. So even buckets are computed once for all plans with as many of them, and how an encoder's media are dealt once
for all plans with as many of its replicas.
"""

from functools import lru_cache

import numpy as np

from dflop.balance import DrawnBatch, Policy
from dflop.config import Config
from dflop.costs import PARTS, CostModel, Loads, StageKind
from dflop.models import ModelSpec
from dflop.plan import PLACEMENTS, Plan
from dflop.plan.layout_key import LayoutKey
from dflop.schedule import (
    Assignment,
    Cells,
    GlobalBatches,
    cells_in,
    deal_items,
    dealing_of,
    loads_of,
    loads_without_plan,
    module_alone,
    sums_by_cell,
)
from dflop.schedule.sharing import degrees_of, most_shares
from dflop.shapes import SampleShapes
from dflop.shapes.shares import SampleDivider

__all__ = ["GroupedBatches"]

# How many batches are drawn: enough for `_ENOUGH_SAMPLES` samples, since large batches differ less from each other.
_LEAST_BATCHES, _MOST_BATCHES, _ENOUGH_SAMPLES = 2, 16, 4096
# How many divisions of batches into even buckets are kept.
_MOST_KEPT = 1024
# How many samples' replicas are kept, of all ways in which samples and media were dealt, or loads summed.
_MOST_SAMPLES_KEPT, _LEAST_KEPT = 2**22, 64
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
        self._alone = lru_cache(maxsize=None)(self._module_alone)
        most_kept = max(_LEAST_KEPT, _MOST_SAMPLES_KEPT // size)
        self.group = lru_cache(maxsize=most_kept)(self._group)
        self.encoder_rank = lru_cache(maxsize=most_kept)(self._deal_encoder)
        self.cells = lru_cache(maxsize=most_kept)(self._sum_cells)
        self.drawn = [
            DrawnBatch(loads_without_plan(shapes, spec, costs), shapes.llm_tokens, [config.seed, batch], num_kept)
            for batch, shapes in enumerate(self.shapes)
        ]

    def __len__(self) -> int:
        return len(self.shapes)

    def _group(self, policy: Policy, batch: int, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """LLM replica and microbatch of each sample, [num_samples] each, by a policy's quick form."""
        return policy.quick(self.drawn[batch], dp, num_microbatches)

    def assigned(self, policy: Policy, batch: int, plan: Plan) -> tuple[Assignment, dict[str, Cells]]:
        """A batch as a policy's quick form groups it for a plan, with the replicas that encode its media
        (`deal_media`), and each module's loads (`cells_of`)."""
        grouped = policy, batch, plan.grid("llm").dp, plan.num_microbatches
        how = PLACEMENTS[plan.placement].has_bridges, plan.num_stages("llm") > 1
        llm_rank, microbatch = self.group(*grouped)
        encoders = self.shapes[batch].encoders
        encoder_rank = np.empty((len(llm_rank), len(encoders)), dtype=np.int64)
        cells = {}
        for column, encoder in enumerate(encoders):
            dealing = dealing_of(plan, encoder)
            encoder_rank[:, column] = self.encoder_rank(*grouped, encoder, *dealing) if dealing else llm_rank
            cells[encoder] = self.cells(*grouped, encoder, dealing, *how)
        cells["llm"] = self.cells(*grouped, "llm", None, *how)
        return Assignment(llm_dp_rank=llm_rank, microbatch=microbatch, encoder_rank=encoder_rank), cells

    def _deal_encoder(
        self, policy: Policy, batch: int, llm_dp: int, num_microbatches: int, encoder: str, dp: int, starts_anew: bool
    ) -> np.ndarray:
        """The replica of an encoder, out of `dp`, that computes each sample's media, [num_samples] (`deal_items`)."""
        _, microbatch = self.group(policy, batch, llm_dp, num_microbatches)
        return deal_items(self.shapes[batch].items_of(encoder), microbatch, dp, starts_anew)

    def _sum_cells(
        self,
        policy: Policy,
        batch: int,
        llm_dp: int,
        num_microbatches: int,
        module: str,
        dealing: tuple[int, bool] | None = None,
        has_bridges: bool = True,
        cuts_llm: bool = False,
    ) -> Cells:
        """A module's loads in every microbatch, arrays [dp, num_microbatches]; `dealing` is that of an encoder
        (`dealing_of`)."""
        rank, microbatch = self.group(policy, batch, llm_dp, num_microbatches)
        dp = llm_dp
        if dealing:
            rank, dp = self.encoder_rank(policy, batch, llm_dp, num_microbatches, module, *dealing), dealing[0]
        alone = self._alone(batch, module, has_bridges, cuts_llm)
        return cells_in(alone, rank, microbatch, dp, num_microbatches)

    def _module_alone(self, batch: int, module: str, has_bridges: bool, cuts_llm: bool) -> Cells:
        return module_alone(module, self.shapes[batch], has_bridges=has_bridges, cuts_llm=cuts_llm)

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
