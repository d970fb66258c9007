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
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.pipeline import Bridges, CompiledPlan, Grid, Plan, StageTimes, compile_plan, simulate_step_s, split_layers
from dflop.planning.batches import GroupedBatches
from dflop.planning.bounds import least_sync
from dflop.planning.space import Splits
from dflop.scheduling import BYTES_PER_VALUE, WEIGHT_SHARE, find_link

__all__ = ["MeanPipelines"]

_PARTS = ("stage", "layer", "first", "last")


class MeanPipelines:
    """`step_s(row)` of rows of the search space."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        costs: CostModel,
        batches: GroupedBatches,
        splits: Splits,
        grouping: str,
    ) -> None:
        self._num_layers = spec.module("llm").num_layers
        self._cluster, self._frozen = config.cluster, frozenset(config.model.freeze)
        self.token_bytes = spec.module("llm").hidden_size * BYTES_PER_VALUE[config.train.precision]
        self._costs, self._batches, self._splits, self._grouping = costs, batches, splits, grouping
        self._least_sync = lru_cache(maxsize=4096)(lambda dp, tp: least_sync(costs, config.cluster, np.array([dp]), tp))
        self._parameter_bytes = lru_cache(maxsize=4096)(self._stage_parameter_bytes)
        self._compiled = lru_cache(maxsize=4096)(_compile)
        self._text = lru_cache(maxsize=1024)(lambda dp, count: batches.mean_text(grouping, dp, count))
        self._parts = lru_cache(maxsize=1024)(self._part_times)

    def step_s(self, row: Mapping[str, Any]) -> float:
        """Seconds of the LLM's part of the mean batch's step, without waiting for an encoder."""
        tp, pp, dp = row["llm_tp"], row["llm_pp"], row["llm_dp"]
        count, num_stages = row["num_microbatches"], pp * row["num_chunks"]
        parts = self._parts(tp, dp, count, row["checkpointing"])
        layers = np.array(
            self._splits[tp, pp]
            if row["balanced"]
            else [len(part) for part in split_layers(self._num_layers, num_stages)]
        )
        forward_s, backward_s = (parts["stage"][way] + layers[:, None] * parts["layer"][way] for way in (0, 1))
        for way, seconds in enumerate((forward_s, backward_s)):
            seconds[0] += parts["first"][way]
            seconds[-1] += parts["last"][way]
        text = self._text(dp, count)
        to_next = [
            find_link(self._costs.links, self._cluster, "p2p", is_intra)
            for is_intra in {False, dp * tp < self._cluster.devices_per_node}
        ]
        chain_s = np.minimum.reduce([link.seconds(text.num_tokens * self.token_bytes) for link in to_next])
        times = StageTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=WEIGHT_SHARE * backward_s if row["schedule"] == "zb_h1" else None,
            chain_s=np.broadcast_to(chain_s, forward_s.shape).copy() if pp > 1 else np.zeros_like(forward_s),
            bridges=Bridges.none(),
            sync_s=self._sync_s(tp, dp, tuple(layers.tolist())),
        )
        return simulate_step_s(self._compiled(pp, count, row["schedule"], row["num_chunks"]), times)

    def _sync_s(self, tp: int, dp: int, layers: tuple[int, ...]) -> np.ndarray:
        """Gradient sync of each stage, [num_stages]."""
        if "llm" in self._frozen:
            return np.zeros(len(layers))
        (latency_s,), (byte_s,) = self._least_sync(dp, tp)
        return latency_s + self._parameter_bytes(tp, layers) * byte_s

    def _stage_parameter_bytes(self, tp: int, layers: tuple[int, ...]) -> np.ndarray:
        ends = [{"is_first": stage == 0, "is_last": stage == len(layers) - 1} for stage in range(len(layers))]
        return np.array(
            [
                self._costs.stage_parameter_bytes("llm", tp, count, **own)
                for count, own in zip(layers, ends, strict=True)
            ]
        )

    def _part_times(
        self, tp: int, dp: int, num_microbatches: int, checkpointing: bool
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Forward and backward of the mean replica on the mean batch, [num_microbatches]."""
        text = self._text(dp, num_microbatches)
        return {part: self._costs.part_time("llm", tp, part, text, checkpointing=checkpointing) for part in _PARTS}


def _compile(pp: int, num_microbatches: int, schedule: str, num_chunks: int) -> CompiledPlan:
    return compile_plan(
        Plan(
            placement="disjoint",
            grids=(Grid(module="llm", num_ranks=pp, pp=pp),),
            num_microbatches=num_microbatches,
            schedule=schedule,
            num_chunks=num_chunks,
        )
    )
