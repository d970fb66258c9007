"""Tighter bounds: the LLM's pipeline simulated with one replica that holds the mean of all, or with the fullest.

A step time is a maximum of sums of durations, so it is convex in them, and durations are convex in loads. The mean
replica's step is therefore not above the mean of the replicas' steps (Jensen), which is not above the slowest one's.
Unlike `step_bounds`, this bound uses how the batch is grouped, and so the loads of the first and last microbatches.

The step is also not shorter than the fullest replica's. Where replicas meet in every layer, as eight that share
parameters do, it is not shorter than the fullest group's. This bound is mostly the tighter one, but the mean time that
replicas wait for encoders does not add to it: the fullest replica may wait less.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np

from dflop.balance import Policy
from dflop.config import Config
from dflop.costs import ALL_PARTS, KEPT_PARTS, CostModel, Loads, ShardedPass, StageKind, stage_kinds
from dflop.models import ModelSpec
from dflop.plan import DISJOINT, PLACEMENTS, SHARDINGS, Grid, Plan
from dflop.plan.layout_key import LayoutKey
from dflop.plan.trained import TrainedSet
from dflop.schedule import BYTES_PER_VALUE, find_link
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.levels import Recomputed
from dflop.search.link_bounds import LeastLinks, possible_scopes
from dflop.search.space import Splits, llm_layers
from dflop.step import Bridges, CompiledPlan, StageTimes, compile_plan, simulate_step_s

__all__ = ["LlmPipelines", "Of"]

# How many samples' loads are kept, of all ways in which samples were dealt among replicas.
_MOST_SAMPLES_KEPT, _LEAST_KEPT = 2**20, 8
# The replica whose pipeline is simulated.
Of = Literal["mean batch", "mean replica", "fullest replica"]


class LlmPipelines:
    """The pipeline of the LLM alone, for rows of the search space: of the mean replica, on the mean batch or on each
    batch, or of each batch's fullest replica."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        costs: CostModel,
        batches: GroupedBatches,
        splits: Splits,
        links: LeastLinks,
        policy: Policy,
    ) -> None:
        self._num_layers = spec.module("llm").num_layers
        self._num_encoders = len(spec.encoders)
        self._cluster, self._trained = config.cluster, links.trained
        self.token_bytes = spec.module("llm").hidden_size * BYTES_PER_VALUE[config.train.precision]
        self._costs, self._batches, self._splits, self._policy = costs, batches, splits, policy
        self._links = links
        self._passes = lru_cache(maxsize=1024)(self._sharded_passes)
        self._trained_bytes = lru_cache(maxsize=4096)(self._stage_trained_bytes)
        self._compiled = lru_cache(maxsize=4096)(_compile)
        self._text = lru_cache(maxsize=1024)(self._mean_loads)
        self._parts = lru_cache(maxsize=1024)(self._part_times)
        # Those of all replicas have as many values as a batch has samples.
        most_kept = max(_LEAST_KEPT, _MOST_SAMPLES_KEPT // sum(map(len, batches.shapes)))
        self._all_parts = lru_cache(maxsize=most_kept)(self._part_times)
        self._kinds = lru_cache(maxsize=1024)(partial(_distinct_kinds, self._trained))
        self._shares = lru_cache(maxsize=4096)(self._hidden_shares)
        self._best_link = lru_cache(maxsize=4096)(self._least_link)

    def of_batches(
        self, row: Mapping[str, Any], recomputed: Recomputed, of: Of = "mean replica"
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each batch, the seconds of the LLM's step, [num_batches], and of each pipeline rank's work with what does
        not hide of its gradient sync, [num_batches, pp].

        Those of the "mean batch", [1] and [1, pp], have a step that is not above the mean of the batches' steps, by
        Jensen once more.
        """
        layout, pp, dp = LayoutKey.of_row(row, "llm_"), row["llm_pp"], row["llm_dp"]
        count, gathers = row["num_microbatches"], SHARDINGS[row["llm_sharding"]].gathers
        layers = llm_layers(row, self._splits, self._num_layers)
        parts = self._all_parts if of == "fullest replica" else self._parts
        of_parts, tokens = parts(layout, dp, count, any(recomputed.layers), of)
        kinds, places = self._kinds(layout, layers, recomputed)
        if gathers:
            passes = zip(self._passes(layout, row["llm_shards"], *recomputed), of_parts, strict=True)
            of_passes = [sharded.seconds(of_part)[:, None] for sharded, of_part in passes]
        else:
            forward_s, backward_s = of_parts
            of_passes = [
                np.stack([kind.total(forward_s) for kind in kinds], axis=1),
                np.stack([kind.total(backward_s, kind.parts_with_backward) for kind in kinds], axis=1),
            ]
        if of == "fullest replica":
            # A microbatch without tokens takes no time, as prices have it.
            of_passes = [np.where(tokens[:, None] > 0, seconds, 0.0) for seconds in of_passes]
            num_meeting = max(row["llm_shards"] if gathers else 1, row.get("llm_cp", 1))
            *of_passes, tokens = _of_fullest(*of_passes, tokens[:, None], len(self._batches), num_meeting)
            tokens = tokens[:, 0]
        forward_s, backward_s = (seconds.take(places, axis=1) for seconds in of_passes)
        sync_s = self._sync_s(row, layers)
        early_s, late_s = sync_s * self._shares(layout, row["llm_shards"], layers)
        rest_s = sync_s - early_s - late_s
        placement = PLACEMENTS[row["placement"]]
        if self._num_encoders and placement.has_bridges:
            # The late parts may run beside the encoders' forward, for which the LLM waits, too, and on ranks that first
            # encode everything the early parts may run beside the encoders' backward.
            sync_s, late_s = sync_s - late_s, 0.0 * late_s
            if placement.encodes_all_first:
                sync_s, early_s = rest_s, 0.0 * early_s
        compiled = self._compiled(pp, count, row["schedule"], row["num_chunks"])
        times = StageTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            chain_s=self._chain_s(dp * layout.num_ranks, tokens, len(layers)),
            bridges=Bridges.none(),
            sync_s=sync_s,
            early_sync_s=early_s,
            late_sync_s=late_s,
        )
        step_s = simulate_step_s(compiled, times)
        of_stages = (forward_s + backward_s).sum(axis=2) + rest_s
        return step_s, of_stages.reshape(len(of_stages), row["num_chunks"], pp).sum(axis=1)

    def _chain_s(self, num_ranks: int, tokens: np.ndarray, num_stages: int) -> np.ndarray:
        """Seconds of transfers of `tokens` [num_batches, num_microbatches] between stages of `num_ranks` ranks each, as
        a lower bound over the links that may be between them.

        The bound takes the least latency and the largest bandwidth of all these links. The minimum over the links would
        be concave in the bytes, and Jensen's inequality would not hold.
        """
        latency_s, bytes_per_s = self._best_link(num_ranks)
        return np.repeat((latency_s + tokens * self.token_bytes / bytes_per_s)[:, None], num_stages, axis=1)

    def _least_link(self, num_ranks: int) -> tuple[float, float]:
        links = [
            find_link(self._costs.links, self._cluster, "p2p", is_intra)
            for is_intra in possible_scopes(self._cluster, num_ranks)
        ]
        return min(link.latency_s for link in links), max(link.bytes_per_s for link in links)

    def _sharded_passes(
        self, layout: LayoutKey, shards: int, recomputed: tuple[int, ...], attention_kept: tuple[int, ...]
    ) -> tuple[ShardedPass, ShardedPass]:
        return self._links.passes("llm", layout, np.array([shards]), recomputed[0], attention_kept[0])

    def sync_s(self, row: Mapping[str, Any], layers: tuple[int, ...]) -> float:
        """Seconds of the longest gradient sync of the LLM's stages."""
        return float(self._sync_s(row, layers).max())

    def _sync_s(self, row: Mapping[str, Any], layers: tuple[int, ...]) -> np.ndarray:
        """Seconds of each stage's gradient sync, [num_stages]."""
        if not self._trained.trains("llm"):
            return np.zeros(len(layers))
        latency_s, byte_s = self._links.of_row(row, "llm")
        trained_bytes = self._trained_bytes(LayoutKey.of_row(row, "llm_"), layers)
        return (latency_s + trained_bytes * byte_s) * (trained_bytes > 0)

    def _hidden_shares(self, layout: LayoutKey, shards: int, layers: tuple[int, ...]) -> np.ndarray:
        """`LeastLinks.hidden_shares` of each stage, [2, num_stages]."""
        kinds, places = self._kinds(layout, layers, Recomputed.whole((0,) * len(layers)))
        return np.column_stack([self._links.hidden_shares(kind, np.array([shards])) for kind in kinds])[:, places]

    def _stage_trained_bytes(self, layout: LayoutKey, layers: tuple[int, ...]) -> np.ndarray:
        kinds = stage_kinds("llm", layout, layers, (), self._trained)
        return np.array([self._costs.trained_and_frozen_bytes(kind)[0] for kind in kinds])

    def _mean_loads(self, dp: int, num_microbatches: int, of: Literal["mean batch", "mean replica"]) -> Loads:
        """The LLM's loads on the mean replica, [num_batches, num_microbatches], or on that of the mean batch,
        [1, num_microbatches]."""
        if of == "mean replica":
            return self._batches.mean_text(self._policy, dp, num_microbatches)
        return Loads(*(load.mean(axis=0, keepdims=True) for load in self._text(dp, num_microbatches, "mean replica")))

    def _loads(self, dp: int, num_microbatches: int, of: Of) -> Loads:
        """`_mean_loads`, or those of all replicas, among which the fullest is, [num_batches * dp, num_microbatches]."""
        if of != "fullest replica":
            return self._text(dp, num_microbatches, of)
        batches = range(len(self._batches))
        each = [self._batches.cells(self._policy, batch, dp, num_microbatches, "llm").loads for batch in batches]
        return Loads(*map(np.concatenate, zip(*each, strict=True)))

    def _part_times(
        self, layout: LayoutKey, dp: int, num_microbatches: int, recomputes: bool, of: Of
    ) -> tuple[tuple[dict[str, np.ndarray], dict[str, np.ndarray]], np.ndarray]:
        """Forward and backward seconds of the LLM's parts with the loads of `_loads`, and its tokens."""
        loads = self._loads(dp, num_microbatches, of)
        times = self._costs.part_times("llm", layout, loads, ALL_PARTS if recomputes else KEPT_PARTS)
        return times, loads.num_tokens


def _distinct_kinds(
    trained: TrainedSet, layout: LayoutKey, layers: tuple[int, ...], recomputed: Recomputed
) -> tuple[list[StageKind], np.ndarray]:
    """The distinct kinds of the LLM's stages, and the index of each stage's kind, [num_stages]."""
    kinds = stage_kinds("llm", layout, layers, recomputed.layers, trained, recomputed.attention_kept)
    distinct = list(dict.fromkeys(kinds))
    return distinct, np.array([distinct.index(kind) for kind in kinds])


def _of_fullest(
    forward_s: np.ndarray, backward_s: np.ndarray, tokens: np.ndarray, num_batches: int, num_meeting: int
) -> list[np.ndarray]:
    """The largest values of each microbatch among the `num_meeting` neighbouring replicas that take longest.

    Arrays are [num_batches * dp, num_kinds or 1, num_microbatches]; the results' first axis is [num_batches].
    """
    each = [
        values.reshape(num_batches, -1, num_meeting, *values.shape[1:]).max(axis=2)
        for values in (forward_s, backward_s, tokens)
    ]
    fullest = (each[0] + each[1]).sum(axis=(2, 3)).argmax(axis=1)
    return [values[np.arange(num_batches), fullest] for values in each]


def _compile(pp: int, num_microbatches: int, schedule: str, num_chunks: int) -> CompiledPlan:
    return compile_plan(
        Plan(
            placement=DISJOINT.name,
            grids=(Grid(module="llm", num_ranks=pp, pp=pp),),
            num_microbatches=num_microbatches,
            schedule=schedule,
            num_chunks=num_chunks,
        )
    )
