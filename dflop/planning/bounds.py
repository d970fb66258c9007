"""Step times that no assignment of a batch can undercut, for every row of the search space at once.

Part times are convex in a microbatch's loads, so a replica's microbatches take at least as long as if each held the
mean (Jensen). A stage also waits until the first microbatch has come through the stages before it, and after its last
backward the stages before it still have theirs to do; no microbatch is smaller than the smallest sample. And every
sample has to pass the whole pipeline, forwards and backwards. What the bounds rule out is never simulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dflop.costs import PARTS, CostModel, Loads, StageKind, stage_kinds
from dflop.data import SampleShapes
from dflop.models import ModelSpec, ModuleSpec
from dflop.parallelism import PLACEMENTS, SCHEDULES, SHARDINGS
from dflop.planning.least_links import LeastLinks
from dflop.planning.space import Splits, even_layers, layout_columns, sharding_columns
from dflop.pricing import loads_of

__all__ = ["LowerBounds", "lower_bounds"]

_LLM_KEYS = (
    *layout_columns("llm"),
    *sharding_columns("llm"),
    "num_microbatches",
    "checkpointing",
    "schedule",
    "num_chunks",
    "balanced",
    "placement",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBounds:
    """Seconds of one encoder, [num_keys, num_batches]; a row's stand at its `place`.

    `alone_s` bounds the step by itself. Where the encoder shares ranks, `shared_s` is what it adds to the mean of
    them, and `least_s` what it adds to each.
    """

    place: np.ndarray
    alone_s: np.ndarray
    shared_s: np.ndarray
    least_s: np.ndarray

    def means(self) -> "EncoderBounds":
        """Of the mean batch alone, [num_keys, 1]."""
        seconds = {name: getattr(self, name).mean(axis=1, keepdims=True) for name in ("alone_s", "shared_s", "least_s")}
        return EncoderBounds(place=self.place, **seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class LowerBounds:
    """Seconds of the LLM, [num_keys], a row's at its `llm_place`, and those of every encoder.

    `llm_s` bounds the step alone. Where modules share ranks, the `shared_s` of all of them together do. What is the
    LLM's bounds the mean over the batches and no single one of them, so modules meet as means alone: the mean of the
    larger of both, batch by batch, would be no bound.
    """

    llm_place: np.ndarray
    placement: np.ndarray
    llm_s: np.ndarray
    llm_shared_s: np.ndarray
    encoders: tuple[EncoderBounds, ...]
    encoder_means: tuple[EncoderBounds, ...]

    def means(self) -> np.ndarray:
        """Of every row the least mean step over the batches, [num_rows]."""
        alone_s, together_s = np.zeros(len(self.llm_place)), self.llm_shared_s[self.llm_place]
        for own in self.encoder_means:
            alone_s = np.maximum(alone_s, own.alone_s[own.place, 0])
            together_s = together_s + own.shared_s[own.place, 0]
        sharing = [name for name, placement in PLACEMENTS.items() if placement.shares_ranks]
        return np.maximum(self.llm_s[self.llm_place], np.where(np.isin(self.placement, sharing), together_s, alone_s))

    def of_pipeline(self, row: int, step_s: np.ndarray, rank_s: np.ndarray) -> np.ndarray:
        """The least step of each batch, [num_batches], given the LLM's alone (`MeanPipelines`): its step
        [num_batches] and its work on each pipeline rank [num_batches, pp]; or of the mean batch, given that, [1].

        Where an encoder's passes lie before and after the LLM's on every rank, what any rank has to do of them adds to
        the LLM's step; where they lie between, they do not make it shorter. A rank works no longer than the step takes,
        whichever module it works for: that holds for the mean over all ranks that carry encoders.
        """
        placement = PLACEMENTS[self.placement[row]]
        alone_s, shared_s, least_s = 0.0, 0.0, 0.0
        for own in self.encoder_means if len(step_s) == 1 else self.encoders:
            place = own.place[row]
            alone_s = np.maximum(alone_s, own.alone_s[place])
            shared_s, least_s = shared_s + own.shared_s[place], least_s + own.least_s[place]
        if not placement.shares_ranks:
            return np.maximum(step_s, alone_s)
        if placement.encodes_all_first:
            step_s = step_s + least_s
        num_carriers = len(placement.encoder_stages(rank_s.shape[1]))
        return np.maximum(step_s, rank_s[:, :num_carriers].mean(axis=1) + shared_s)


def lower_bounds(
    rows: pl.DataFrame,
    batches: Sequence[SampleShapes],
    costs: CostModel,
    spec: ModelSpec,
    splits: Splits,
    links: LeastLinks,
) -> LowerBounds:
    """Bounds of every row of the space for every batch."""
    frozen = links.frozen
    llm_keys, llm_place = _distinct(rows, _LLM_KEYS)
    llm_s, llm_shared_s = _llm_bounds(llm_keys, batches, costs, spec, splits, links, "llm" in frozen)
    encoders = []
    for encoder in spec.encoders:
        own = (*layout_columns(encoder.name), *sharding_columns(encoder.name))
        keys, place = _distinct(rows, (*own, "num_microbatches", "checkpointing"))
        bounds = _encoder_bounds(encoder, keys, batches, costs, links, encoder.name in frozen)
        encoders.append(EncoderBounds(place=place, **bounds))
    return LowerBounds(
        llm_place=llm_place,
        placement=rows["placement"].cast(pl.String).to_numpy(),
        llm_s=llm_s,
        llm_shared_s=llm_shared_s,
        encoders=tuple(encoders),
        encoder_means=tuple(own.means() for own in encoders),
    )


def _distinct(rows: pl.DataFrame, columns: Sequence[str]) -> tuple[pl.DataFrame, np.ndarray]:
    """The different values of these columns, numbered as `place`, and the number of each row's, [num_rows]."""
    keys = rows.select(columns).unique(maintain_order=True).with_row_index("place")
    places = rows.select(columns).join(keys, on=columns, how="left", maintain_order="left")
    return keys, places["place"].to_numpy()


def _over(loads: Sequence[Loads], function: Callable[[np.ndarray], float]) -> Loads:
    """A number of every load of every batch, [num_batches]."""
    return Loads(*(np.array([function(load) for load in column]) for column in zip(*loads, strict=True)))


def _llm_bounds(
    keys: pl.DataFrame,
    batches: Sequence[SampleShapes],
    costs: CostModel,
    spec: ModelSpec,
    splits: Splits,
    links: LeastLinks,
    is_frozen: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the LLM alone, and what it adds to the encoders' work on ranks that carry both, [num_keys].

    Both bound the mean over the batches, by Jensen once more, and no single batch. One long function: what is computed
    once for a kind of rows stays beside the loop that needs it.
    """
    texts = [loads_of("llm", shapes) for shapes in batches]
    total, least = (
        Loads(*(load.mean(keepdims=True) for load in _over(texts, function))) for function in (np.sum, np.min)
    )
    bound_s, shared_s = np.zeros((len(keys), 1)), np.zeros((len(keys), 1))
    num_layers = spec.module("llm").num_layers
    for (tp, checkpointing), own in keys.group_by("llm_tp", "checkpointing"):
        ask = {"checkpointing": checkpointing}
        least_forward_s, least_backward_s = costs.part_times("llm", tp, least, **ask)
        whole = StageKind.whole("llm", tp, num_layers, **ask)
        chain_s = {
            is_split: np.mean([_chain_s(costs, whole, loads, is_split) for loads in texts])
            for is_split in (False, True)
        }
        buckets, inverse = np.unique((own["llm_dp"] * own["num_microbatches"]).to_numpy(), return_inverse=True)
        mean = Loads(*(load[None, :] / buckets[:, None] for load in total))
        forward_s, backward_s = costs.part_times("llm", tp, mean, **ask)
        part_s = {part: forward_s[part] + backward_s[part] for part in PARTS}
        for (pp, schedule, num_chunks, balanced, sharding), group in own.with_columns(bucket=inverse).group_by(
            "llm_pp", "schedule", "num_chunks", "balanced", "llm_sharding"
        ):
            num_stages = pp * num_chunks
            layers = splits[tp, pp] if balanced else even_layers(num_layers, num_stages)
            kinds = stage_kinds("llm", tp, layers, **ask)
            at, dp = group["bucket"].to_numpy(), group["llm_dp"].to_numpy()
            count = group["num_microbatches"].to_numpy()[:, None]
            place = group["place"].to_numpy()
            is_split = SCHEDULES[schedule].splits_backward
            shards = group["llm_shards"].to_numpy()
            latency_s, byte_s = links.sync(dp, tp, shards)
            best, together, before_s, after_s = np.zeros((len(at), 1)), 0.0, 0.0, 0.0
            for stage in range(pp):
                chunks = kinds[stage::pp]
                if SHARDINGS[sharding].gathers:
                    passes = zip(links.passes("llm", tp, shards), (forward_s, backward_s), strict=True)
                    busy_s = count * sum(own.seconds({part: s[at] for part, s in of.items()}) for own, of in passes)
                else:
                    busy_s = count * sum(kind.total(part_s) for kind in chunks)[at]
                size = sum(costs.stage_parameter_bytes(kind) for kind in chunks)
                sync_s = 0.0 if is_frozen else (latency_s + size * byte_s)[:, None]
                best = np.maximum(best, before_s + busy_s + np.maximum(sync_s, after_s))
                together = together + busy_s + sync_s
                if stage == 0:
                    first_s = busy_s
                before_s = before_s + kinds[stage].total(least_forward_s)
                if not is_split:
                    after_s = after_s + kinds[stage].total(least_backward_s)
            bound_s[place] = np.maximum(best, chain_s[is_split])
            on_all = np.array([PLACEMENTS[name].uses_all_ranks for name in group["placement"]])
            shared_s[place] = np.where(on_all[:, None], together / pp, first_s)
    return bound_s[:, 0], shared_s[:, 0]


def _encoder_bounds(
    encoder: ModuleSpec,
    keys: pl.DataFrame,
    batches: Sequence[SampleShapes],
    costs: CostModel,
    links: LeastLinks,
    is_frozen: bool,
) -> dict[str, np.ndarray]:
    """The fields of `EncoderBounds` but the places, [num_keys, num_batches].

    Each sample's items go to the replica that has least, so that every replica has at least the mean less the largest
    sample (Graham 1969).
    """
    name = encoder.name
    items = [loads_of(name, shapes) for shapes in batches]
    total, largest = _over(items, np.sum), _over(items, np.max)
    alone_s, shared_s, least_s = (np.zeros((len(keys), len(batches))) for _ in range(3))
    for (tp, checkpointing), own in keys.group_by(f"{name}_tp", "checkpointing"):
        dp, count = (own[column].to_numpy()[:, None] for column in (f"{name}_dp", "num_microbatches"))
        place = own["place"].to_numpy()
        part_s, least_part_s = (
            _items_s(costs, name, tp, Loads(*(load / count for load in loads)), checkpointing, is_frozen)
            for loads in (
                [load / dp for load in total],
                # Squares of runs follow no rule for the least loaded replica, which is chosen by its items.
                [np.maximum(total.num_items / dp - largest.num_items, 0.0), *(0.0 * dp * load for load in total[1:])],
            )
        )
        for (pp,), group in own.with_row_index("at").group_by(f"{name}_pp"):
            at = group["at"].to_numpy()
            own_s, own_least_s = ({part: s[at] for part, s in of_part.items()} for of_part in (part_s, least_part_s))
            latency_s, byte_s = links.sync(dp[at, 0], tp, own[f"{name}_shards"].to_numpy()[at])
            for kind in stage_kinds(name, tp, even_layers(encoder.num_layers, pp), checkpointing=checkpointing):
                busy_s = count[at] * kind.total(own_s)
                size = costs.stage_parameter_bytes(kind)
                sync_s = 0.0 if is_frozen else (latency_s + size * byte_s)[:, None]
                alone_s[place[at]] = np.maximum(alone_s[place[at]], busy_s + sync_s)
                shared_s[place[at]] += busy_s
                least_s[place[at]] += count[at] * kind.total(own_least_s)
    return {"alone_s": alone_s, "shared_s": shared_s, "least_s": least_s}


def _items_s(
    costs: CostModel, encoder: str, tp: int, loads: Loads, checkpointing: bool, is_frozen: bool
) -> dict[str, np.ndarray]:
    """Seconds of each of the encoder's parts, without their constants: a replica that gets no item takes no time."""
    passes = costs.part_times(encoder, tp, loads, checkpointing=checkpointing)
    resting = costs.part_times(encoder, tp, Loads(*np.zeros((4, 1))), checkpointing=checkpointing)
    forward_s, backward_s = (
        {part: seconds[part] - const[part] for part in PARTS} for seconds, const in zip(passes, resting, strict=True)
    )
    return forward_s if is_frozen else {part: forward_s[part] + backward_s[part] for part in PARTS}


def _chain_s(costs: CostModel, whole: StageKind, loads: Loads, is_split: bool) -> float:
    """The way of the slowest sample through all layers and back; weights' gradients may be left for later."""
    forward_s, backward_s = costs.stage_time(whole, loads)
    return float((forward_s + (0.0 if is_split else 1.0) * backward_s).max())
