"""A tighter bound: the LLM's pipeline simulated with one replica that holds the mean of all.

A step time is a maximum of sums of durations, so it is convex in them, and durations are convex in loads. The mean
replica's step is therefore not above the mean of the replicas' steps (Jensen), and that not above the slowest
one's. Unlike `bounds` it knows how the batch is grouped, and so what first and last microbatches hold.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from dflop.config import Config
from dflop.costs import CostModel, Loads, ShardedPass, StageKind, stage_kinds
from dflop.models import ModelSpec
from dflop.parallelism import DISJOINT, PLACEMENTS, SCHEDULES, SHARDINGS, Grid, Plan
from dflop.pipeline import Bridges, CompiledPlan, StageTimes, compile_plan, simulate_step_s
from dflop.planning.grouped_batches import GroupedBatches
from dflop.planning.least_links import LeastLinks, possible_scopes
from dflop.planning.space import Splits, llm_layers
from dflop.pricing import BYTES_PER_VALUE, WEIGHT_SHARE, find_link

__all__ = ["MeanPipelines"]


class MeanPipelines:
    """The LLM alone, of rows of the search space: of the mean batch, or of each."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        costs: CostModel,
        batches: GroupedBatches,
        splits: Splits,
        links: LeastLinks,
        grouping: str,
    ) -> None:
        self._num_layers = spec.module("llm").num_layers
        self._trained_encoders = [own.name for own in spec.encoders if own.name not in config.model.freeze]
        self._cluster, self._frozen = config.cluster, frozenset(config.model.freeze)
        self.token_bytes = spec.module("llm").hidden_size * BYTES_PER_VALUE[config.train.precision]
        self._costs, self._batches, self._splits, self._grouping = costs, batches, splits, grouping
        self._links = links
        self._passes = lru_cache(maxsize=1024)(self._sharded_passes)
        self._parameter_bytes = lru_cache(maxsize=4096)(self._stage_parameter_bytes)
        self._compiled = lru_cache(maxsize=4096)(_compile)
        self._text = lru_cache(maxsize=1024)(self._mean_text)
        self._parts = lru_cache(maxsize=1024)(self._part_times)
        self._kinds = lru_cache(maxsize=1024)(_distinct_kinds)
        self._best_link = lru_cache(maxsize=4096)(self._least_link)

    def of_batches(self, row: Mapping[str, Any], *, mean: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Of each batch the LLM's part of the step [num_batches], and what each pipeline rank works [num_batches, pp],
        gradient sync and all. `mean`: of the mean batch alone, [1] and [1, pp], whose step is not above the mean of the
        batches' steps, by Jensen once more."""
        tp, pp, dp = row["llm_tp"], row["llm_pp"], row["llm_dp"]
        count = row["num_microbatches"]
        layers = llm_layers(row, self._splits, self._num_layers)
        of_parts = self._parts(tp, dp, count, row["checkpointing"], mean)
        if SHARDINGS[row["llm_sharding"]].gathers:
            passes = zip(self._passes(tp, row["llm_shards"]), of_parts, strict=True)
            forward_s, backward_s = (own.seconds(of_part)[:, None] for own, of_part in passes)
        else:
            kinds, places = self._kinds(tp, layers, row["checkpointing"])
            forward_s, backward_s = (
                np.stack([kind.total(of_part) for kind in kinds], axis=1).take(places, axis=1) for of_part in of_parts
            )
        splits_backward = SCHEDULES[row["schedule"]].splits_backward
        # Of a frozen module no weights have a gradient, and its backward is not split.
        weight_share = WEIGHT_SHARE if "llm" not in self._frozen else 0.0
        sync_s = self._sync_s(row, layers)
        chain_s = self._chain_s(tp, dp, count, mean, forward_s.shape)
        num_before = self.num_before(row)
        compiled = self._compiled(pp, count, row["schedule"], row["num_chunks"], num_before)
        times = StageTimes(
            forward_s=_behind(num_before, forward_s),
            backward_s=_behind(num_before, backward_s),
            weight_s=_behind(num_before, backward_s * weight_share) if splits_backward else None,
            chain_s=_behind(num_before, chain_s),
            bridges=Bridges.none(),
            sync_s=np.concatenate([np.zeros(num_before), sync_s]),
        )
        step_s = simulate_step_s(compiled, times)
        of_stages = (forward_s + backward_s).sum(axis=2) + sync_s
        return step_s, of_stages.reshape(len(of_stages), row["num_chunks"], pp).sum(axis=1)

    def num_before(self, row: Mapping[str, Any]) -> int:
        """Encoder stages that the LLM's order depends on: the gradients of its weights are put off for them."""
        if not SCHEDULES[row["schedule"]].splits_backward or PLACEMENTS[row["placement"]].shares_ranks:
            return 0
        return max((row[f"{encoder}_pp"] for encoder in self._trained_encoders), default=0)

    def _chain_s(self, tp: int, dp: int, num_microbatches: int, mean: bool, shape: tuple[int, ...]) -> np.ndarray:
        """From stage to stage, on the best of the links that may lie between: the least latency of any and the most
        bandwidth, for the faster link itself would be concave in the bytes, and Jensen's way would not hold."""
        latency_s, bytes_per_s = self._best_link(dp * tp)
        num_bytes = self._text(dp, num_microbatches, mean).num_tokens * self.token_bytes
        return np.repeat((latency_s + num_bytes / bytes_per_s)[:, None], shape[1], axis=1)

    def _least_link(self, num_ranks: int) -> tuple[float, float]:
        links = [
            find_link(self._costs.links, self._cluster, "p2p", is_intra)
            for is_intra in possible_scopes(self._cluster, num_ranks)
        ]
        return min(link.latency_s for link in links), max(link.bytes_per_s for link in links)

    def _sharded_passes(self, tp: int, shards: int) -> tuple[ShardedPass, ShardedPass]:
        return self._links.passes("llm", tp, np.array([shards]))

    def _sync_s(self, row: Mapping[str, Any], layers: tuple[int, ...]) -> np.ndarray:
        """Gradient sync of each stage, [num_stages]."""
        if "llm" in self._frozen:
            return np.zeros(len(layers))
        latency_s, byte_s = self._links.of_row(row, "llm")
        return latency_s + self._parameter_bytes(row["llm_tp"], layers) * byte_s

    def _stage_parameter_bytes(self, tp: int, layers: tuple[int, ...]) -> np.ndarray:
        return np.array([self._costs.stage_parameter_bytes(kind) for kind in stage_kinds("llm", tp, layers)])

    def _mean_text(self, dp: int, num_microbatches: int, mean: bool) -> Loads:
        """Of the mean replica, [num_batches, num_microbatches]."""
        text = self._batches.mean_text(self._grouping, dp, num_microbatches)
        return Loads(*(load.mean(axis=0, keepdims=True) for load in text)) if mean else text

    def _part_times(
        self, tp: int, dp: int, num_microbatches: int, checkpointing: bool, mean: bool
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Forward and backward of the LLM's parts on the mean replica, [num_batches, num_microbatches]."""
        text = self._text(dp, num_microbatches, mean)
        return self._costs.part_times("llm", tp, text, checkpointing=checkpointing)


def _distinct_kinds(tp: int, layers: tuple[int, ...], checkpointing: bool) -> tuple[list[StageKind], np.ndarray]:
    """The different kinds of the LLM's stages, and which of them each stage is, [num_stages]."""
    kinds = stage_kinds("llm", tp, layers, checkpointing=checkpointing)
    distinct = list(dict.fromkeys(kinds))
    return distinct, np.array([distinct.index(kind) for kind in kinds])


def _behind(num_before: int, seconds: np.ndarray) -> np.ndarray:
    """The stages' times behind those of an encoder that takes none, [num_batches, num_nodes, num_microbatches]."""
    if not num_before:
        return seconds
    num_batches, num_nodes, num_microbatches = seconds.shape
    behind = np.zeros((num_batches, num_before + num_nodes, num_microbatches))
    behind[:, num_before:] = seconds
    return behind


def _compile(pp: int, num_microbatches: int, schedule: str, num_chunks: int, num_before: int) -> CompiledPlan:
    encoders = (Grid(module="encoder", num_ranks=num_before, pp=num_before),) if num_before else ()
    return compile_plan(
        Plan(
            placement=DISJOINT.name,
            grids=(*encoders, Grid(module="llm", num_ranks=pp, pp=pp, rank_offset=num_before)),
            num_microbatches=num_microbatches,
            schedule=schedule,
            num_chunks=num_chunks,
        )
    )
