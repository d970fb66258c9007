"""Costs from the model's real layers and a device's data sheet, for hardware that is not at hand.

The pieces of a module that measuring times are run on fake tensors (`counted.py`), which counts their work and memory.
`analytic_points` turns the counts into seconds on a device of `devices.yaml`. It returns the same frames as measuring
does, so that `fit_costs` and everything after it treat both alike.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Protocol, Self

import numpy as np
import polars as pl

from dflop.base.devices import DeviceModel
from dflop.costs.counted import CountedRun, CountedStage, counting
from dflop.costs.design import Point
from dflop.models import ModelSpec, check_tp
from dflop.models.loads import FEATURES
from dflop.plan.trained import EVERYTHING, TrainedSet

__all__ = ["IMPLEMENTATIONS", "AnalyticPoints", "analytic_points", "points_of_stage"]

# `eager`: each pointwise operation is a kernel of its own. `compiled`: those of layers are fused, as by torch.compile.
IMPLEMENTATIONS = ("eager", "compiled")
# The pieces that are priced: piece, number of layers, whether layers are recomputed.
_PIECES = (
    ("layers", 1, False),
    ("layers", 2, False),
    ("layers", 1, True),
    ("layers", 2, True),
    ("first", 0, False),
    ("last", 0, False),
)
# The loads of the points, and those at which pieces are counted. Layers are counted at the last two, and grow linearly
# (below 2,000 tokens, compiled layers would free some tensors in another order). What stands around an encoder's layers
# has other kernels for a single item, and for very many.
_NUM_ITEMS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2000)
_COUNTED_ITEMS = (1, 5, 200)
# For an encoder whose items attend to each other in runs: numbers of items, and numbers of items in a run.
_NUM_RUN_ITEMS = tuple(16 << doubling for doubling in range(13))
_RUN_LENGTHS = (16, 256, 4_096)
_COUNTED_RUN_ITEMS = (16, 1_024, 16_384)
_NUM_TOKENS = tuple(64 << doubling for doubling in range(12))
_COUNTED_TOKENS = (4_096, 131_072)
# An LLM's head is run with at most one chunk of targets more. Chunks have twice these few targets or more.
_MOST_CHUNKS = 3
_FEW_TARGETS = 64
# The length of a microbatch's segments in tokens, and the share of its tokens that are targets.
_TEXT_FORMS = ((16_384, 0.5), (2_048, 0.05), (2_048, 0.5), (256, 0.1))


@dataclass(frozen=True, slots=True)
class AnalyticPoints:
    """The same frames that measuring gives.

    `measurements` are rows of the table of this name. `parameters` has the parameters' bytes of each part, and
    `targets_at_once`: for how many targets the head holds logits at a time (infinite for other parts).
    """

    measurements: pl.DataFrame
    parameters: pl.DataFrame


def analytic_points(
    spec: ModelSpec,
    module: str,
    tp: int,
    device: DeviceModel,
    implementation: str = "eager",
    *,
    trained: TrainedSet = EVERYTHING,
) -> AnalyticPoints:
    """Roofline seconds and bytes of `module` at two depths and over the loads that real data has.

    Matrix products take the time of computing or that of moving their operands, whichever is longer. Attention takes
    its computing time, pointwise kernels the time of moving their bytes, collectives that of a ring and its steps, and
    every kernel its launch. A piece, and each layer, takes no less than the host needs to dispatch its kernels and
    collectives. That is not asked of what stands around layers: the host is ahead of the device there, or behind, as it
    is in the layers.
    `implementation` is one of `IMPLEMENTATIONS`. `trained` says what of the model is trained. Frozen layers compute
    gradients of activations alone.

    Raises:
        UserError: when the model's family cannot be run, or tp does not divide the module's heads.
    """
    check_tp(spec, module, tp)
    with counting(tp) as ranks:
        stage = CountedStage(spec, module, 2, ranks, is_compiled=implementation == "compiled", trained=trained)
        return points_of_stage(stage, device)


def points_of_stage(stage: CountedStage, device: DeviceModel) -> AnalyticPoints:
    """As `analytic_points`, for a stage of two layers."""
    points, counted_loads = _points_of(stage)
    layer_loads = counted_loads[-2:]
    frame = pl.DataFrame(points, schema=dict.fromkeys(FEATURES, pl.Int64))
    run, frames, counts_of = cache(stage.run), [], {}
    for piece, depth, checkpointing in _PIECES:

        def run_at(loads: dict[str, int], of: tuple = (piece, depth, checkpointing)) -> CountedRun:
            return run(_point(*of, **loads))

        if piece == "last" and stage.module == "llm":
            counts: _Counts = _HeadCounts.of(points, run_at, stage.targets_at_once)
        else:
            at = layer_loads if piece == "layers" else counted_loads
            runs = [run_at({stage.main_load: load, "num_targets": 1}) for load in at]
            counts = _InterpolatedCounts(runs, stage, frame, np.array(at, dtype=float))
        counts_of[piece, depth, checkpointing] = counts
    for (piece, depth, checkpointing), counts in counts_of.items():
        # When the first part has its backward, what the layers kept is free. That is taken to be more than it needs.
        peak = "saved_bytes" if piece == "first" else "peak_bytes"
        for direction in ("forward", "backward"):
            if piece == "layers":
                one, two = (counts_of[piece, number, checkpointing] for number in (1, 2))
                around_s = _device_seconds(_Difference(one, two, is_layer=False), direction, stage, device)
                seconds = around_s + depth * _seconds(_Difference(one, two, is_layer=True), direction, stage, device)
            else:
                seconds = _seconds(counts, direction, stage, device)
            frames.append(
                frame.with_columns(
                    module=pl.lit(stage.module),
                    tp=pl.lit(stage.tp, pl.Int64),
                    piece=pl.lit(piece),
                    num_layers=pl.lit(depth, pl.Int64),
                    checkpointing=checkpointing,
                    seconds=pl.Series(seconds),
                    attention_s=pl.lit(None, pl.Float64),
                    peak_bytes=pl.Series(counts.at_points(peak)).round().cast(pl.Int64),
                    saved_bytes=pl.Series(counts.at_points("saved_bytes")).round().cast(pl.Int64),
                    repeat=pl.lit(0, pl.Int64),
                    **{"pass": pl.lit(direction)},
                )
            )
    passing = _passing_shares(stage, device, frame, layer_loads) if stage.has_passing else (None, None)
    return AnalyticPoints(pl.concat(frames), stage.parameter_sizes(passing))


def _passing_shares(
    stage: CountedStage, device: DeviceModel, frame: pl.DataFrame, counted_loads: tuple[int, ...]
) -> tuple[float, float]:
    """Of a layer that passes gradients on: its backward and what it keeps, as shares of a trained layer's, at the
    median over the points."""
    seconds, kept = [], []
    for context in (nullcontext, stage.stage.layers_passing):
        of_depths = []
        for depth in (1, 2):
            with context():
                runs = [
                    stage.run(_point("layers", depth, False, **{stage.main_load: load, "num_targets": 1}))
                    for load in counted_loads
                ]
            of_depths.append(_InterpolatedCounts(runs, stage, frame, np.array(counted_loads, dtype=float)))
        layer = _Difference(*of_depths, is_layer=True)
        seconds.append(_seconds(layer, "backward", stage, device))
        kept.append(layer.at_points("saved_bytes"))
    return float(np.median(seconds[1] / seconds[0])), float(np.median(kept[1] / kept[0]))


def _points_of(stage: CountedStage) -> tuple[list[dict[str, int]], tuple[int, ...]]:
    """The loads of the points, and the main loads at which pieces are run."""
    nothing = dict.fromkeys(FEATURES, 0)
    if stage.module == "llm":
        return [nothing | loads for loads in _text_loads()], _COUNTED_TOKENS
    if not stage.has_runs:
        return [nothing | {"num_items": num_items} for num_items in _NUM_ITEMS], _COUNTED_ITEMS
    loads = {(count, count * min(count, length)) for count in _NUM_RUN_ITEMS for length in _RUN_LENGTHS}
    points = [nothing | {"num_items": count, "sum_sq_tokens": squares} for count, squares in sorted(loads)]
    return points, _COUNTED_RUN_ITEMS


def _text_loads() -> list[dict[str, int]]:
    return [
        {
            "num_tokens": num_tokens,
            "sum_sq_tokens": num_tokens * min(num_tokens, length),
            "num_targets": max(1, int(num_tokens * target_share)),
        }
        for num_tokens in _NUM_TOKENS
        for length, target_share in _TEXT_FORMS
    ]


def _point(piece: str, depth: int, checkpointing: bool, **loads: int) -> Point:
    if num_items := loads.get("num_items"):
        return Point(piece, depth, checkpointing, num_items=num_items)
    return Point(piece, depth, checkpointing, segments=(loads["num_tokens"],), num_targets=loads["num_targets"])


class _Counts(Protocol):
    def at_points(self, name: str) -> np.ndarray:
        """The count `name` of runs, such as `forward.product_flops`, at each point."""
        ...


@dataclass(frozen=True, slots=True)
class _InterpolatedCounts:
    """Counts of a piece: of `runs` at the main loads `counted_at`, and linear between and beyond these, at all points
    of `frame`."""

    runs: list[CountedRun]
    stage: CountedStage
    frame: pl.DataFrame
    counted_at: np.ndarray

    def at_points(self, name: str) -> np.ndarray:
        # The peak at each operation is linear, and so not the largest of them.
        if name == "peak_bytes" and len({len(run.peaks) for run in self.runs}) == 1:
            return self._interpolated(_counts_of(self.runs, "peaks")).max(axis=0)
        counts = _counts_of(self.runs, name)
        if self.stage.is_packed and name.endswith("attention_flops"):  # a run has one segment
            return self._interpolated(counts / self.counted_at**2) * self._squares
        return self._interpolated(counts)

    def _interpolated(self, counts: np.ndarray) -> np.ndarray:
        """Counts [num_runs] as [num_points], or [num_runs, num_counts] as [num_counts, num_points]."""
        start = (np.searchsorted(self.counted_at, self._loads) - 1).clip(0, len(counts) - 2)
        slopes = (np.diff(counts, axis=0).T / np.diff(self.counted_at)).T
        return counts[start].T + slopes[start].T * (self._loads - self.counted_at[start])

    @property
    def _loads(self) -> np.ndarray:
        return self.frame[self.stage.main_load].to_numpy().astype(float)

    @property
    def _squares(self) -> np.ndarray:
        """The sum of squared lengths of what attends to itself."""
        has_squares = self.stage.module == "llm" or self.stage.has_runs
        return self.frame["sum_sq_tokens"].to_numpy().astype(float) if has_squares else self._loads


@dataclass(frozen=True, slots=True)
class _HeadCounts:
    """Counts of an LLM's head. It takes its targets in chunks, and all chunks after the third add the same counts, and
    as much to the peak at each operation around the matrix products and to the largest among these.

    Of each point, `runs` has a run with at most three chunks and `longer` one with a chunk more. The point itself has
    `num_more` chunks more than the first.
    """

    runs: list["_LinearRun"]
    longer: list["_LinearRun"]
    num_more: np.ndarray

    @classmethod
    def of(cls, points: list[dict[str, int]], run_at: Callable[..., CountedRun], targets_at_once: float) -> Self:
        at_once = int(min(targets_at_once, max(loads["num_targets"] for loads in points)))  # may be endless
        num_more = [max(0, math.ceil(loads["num_targets"] / at_once) - _MOST_CHUNKS) for loads in points]
        runs, longer = (
            [
                _LinearRun.of(run_at, loads["num_tokens"], loads["num_targets"] - fewer * at_once, at_once)
                for loads, fewer in zip(points, left_out, strict=True)
            ]
            for left_out in (num_more, [max(0, more - 1) for more in num_more])
        )
        return cls(runs, longer, np.array(num_more))

    def at_points(self, name: str) -> np.ndarray:
        if name == "peak_bytes":
            return np.array([self._peak_bytes(place) for place in range(len(self.runs))])
        counts, longer = (np.array([run.count(name) for run in runs]) for runs in (self.runs, self.longer))
        return counts + self.num_more * (longer - counts)

    def _peak_bytes(self, place: int) -> float:
        run, longer, num_more = self.runs[place], self.longer[place], self.num_more[place]
        if not num_more:
            return run.count("peaks").max()
        return (run.peaks_around() + num_more * (longer.peaks_around() - run.peaks_around())).max()


@dataclass(frozen=True, slots=True)
class _LinearRun:
    """A run of an LLM's head, whose counts are linear in the tokens and in the targets of the chunk that is not full:
    a weighted sum of those of three other runs with as many chunks."""

    runs: tuple[CountedRun, CountedRun, CountedRun]
    weights: np.ndarray

    @classmethod
    def of(cls, run_at: Callable[..., CountedRun], num_tokens: int, num_targets: int, at_once: int) -> Self:
        full = (num_targets - 1) // at_once * at_once
        few, many = full + _FEW_TARGETS, full + 2 * _FEW_TARGETS
        at = ((many, few), (2 * many, few), (many, many))
        runs = tuple(run_at({"num_tokens": tokens, "num_targets": targets}) for tokens, targets in at)
        more = num_tokens / many - 1, (num_targets - few) / (many - few)
        return cls(runs, np.array([1 - sum(more), *more]))

    def count(self, name: str) -> np.ndarray:
        return self.weights @ _counts_of(self.runs, name)

    def peaks_around(self) -> np.ndarray:
        """The peak at each operation before the first matrix product, the largest from there to the last one, and the
        peak at each operation behind it."""
        peaks, (first, last) = self.count("peaks"), self.runs[0].products
        return np.array([*peaks[:first], peaks[first : last + 1].max(), *peaks[last + 1 :]])


@dataclass(frozen=True, slots=True)
class _Difference:
    """Counts of a layer, or of what stands around the layers, from those of pieces of `one` and of `two` layers."""

    one: _Counts
    two: _Counts
    is_layer: bool

    def at_points(self, name: str) -> np.ndarray:
        one, two = self.one.at_points(name), self.two.at_points(name)
        if name.endswith("product_rows"):  # a mean
            return one
        return two - one if self.is_layer else 2 * one - two


def _counts_of(runs: Sequence[CountedRun], name: str) -> np.ndarray:
    """The count of each run, [num_runs], or their `peaks`, [num_runs, num_operations]."""
    return np.array([attrgetter(name)(run) for run in runs], dtype=float)


def _seconds(counts: _Counts, direction: str, stage: CountedStage, device: DeviceModel) -> np.ndarray:
    """Seconds of a pass at each point: those of the device, or those in which the host gives it its kernels, whichever
    are longer. The host runs ahead of a device that computes for longer."""
    num_kernels, num_collectives = (
        counts.at_points(f"{direction}.{name}") for name in ("num_kernels", "num_collectives")
    )
    host_s = num_kernels * device.dispatch_s + num_collectives * device.collective_s
    return np.maximum(_device_seconds(counts, direction, stage, device), host_s)


def _device_seconds(counts: _Counts, direction: str, stage: CountedStage, device: DeviceModel) -> np.ndarray:
    """Seconds of a pass at each point that a device needs which never waits for the host."""

    def of(name: str) -> np.ndarray:
        return counts.at_points(f"{direction}.{name}")

    memory_rate = device.memory_bytes_per_s * device.memory_share
    size = counts.at_points("forward.product_rows") * stage.hidden_size / stage.tp
    product_s = np.maximum(of("product_flops") / device.matmul_flops_per_s(size), of("product_bytes") / memory_rate)
    attention_s = of("attention_flops") / (device.peak_flops_per_s * device.attention_share)
    on_the_ring = (stage.tp - 1) / stage.tp * of("round_bytes")
    sharing_s = on_the_ring / (device.link_bytes_per_s * device.link_share)
    sharing_s = sharing_s + of("num_rounds") * (stage.tp - 1) * device.hop_s
    return (
        product_s + attention_s + of("pointwise_bytes") / memory_rate + sharing_s + of("num_kernels") * device.launch_s
    )
