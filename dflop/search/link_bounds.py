"""Lower bounds of transfer times among a module's replicas, wherever in the cluster their ranks are.

They are for bounds of rows of the search space, which do not say where ranks are.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from dflop.config import ClusterConfig
from dflop.costs import (
    PARTS,
    CostModel,
    Moving,
    ShardedPass,
    StageKind,
    hidden_sync_shares,
    sharded_passes,
    sync_bytes,
)
from dflop.models import ModelSpec
from dflop.plan.layout_key import LayoutKey
from dflop.plan.trained import TrainedSet
from dflop.schedule import find_link

__all__ = ["LeastLinks", "possible_scopes"]


def possible_scopes(cluster: ClusterConfig, distance: int) -> set[bool]:
    """Whether two ranks at this distance may be in one node (True), in two (False), or both are possible."""
    return {distance < cluster.devices_per_node, cluster.num_nodes == 1}


class LeastLinks:
    """Least times of gradient syncs and sharded passes; one value of a parameter takes `value_bytes`."""

    def __init__(
        self, costs: CostModel, spec: ModelSpec, cluster: ClusterConfig, trained: TrainedSet, value_bytes: int
    ) -> None:
        self._costs, self._spec, self._cluster = costs, spec, cluster
        self.trained, self.value_bytes = trained.among(spec.modules), value_bytes
        self._least = lru_cache(maxsize=4096)(self._least_link)
        self._hidden = lru_cache(maxsize=4096)(self._hidden_shares)
        self._syncs = lru_cache(maxsize=4096)(self._one_sync)

    def sync(self, dp: np.ndarray, layout: LayoutKey, shards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The least latency of a gradient sync, and its seconds for each byte of fp32 parameters, [num_rows] each.

        There are `dp` [num_rows] replicas with this layout. Groups of `shards` [num_rows] replicas share a copy of
        the parameters; only the copies are synced.
        """
        each = [
            self._least(int(all_ // count), int(count) * layout.num_ranks)
            for all_, count in zip(dp, shards, strict=True)
        ]
        latency_s, byte_s = np.array(each).reshape(-1, 2).T
        return latency_s, sync_bytes(byte_s / shards, value_bytes=self.value_bytes, num_shards=shards)

    def hidden_shares(self, kind: StageKind, shards: np.ndarray) -> np.ndarray:
        """The shares of a stage's gradient sync that may run beside its last backward, and beside its first forward,
        [2, num_rows]; zeros where devices do not compute while they communicate."""
        alone, shared = self._hidden(kind)
        return np.where(shards > 1, shared[:, None], alone[:, None])

    def _hidden_shares(self, kind: StageKind) -> tuple[np.ndarray, np.ndarray]:
        """`hidden_shares` of replicas that do not share parameters, and of others, [2] each."""
        if not self._cluster.hides_transfers:
            return np.zeros(2), np.zeros(2)
        how = {"value_bytes": self.value_bytes, "num_shards": np.array([1, 2])}
        return tuple(np.array(hidden_sync_shares(self._costs, kind, **how)).T)

    def passes(
        self,
        module: str,
        layout: LayoutKey,
        shards: np.ndarray,
        num_recomputed: int = 0,
        num_attention_kept: int = 0,
    ) -> tuple[ShardedPass, ShardedPass]:
        """Forward and backward where groups of `shards` [num_rows] replicas share a copy of the parameters.

        The first `num_recomputed` layers are recomputed, the last `num_attention_kept` of them but for attention.
        Seconds of transfers are [num_rows, 1].
        """
        each = [self._least(int(count), layout.num_ranks) for count in shards]
        latency_s, byte_s = np.array(each).reshape(-1, 2, 1).transpose(1, 0, 2)
        sizes = {part: self._costs.parameter_bytes[module, layout, part] for part in PARTS}
        num_layers = self._spec.module(module).num_layers
        how = {"num_recomputed": num_recomputed, "num_attention_kept": num_attention_kept}
        whole = StageKind.whole(module, layout, num_layers, **how, trained=self.trained)
        trained_bytes = self._costs.trained_bytes(whole)
        moving = Moving.over(sizes, latency_s, byte_s, value_bytes=self.value_bytes, trained_bytes=trained_bytes)
        return sharded_passes(whole, moving, is_hidden=self._cluster.hides_transfers)

    def of_row(self, row: Mapping[str, Any], module: str) -> tuple[float, float]:
        """`sync` for a row of the search space."""
        return self._syncs(row[f"{module}_dp"], LayoutKey.of_row(row, f"{module}_"), row[f"{module}_shards"])

    def _one_sync(self, dp: int, layout: LayoutKey, shards: int) -> tuple[float, float]:
        (latency_s,), (byte_s,) = self.sync(np.array([dp]), layout, np.array([shards]))
        return float(latency_s), float(byte_s)

    def _least_link(self, num_ranks: int, step: int) -> tuple[float, float]:
        """Least latency, and seconds for each byte, among `num_ranks` ranks, each `step` ranks after the one before."""
        if num_ranks == 1:
            return 0.0, 0.0
        most_in_node = -(-self._cluster.devices_per_node // step)
        num_cards = num_ranks // max(2, -(-num_ranks // most_in_node))
        links = [
            find_link(self._costs.links, self._cluster, "gradient_sync", is_intra, num_ranks, num_cards)
            for is_intra in possible_scopes(self._cluster, (num_ranks - 1) * step)
        ]
        return min(link.latency_s for link in links), 1 / max(link.bytes_per_s for link in links)
