"""A tighter bound: the time that encoders add to the LLM's step, with media dealt among their replicas as in training.

Where encoders have ranks of their own, an LLM replica's first microbatch waits until its media are encoded, and after
its last backward the encoders still have theirs to do. The mean of these waits over the LLM's replicas adds to the step
of the LLM's mean replica (`LlmPipelines`), since a step is no shorter than that of any replica. Where encoders share
the LLM's ranks and encode all media first, no rank starts with the LLM before its own share is encoded. Then the least
such share adds to the step.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dflop.balance import Policy
from dflop.base.kernels import kernel
from dflop.costs import CostModel, Loads, StageKind, stage_kinds
from dflop.models import ModelSpec, ModuleSpec
from dflop.plan import PLACEMENTS, SHARDINGS
from dflop.plan.layout_key import LayoutKey
from dflop.plan.trained import TrainedSet
from dflop.schedule import starts_anew_in_microbatches
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.space import even_layers

__all__ = ["DealtMedia"]


class _Dealt(NamedTuple):
    """How an encoder's media are dealt: the loads of its replicas, [num_batches, dp, num_microbatches].

    For each batch and each of its samples with media, `encoder_cells` has the index of its (encoder replica,
    microbatch), and `llm_cells` that of its (LLM replica, microbatch).
    """

    loads: Loads
    encoder_cells: list[np.ndarray]
    llm_cells: list[np.ndarray]


class DealtMedia:
    """The least time that encoders add to the step of the LLM alone, for rows of the search space."""

    def __init__(
        self,
        spec: ModelSpec,
        costs: CostModel,
        batches: GroupedBatches,
        policy: Policy,
        trained: TrainedSet,
    ) -> None:
        self._spec, self._costs, self._batches = spec, costs, batches
        self._policy, self._trained = policy, trained.among(spec.modules)
        self._dealt = lru_cache(maxsize=64)(self._deal)
        self._waits_s = lru_cache(maxsize=4096)(self._least_waits_s)

    def adds_s(self, row: Mapping[str, Any], encoders_again: float, sync_s: float) -> np.ndarray | float:
        """Seconds that encoders add to the step of each batch, [num_batches]; 0 where nothing is certain.

        At least the share `encoders_again` of the layers of encoders that share ranks is recomputed. `sync_s` is the
        LLM's longest gradient sync, which runs beside the encoders' last backward.
        """
        placement = PLACEMENTS[row["placement"]]
        if not placement.has_bridges:
            return 0.0
        if not self._spec.encoders:
            return 0.0
        each = []
        for encoder in self._spec.encoders:
            starts_anew = starts_anew_in_microbatches(placement, gathers=self._gathers(row, encoder))
            dealt = row["llm_dp"], row["num_microbatches"], encoder.name, row[f"{encoder.name}_dp"], starts_anew
            if placement.shares_ranks:
                each.append(self._on_every_rank_s(row, encoder, self._dealt(*dealt).loads, encoders_again))
                continue
            layout = LayoutKey.of_row(row, f"{encoder.name}_")
            before_s, behind_s = self._waits_s(encoder, layout, dealt, self._all_meet(row, encoder))
            each.append(before_s + np.maximum(behind_s - sync_s, 0.0))
        return sum(each) if placement.shares_ranks else np.max(each, axis=0)

    def _gathers(self, row: Mapping[str, Any], encoder: ModuleSpec) -> bool:
        return SHARDINGS[row[f"{encoder.name}_sharding"]].gathers

    def _all_meet(self, row: Mapping[str, Any], encoder: ModuleSpec) -> bool:
        """Whether all replicas of the encoder share its parameters, and so wait for each other in every layer."""
        return self._gathers(row, encoder) and row[f"{encoder.name}_shards"] == row[f"{encoder.name}_dp"]

    def _deal(self, llm_dp: int, num_microbatches: int, encoder: str, dp: int, starts_anew: bool) -> _Dealt:
        """How an encoder's media are dealt among its `dp` replicas."""
        loads, encoder_cells, llm_cells = [], [], []
        for batch, shapes in enumerate(self._batches.shapes):
            grouped = self._policy, batch, llm_dp, num_microbatches
            rank, microbatch = self._batches.group(*grouped)
            encoder_rank = self._batches.encoder_rank(*grouped, encoder, dp, starts_anew)
            loads.append(self._batches.cells(*grouped, encoder, (dp, starts_anew)).loads)
            has_items = shapes.items_of(encoder) > 0
            encoder_cells.append((encoder_rank * num_microbatches + microbatch)[has_items])
            llm_cells.append((rank * num_microbatches + microbatch)[has_items])
        return _Dealt(Loads(*map(np.stack, zip(*loads, strict=True))), encoder_cells, llm_cells)

    def _on_every_rank_s(
        self, row: Mapping[str, Any], encoder: ModuleSpec, loads: Loads, encoders_again: float
    ) -> np.ndarray:
        """Seconds that the rank with the least work computes of this encoder, [num_batches]."""
        layers = even_layers(encoder.num_layers, row[f"{encoder.name}_pp"])
        recomputed = [int(encoders_again * count) for count in layers]
        layout = LayoutKey.of_row(row, f"{encoder.name}_")
        kinds = stage_kinds(encoder.name, layout, layers, recomputed, self._trained)
        least_s = np.full(len(loads.num_items), np.inf)
        for forward_s, backward_s in self._costs.stage_times(kinds, loads):
            seconds = forward_s + backward_s
            if self._all_meet(row, encoder):
                least_s = np.minimum(least_s, seconds.max(axis=1).sum(axis=1))
            else:
                least_s = np.minimum(least_s, seconds.sum(axis=2).min(axis=1))
        return least_s

    def _least_waits_s(
        self, encoder: ModuleSpec, layout: LayoutKey, how: tuple[int, int, str, int, bool], all_meet: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """The least seconds before an LLM replica's first forward and after its last backward, as means over the
        replicas, [num_batches] each. `how` are the arguments of `_deal`.

        Any microbatch may be the first or the last, so the one with the shortest wait counts.
        """
        (dp, count, *_), dealt = how, self._dealt(*how)
        whole = StageKind.whole(encoder.name, layout, encoder.num_layers, trained=self._trained)
        passes = self._costs.stage_time(whole, dealt.loads)
        if all_meet:
            passes = tuple(np.broadcast_to(of_pass.max(axis=1, keepdims=True), of_pass.shape) for of_pass in passes)
        least_s = []
        for of_pass in passes:
            waits_s = np.zeros((len(of_pass), dp * count))
            for batch, seconds in enumerate(of_pass.reshape(len(of_pass), -1)):
                _wait_for(waits_s[batch], dealt.llm_cells[batch], seconds, dealt.encoder_cells[batch])
            least_s.append(waits_s.reshape(-1, dp, count).mean(axis=1).min(axis=1))
        return least_s[0], least_s[1]


@kernel
def _wait_for(waits_s, llm_cells, seconds, encoder_cells):
    """Raise each LLM cell's entry in `waits_s` to the longest `seconds` of the encoder cells of its samples."""
    for sample in range(len(llm_cells)):
        cell = llm_cells[sample]
        waits_s[cell] = max(waits_s[cell], seconds[encoder_cells[sample]])
