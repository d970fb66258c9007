"""Lower bounds of the step time over all assignments of a batch, for every row of the search space at once.

Part times are convex in a microbatch's loads, so a replica's microbatches take at least as long as if each held the
mean (Jensen). A stage also waits until the first microbatch has come through the stages before it, and after its last
backward the stages before it still have theirs to do; no microbatch is smaller than the smallest sample. And every
sample has to pass the whole pipeline, forwards and backwards. Layers count without recomputing, unless a caller says
what share of the encoders' layers is recomputed. Rows that the bounds rule out are never simulated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import polars as pl

from dflop.costs import KEPT_PARTS, CostModel, Loads, StageKind, stage_kinds
from dflop.models import ModelSpec, ModuleSpec
from dflop.plan import PLACEMENTS, SHARDINGS
from dflop.plan.layout_key import LayoutKey, ModuleLayout
from dflop.plan.trained import TrainedSet
from dflop.schedule import loads_of
from dflop.search.link_bounds import LeastLinks
from dflop.search.space import Splits, even_layers, sharding_columns
from dflop.shapes import SampleShapes

__all__ = ["LowerBounds", "lower_bounds"]

# Seconds of one unit of each part.
_OfParts = Mapping[str, np.ndarray]

_LLM_KEYS = (
    *ModuleLayout.columns("llm"),
    *sharding_columns("llm"),
    "num_microbatches",
    "schedule",
    "num_chunks",
    "balanced",
    "placement",
)


class EncoderBounds(NamedTuple):
    """Bounds for one encoder. `place` [num_rows] is the index of each row's key.

    `batches_s` are seconds for each batch and `means_s` their means over the batches, [2 (layers kept, or all
    recomputed), 3, num_keys, num_batches or 1]. Of the three, the first is a bound of the step by itself. Where the
    encoder shares ranks, the second is the least mean time that it adds to these ranks, and the third the least time
    that it adds to each of them.
    """

    place: np.ndarray
    batches_s: np.ndarray
    means_s: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class LowerBounds:
    """Bounds for the LLM in seconds, [num_keys], and those for every encoder. `llm_place` [num_rows] is the index of
    each row's key, and `grid_place` [num_rows] that of what the key says of the LLM alone, without the placement.

    `llm_s` is a bound of the step by itself. Where modules share ranks, the sum of `llm_shared_s` and what the encoders
    add to the mean of the ranks is one. The LLM's values bound the mean over the batches, but no single batch. So they
    are compared with the encoders' means only: the mean over batches of the larger of both would be no bound.
    """

    llm_place: np.ndarray
    grid_place: np.ndarray
    placement: np.ndarray
    llm_s: np.ndarray
    llm_shared_s: np.ndarray
    encoders: tuple[EncoderBounds, ...]

    def means(self) -> np.ndarray:
        """A lower bound of every row's mean step time over the batches, [num_rows]."""
        alone_s, together_s = np.zeros(len(self.llm_place)), self.llm_shared_s[self.llm_place]
        for bounds in self.encoders:
            encoder_alone_s, encoder_shared_s, _ = bounds.means_s[0, :, bounds.place, 0].T
            alone_s = np.maximum(alone_s, encoder_alone_s)
            together_s = together_s + encoder_shared_s
        sharing = [name for name, placement in PLACEMENTS.items() if placement.shares_ranks]
        return np.maximum(self.llm_s[self.llm_place], np.where(np.isin(self.placement, sharing), together_s, alone_s))

    def of_pipeline(
        self,
        row: int | np.ndarray,
        step_s: np.ndarray,
        rank_s: np.ndarray,
        *,
        encoders_again: float = 0.0,
        adds_s: np.ndarray | float = 0.0,
    ) -> np.ndarray:
        """A lower bound of a row's step for each batch, [num_batches], or for the mean batch, [1]; of several rows with
        the same placement, [num_rows, num_batches or 1].

        It is made from the LLM alone (`LlmPipelines`) on these batches: its step time `step_s` [num_batches], and its
        work on each pipeline rank `rank_s` [num_batches, pp]. At least the share `encoders_again` of each encoder's
        layers is recomputed. `adds_s` is the least time that encoders add to the LLM's step as their media are dealt
        (`DealtMedia`).

        Where an encoder's passes run before and after the LLM's on every rank, the least that any rank computes of them
        adds to the LLM's step. Where they run between the LLM's, they at least do not shorten it. No rank works longer
        than the step, for all its modules together; this also holds for the mean over all ranks with encoders.
        """
        placement = PLACEMENTS[self.placement[np.ravel(row)[0]]]
        alone_s, shared_s, least_s = 0.0, 0.0, 0.0
        for bounds in self.encoders:
            encoder_s, with_all_s = (bounds.means_s if len(step_s) == 1 else bounds.batches_s)[:, :, bounds.place[row]]
            if encoders_again:  # every recomputed layer adds the same time
                encoder_s = encoder_s + encoders_again * (with_all_s - encoder_s)
            alone_s = np.maximum(alone_s, encoder_s[0])
            shared_s, least_s = shared_s + encoder_s[1], least_s + encoder_s[2]
        if not placement.shares_ranks:
            return np.maximum(step_s + adds_s, alone_s)
        if placement.encodes_all_first:
            step_s = step_s + np.maximum(least_s, adds_s)
        num_carriers = len(placement.encoder_stages(rank_s.shape[1]))
        return np.maximum(step_s, rank_s[:, :num_carriers].sum(axis=1) / num_carriers + shared_s)

    def of_fullest(
        self,
        row: int,
        step_s: np.ndarray,
        rank_s: np.ndarray,
        *,
        encoders_again: float = 0.0,
        adds_s: np.ndarray | float = 0.0,
    ) -> np.ndarray:
        """As `of_pipeline`, for each batch, from the pipeline of the LLM's fullest replica.

        To its time adds only what every rank computes of the encoders, and nothing where these have ranks of their own.
        """
        placement = PLACEMENTS[self.placement[row]]
        if not placement.shares_ranks:
            return step_s
        least_s = 0.0
        for bounds in self.encoders:
            kept_s, all_s = bounds.batches_s[:, 2, bounds.place[row]]
            least_s = least_s + kept_s + encoders_again * (all_s - kept_s)
        least_s = np.maximum(least_s, adds_s)
        if placement.encodes_all_first:
            return step_s + least_s
        num_carriers = len(placement.encoder_stages(rank_s.shape[1]))
        return np.maximum(step_s, rank_s[:, :num_carriers].max(axis=1) + least_s)


def lower_bounds(
    rows: pl.DataFrame,
    batches: Sequence[SampleShapes],
    costs: CostModel,
    spec: ModelSpec,
    splits: Splits,
    links: LeastLinks,
) -> LowerBounds:
    """The bounds of every row of the space, on these batches."""
    trained = links.trained
    llm_keys, llm_place = _distinct(rows, _LLM_KEYS)
    llm_s, llm_shared_s = _llm_bounds(llm_keys, batches, costs, spec, splits, links)
    encoders = []
    for encoder in spec.encoders:
        columns = (*ModuleLayout.columns(encoder.name), *sharding_columns(encoder.name))
        keys, place = _distinct(rows, (*columns, "num_microbatches"))
        both = [_encoder_bounds(encoder, keys, batches, costs, links, trained, again) for again in (False, True)]
        batches_s = np.array(both)
        encoders.append(EncoderBounds(place, batches_s, batches_s.mean(axis=-1, keepdims=True)))
    return LowerBounds(
        llm_place=llm_place,
        grid_place=_distinct(llm_keys, _LLM_KEYS[:-1])[1][llm_place],
        placement=rows["placement"].cast(pl.String).to_numpy(),
        llm_s=llm_s,
        llm_shared_s=llm_shared_s,
        encoders=tuple(encoders),
    )


def _distinct(rows: pl.DataFrame, columns: Sequence[str]) -> tuple[pl.DataFrame, np.ndarray]:
    """The distinct values of these columns with their index `place`, and the index of each row's, [num_rows]."""
    keys = rows.select(columns).unique(maintain_order=True).with_row_index("place")
    places = rows.select(columns).join(keys, on=columns, how="left", maintain_order="left")
    return keys, places["place"].to_numpy()


def _over(loads: Sequence[Loads], function: Callable[[np.ndarray], float]) -> Loads:
    """`function` of the samples' loads in each batch, for each kind of load, [num_batches]."""
    return Loads(*(np.array([function(load) for load in column]) for column in zip(*loads, strict=True)))


def _llm_bounds(
    keys: pl.DataFrame,
    batches: Sequence[SampleShapes],
    costs: CostModel,
    spec: ModelSpec,
    splits: Splits,
    links: LeastLinks,
) -> tuple[np.ndarray, np.ndarray]:
    """The LLM's `llm_s` and `llm_shared_s` (`LowerBounds`), [num_keys].

    Both bound the mean over the batches (by Jensen's inequality once more), but no single batch. This is one long
    function so that everything that is computed once for a kind of rows stands beside the loop that needs it.
    """
    texts, trained = [loads_of("llm", shapes) for shapes in batches], links.trained
    total, least = (
        Loads(*(load.mean(keepdims=True) for load in _over(texts, function))) for function in (np.sum, np.min)
    )
    bound_s, shared_s = np.zeros((len(keys), 1)), np.zeros((len(keys), 1))
    num_layers = spec.module("llm").num_layers
    everywhere = [name for name, placement in PLACEMENTS.items() if placement.uses_all_ranks]
    for sizes, of_layout in keys.group_by(LayoutKey.columns("llm_")):
        layout = LayoutKey(*sizes)
        least_forward_s, least_backward_s = costs.part_times("llm", layout, least, KEPT_PARTS)
        whole = StageKind.whole("llm", layout, num_layers, trained=trained)
        chain_s = np.mean([_chain_s(costs, whole, loads) for loads in texts])
        buckets, inverse = np.unique(
            (of_layout["llm_dp"] * of_layout["num_microbatches"]).to_numpy(), return_inverse=True
        )
        mean = Loads(*(load[None, :] / buckets[:, None] for load in total))
        forward_s, backward_s = costs.part_times("llm", layout, mean, KEPT_PARTS)
        total_s = lru_cache(partial(_both_passes_s, forward_s, backward_s))  # few kinds make up all stages
        of_layout = of_layout.with_columns(bucket=inverse).with_row_index("at")
        columns = ("place", "bucket", "llm_dp", "num_microbatches", "llm_shards")
        values = [of_layout[column].to_numpy() for column in columns]
        uses_all = np.isin(of_layout["placement"].cast(pl.String).to_numpy(), everywhere)
        alike = of_layout.group_by("llm_pp", "num_chunks", "balanced", "llm_sharding").agg("at")
        for pp, num_chunks, balanced, sharding, rows in alike.iter_rows():
            num_stages = pp * num_chunks
            layers = splits[layout, pp] if balanced else even_layers(num_layers, num_stages)
            kinds = stage_kinds("llm", layout, layers, (), trained)
            place, at, dp, count, shards = (column[rows] for column in values)
            count = count[:, None]
            latency_s, byte_s = links.sync(dp, layout, shards)
            best, together, before_s, after_s = np.zeros((len(at), 1)), 0.0, 0.0, 0.0
            for stage in range(pp):
                chunks = kinds[stage::pp]
                if SHARDINGS[sharding].gathers:
                    passes = zip(links.passes("llm", layout, shards), (forward_s, backward_s), strict=True)
                    busy_s = count * sum(one.seconds({part: s[at] for part, s in of.items()}) for one, of in passes)
                else:
                    busy_s = count * sum(map(total_s, chunks))[at]
                # What is left of the sync when what may hide is hidden.
                rests = [1 - links.hidden_shares(kind, shards).sum(axis=0) for kind in chunks]
                sizes = [costs.trained_and_frozen_bytes(kind)[0] for kind in chunks]
                size = sum(size * rest for size, rest in zip(sizes, rests, strict=True))
                sync_s = (latency_s * np.min(rests, axis=0) + size * byte_s)[:, None] if any(sizes) else 0.0
                best = np.maximum(best, before_s + busy_s + np.maximum(sync_s, after_s))
                together = together + busy_s + sync_s
                if stage == 0:
                    first_s = busy_s
                before_s = before_s + kinds[stage].total(least_forward_s)
                after_s = after_s + kinds[stage].total(least_backward_s, kinds[stage].parts_with_backward)
            bound_s[place] = np.maximum(best, chain_s)
            shared_s[place] = np.where(uses_all[rows, None], together / pp, first_s)
    return bound_s[:, 0], shared_s[:, 0]


def _encoder_bounds(
    encoder: ModuleSpec,
    keys: pl.DataFrame,
    batches: Sequence[SampleShapes],
    costs: CostModel,
    links: LeastLinks,
    trained: TrainedSet,
    recomputes: bool,
) -> np.ndarray:
    """`EncoderBounds.batches_s` with all layers recomputed or none, [3, num_keys, num_batches].

    Each sample's items go to the replica with the fewest, so every replica has at least the mean number of items less
    those of the largest sample (Graham 1969).
    """
    name = encoder.name
    items = [loads_of(name, shapes) for shapes in batches]
    total, largest = _over(items, np.sum), _over(items, np.max)
    bounds_s = alone_s, shared_s, least_s = np.zeros((3, len(keys), len(batches)))
    for sizes, rows in keys.group_by(LayoutKey.columns(f"{name}_")):
        layout = LayoutKey(*sizes)
        dp, count = (rows[column].to_numpy()[:, None] for column in (f"{name}_dp", "num_microbatches"))
        place = rows["place"].to_numpy()
        part_s, least_part_s = (
            _items_s(costs, name, layout, Loads(*(load / count for load in loads)))
            for loads in (
                [load / dp for load in total],
                # This does not hold for the squares of runs, since replicas are chosen by their items: they count as 0.
                [np.maximum(total.num_items / dp - largest.num_items, 0.0), *(0.0 * dp * load for load in total[1:])],
            )
        )
        for (pp,), group in rows.with_row_index("at").group_by(f"{name}_pp"):
            at = group["at"].to_numpy()
            encoder_s, encoder_least_s = (
                tuple({part: s[at] for part, s in of_part.items()} for of_part in passes)
                for passes in (part_s, least_part_s)
            )
            shards = rows[f"{name}_shards"].to_numpy()[at]
            latency_s, byte_s = links.sync(dp[at, 0], layout, shards)
            layers = even_layers(encoder.num_layers, pp)
            for kind in stage_kinds(name, layout, layers, layers if recomputes else (), trained):
                busy_s = count[at] * _both_passes_s(*encoder_s, kind)
                trained_bytes, _ = costs.trained_and_frozen_bytes(kind)
                sync_s = (latency_s + trained_bytes * byte_s) * (trained_bytes > 0)
                rest_s = (sync_s * (1 - links.hidden_shares(kind, shards).sum(axis=0)))[:, None]
                alone_s[place[at]] = np.maximum(alone_s[place[at]], busy_s + rest_s)
                shared_s[place[at]] += busy_s
                least_s[place[at]] += count[at] * _both_passes_s(*encoder_least_s, kind)
    return bounds_s


def _both_passes_s(forward_s: _OfParts, backward_s: _OfParts, kind: StageKind) -> np.ndarray:
    """Seconds of a stage's forward and backward, from those of its parts."""
    return kind.total(forward_s) + kind.total(backward_s, kind.parts_with_backward)


def _items_s(costs: CostModel, encoder: str, layout: LayoutKey, loads: Loads) -> tuple[_OfParts, ...]:
    """Forward and backward seconds of each of the encoder's parts, without their constants, since a replica without
    items takes no time."""
    passes = costs.part_times(encoder, layout, loads)
    resting = costs.part_times(encoder, layout, Loads(*np.zeros((4, 1))))
    return tuple(
        {part: seconds[part] - const[part] for part in seconds} for seconds, const in zip(passes, resting, strict=True)
    )


def _chain_s(costs: CostModel, whole: StageKind, loads: Loads) -> float:
    """Seconds of the slowest sample through all layers and back."""
    return float(sum(costs.stage_time(whole, loads)).max())
