"""Lower bounds of a row of the search space before it is priced: of its memory and of its step time.

Values for the LLM alone are computed once for all rows with the same layout of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from dflop.models import ModelSpec
from dflop.plan import PLACEMENTS, Plan
from dflop.search.encoder_bounds import DealtMedia
from dflop.search.levels import Recomputed, of_stages
from dflop.search.memory_bounds import LeastMemory
from dflop.search.pipeline_bounds import LlmPipelines, Of
from dflop.search.space import Splits, llm_layers, plan_of
from dflop.search.step_bounds import LowerBounds

__all__ = ["MARGIN", "Row", "RowBounds"]

# Bounds are summed in another order than prices, so rounding can put a bound above the price, or above the bytes. With
# this margin such a plan is not dropped.
MARGIN = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Row:
    """A row by its number in the table, with its values.

    `choices` say whether its plan may recompute no layers (False) or all (True); with both, also any number between.
    `layers` is the number of layers in each of the LLM's stages, and `recomputed` what of them has to be recomputed at
    least. `encoders_again` is the least share of the encoders' layers that has to be recomputed.
    """

    number: int
    values: dict[str, Any]
    choices: tuple[bool, ...]
    layers: tuple[int, ...]
    recomputed: Recomputed
    encoders_again: float = 0.0

    def with_all(self, recomputes: bool) -> "Row":
        """The row whose plan recomputes all layers, or none."""
        recomputed = Recomputed.whole(self.layers if recomputes else (0,) * len(self.layers))
        return replace(self, choices=(recomputes,), recomputed=recomputed, encoders_again=float(recomputes))


class RowBounds:
    """Bounds of rows, on devices with `limit_bytes` of memory; `pinned` is `plan.fixed.checkpointing`."""

    def __init__(
        self,
        rows: pl.DataFrame,
        splits: Splits,
        num_layers: int,
        bounds: LowerBounds,
        pipelines: LlmPipelines,
        media: DealtMedia,
        memory: LeastMemory,
        *,
        limit_bytes: float,
        pinned: bool | None,
    ) -> None:
        self._rows, self._columns = rows, rows.columns  # polars makes a new list at each access
        self._splits, self._num_layers = splits, num_layers
        self._bounds, self._pipelines, self._media, self._memory = bounds, pipelines, media, memory
        self._limit_bytes, self._pinned = limit_bytes * MARGIN, pinned
        self._grid_place = bounds.grid_place.tolist()
        # The rows by `llm_place`, and where those of each begin and end.
        self._by_llm_place = np.argsort(bounds.llm_place, kind="stable")
        self._place_ends = np.concatenate([[0], np.cumsum(np.bincount(bounds.llm_place))])
        self._plain_means_s = np.full(len(rows), np.nan)
        # What was computed, by its name and by all of a row that it depends on: of the LLM alone, on `grid_place`.
        self._known: dict[tuple, Any] = {}

    def row(self, number: int) -> Row:
        """The row with this number, with the layers that have to be recomputed so that the LLM alone fits."""
        values = dict(zip(self._columns, self._rows.row(number), strict=True))
        key = "llm", self._grid_place[number]
        return Row(number, values, *self._once(key, lambda: self._look_at_llm(number, values)))

    def plain_mean_s(self, number: int) -> float:
        """`mean_s` as if no layer had to be recomputed, which takes much less time: computed at once for all rows with
        the same LLM and placement."""
        if np.isnan(self._plain_means_s[number]):
            values = dict(zip(self._columns, self._rows.row(number), strict=True))
            layers = llm_layers(values, self._splits, self._num_layers)
            row = Row(number, values, (False,), layers, Recomputed.whole((0,) * len(layers)))
            place = self._bounds.llm_place[number]
            alike = self._by_llm_place[self._place_ends[place] : self._place_ends[place + 1]]
            (bounds_s,) = self._bounds.of_pipeline(alike, *self._pipeline(row, "mean batch")).T
            self._plain_means_s[alike] = bounds_s
        return float(self._plain_means_s[number])

    def _once(self, key: tuple, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, which is called once for each key."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def _look_at_llm(self, number: int, values: dict[str, Any]) -> tuple[tuple[bool, ...], tuple[int, ...], Recomputed]:
        """The row's choices, its LLM's layers, and what of them has to be recomputed at least."""
        layers = llm_layers(values, self._splits, self._num_layers)
        nothing = Recomputed.whole((0,) * len(layers))
        if self._pinned is not None:
            return (self._pinned,), layers, Recomputed.whole(layers) if self._pinned else nothing
        row = Row(number, values, (False, True), layers, nothing)
        if self.llm_bytes(row, False) <= self._limit_bytes or self.llm_bytes(row, True) > self._limit_bytes:
            return row.choices, layers, nothing
        return row.choices, layers, self._memory.least_recomputed(values, self._limit_bytes, self._ends(row))

    def llm_bytes(self, row: Row, recomputes: bool) -> float:
        """The least bytes of a device for the LLM alone, with all layers recomputed or none."""
        key = "most bytes", self._grid_place[row.number], recomputes
        return self._once(key, lambda: self._memory.costs.held_bytes(float(self._of_llm(row, recomputes).max())))

    def device_bytes(self, row: Row, recomputes: bool) -> float:
        """The least bytes of a device for all its modules, with all layers recomputed or none."""
        return self._memory.least_bytes(row.values, self._of_llm(row, recomputes), recomputes=recomputes)

    def recomputing(self, row: Row) -> Row:
        """The row with the layers that have to be recomputed, when its plan without recomputed layers does not fit.

        Where encoders share the LLM's devices, all their layers are recomputed before any of the LLM's.
        """
        if not PLACEMENTS[row.values["placement"]].shares_ranks:
            return row
        return self._once(("recomputing", row.number), lambda: self._recomputing(row))

    def _recomputing(self, row: Row) -> Row:
        recomputed = self._memory.least_recomputed(row.values, self._limit_bytes, self._ends(row), beside_encoders=True)
        if any(recomputed.layers):
            return replace(row, recomputed=recomputed, encoders_again=1.0)
        of_llm = self._of_llm(row, False)
        return replace(row, encoders_again=self._memory.least_of_encoders(row.values, of_llm, self._limit_bytes))

    def least_plan(self, row: Row, spec: ModelSpec) -> Plan:
        """The row's plan with no more recomputed layers than the row says have to be."""
        plan, grids = plan_of(row.values, self._splits), []
        for grid in plan.grids:
            if grid.module == "llm":
                kept = row.recomputed.attention_kept if any(row.recomputed.attention_kept) else ()
                grids.append(replace(grid, recomputed=row.recomputed.layers, attention_kept=kept))
                continue
            layers = plan.layers_of(grid.module, spec.module(grid.module).num_layers)
            grids.append(replace(grid, recomputed=tuple(int(row.encoders_again * len(part)) for part in layers)))
        if not any(any(grid.recomputed) for grid in grids):
            return plan
        return replace(plan, grids=tuple(grids), checkpointing=True)

    def mean_s(self, row: Row) -> float:
        """A lower bound of the mean step time over the batches, by the LLM's mean pipeline on the mean batch."""
        (bound_s,) = self._bounds.of_pipeline(
            row.number, *self._pipeline(row, "mean batch"), encoders_again=row.encoders_again
        )
        return float(bound_s)

    def batches_s(self, row: Row, adds_s: np.ndarray | float = 0.0) -> np.ndarray:
        """A lower bound of each batch's step time, by the LLM's mean and fullest pipelines on it, [num_batches].

        `adds_s` is the least time that encoders add to the LLM's step (`DealtMedia`).
        """
        how = {"encoders_again": row.encoders_again, "adds_s": adds_s}
        mean_s = self._bounds.of_pipeline(row.number, *self._pipeline(row, "mean replica"), **how)
        return np.maximum(mean_s, self._bounds.of_fullest(row.number, *self._pipeline(row, "fullest replica"), **how))

    def dealt_s(self, row: Row) -> np.ndarray:
        """As `batches_s`, but tighter: with the time of each batch's media, as dealt among the encoders' replicas."""

        def adds_s() -> np.ndarray | float:
            sync_s = self._pipelines.sync_s(row.values, row.layers)
            return self._media.adds_s(row.values, row.encoders_again, sync_s)

        return self.batches_s(row, self._once(("adds", row.number, row.encoders_again), adds_s))

    def _pipeline(self, row: Row, of: Of) -> tuple[np.ndarray, np.ndarray]:
        """The pipeline of one of the LLM's replicas (`LlmPipelines.of_batches`)."""
        placement = PLACEMENTS[row.values["placement"]]
        hides = placement.has_bridges, placement.encodes_all_first
        key = "pipeline", self._grid_place[row.number], hides, row.recomputed, of
        return self._once(key, lambda: self._pipelines.of_batches(row.values, row.recomputed, of))

    def _of_llm(self, row: Row, recomputes: bool) -> np.ndarray:
        """The LLM's bytes on each of its pipeline ranks with no layer recomputed; or the least with all of them, or
        all but one of each rank's (`JustEnough`)."""

        def of_llm() -> np.ndarray:
            plain = self._memory.of_llm(row.values, row.with_all(recomputes).recomputed)
            if not recomputes:
                return plain
            counts = np.array(row.layers).reshape(-1, row.values["llm_pp"]).sum(axis=0)
            but_one = of_stages(np.maximum(counts - 1, 0), 0 * counts, row.layers)
            return np.minimum(plain, self._memory.of_llm(row.values, but_one))

        return self._once(("bytes", self._grid_place[row.number], recomputes), of_llm)

    def _ends(self, row: Row) -> list[np.ndarray]:
        """The LLM's bytes with no layer recomputed, and with all of them."""
        return [self._of_llm(row, recomputes) for recomputes in (False, True)]
