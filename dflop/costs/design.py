"""Which points to measure: a first few over the range of the data, then where the fit is least sure.

A piece's measurements are divided into folds, and its model is fitted once without each fold. These fits disagree where
measurements are missing. The next point is where they disagree most, in seconds of a whole stage. In between, whole
stages are measured on microbatches of random segment lengths, with sizes spread evenly over their range. No fit sees
these held-out measurements: they show how good the predictions are, and measuring ends when they are good enough.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from dflop.base import UserError
from dflop.costs.fit import PIECES, fit_model, fit_piece, measured_loads, median_points, relative_errors
from dflop.costs.model import CostModel
from dflop.costs.stage_kind import StageKind
from dflop.models.loads import main_load
from dflop.plan.layout_key import LayoutKey

__all__ = ["Design", "LoadBounds", "Point", "bounds_of_samples", "fitted_depths", "load_bounds"]

# At how many sizes each piece is measured before the first fit.
_FIRST_SIZES = 5
# This many of the smallest sizes may be measured however long they take.
_LEAST_SIZES = 3
# Points that are chosen between two fits.
_BATCH = 4
# Held-out points: at first, between two fits, and before their errors are trusted.
_FIRST_HELD_OUT = 12
_HELD_OUT_A_BATCH = 3
_LEAST_HELD_OUT = 20
# Multiples of this share of a range, modulo the range, cover it evenly, however many there are (Kronecker's sequence).
_GOLDEN = (math.sqrt(5) - 1) / 2
_NUM_FOLDS = 5
# The held-out p95 error is good enough where it is within this many times the target for the median.
_TAIL = 2.5
# One measured run may take this share of the time budget, or `_LEAST_LONGEST_S` where that is more. Larger sizes are
# left out.
_LONGEST_SHARE = 1 / 60
_LEAST_LONGEST_S = 0.05


class Point(NamedTuple):
    """One microbatch to measure on one piece of a module: items, or text in segments of these lengths in tokens."""

    piece: str
    num_layers: int
    checkpointing: bool
    num_items: int = 0
    segments: tuple[int, ...] = ()
    num_targets: int = 0

    def keys(self) -> dict[str, object]:
        """The point's columns in `measurements`."""
        return {
            "piece": self.piece,
            "num_layers": self.num_layers,
            "checkpointing": self.checkpointing,
            "num_items": self.num_items,
            "num_tokens": self.num_tokens,
            "sum_sq_tokens": sum(length**2 for length in self.segments),
            "num_targets": self.num_targets,
        }

    @property
    def num_tokens(self) -> int:
        return sum(self.segments)

    @property
    def size(self) -> int:
        return self.num_tokens or self.num_items


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadBounds:
    """Lower and upper bounds of what a microbatch holds: items, tokens, tokens of one segment, and the share of its
    tokens that are targets."""

    num_items: tuple[int, int] = (1, 128)
    num_tokens: tuple[int, int] = (32, 16_384)
    segment_tokens: tuple[int, int] = (32, 4_096)
    target_share: tuple[float, float] = (0.03, 0.5)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def bounds_of_samples(num_items: np.ndarray, llm_tokens: np.ndarray, target_tokens: np.ndarray) -> LoadBounds:
    """Bounds that hold these samples, and microbatches of up to 8 mean samples, rounded outwards to powers of two.

    Items go up to 8 at least, also where few samples or none have any: plans place an encoder without work, too, and a
    fit needs several sizes.

    All three arrays are [num_samples]. Because of the rounding, a small change of the data changes neither the bounds
    nor what is measured.
    """
    tokens = llm_tokens[llm_tokens > 0] if (llm_tokens > 0).any() else np.full(1, 32)
    share = (target_tokens / np.maximum(llm_tokens, 1))[target_tokens > 0]
    share = share if len(share) else np.full(1, 0.25)
    return LoadBounds(
        num_items=(1, _power_above(max(8, num_items.max(initial=0), 8 * num_items.mean() if len(num_items) else 0))),
        num_tokens=(_power_below(np.quantile(tokens, 0.05)), _power_above(max(tokens.max(), 8 * tokens.mean()))),
        segment_tokens=(_power_below(np.quantile(tokens, 0.05)), _power_above(tokens.max())),
        target_share=(
            0.5 ** math.ceil(-math.log2(np.quantile(share, 0.1))),
            0.5 ** math.floor(-math.log2(share.max())),
        ),
    )


def load_bounds(path: Path) -> LoadBounds:
    """Read `load_bounds.json`, which `dflop merge-shapes` wrote.

    Raises:
        UserError: when the file is missing or holds something else.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        bounds = LoadBounds(**{name: (low, high) for name, (low, high) in fields.items()})
        counts = (*bounds.num_items, *bounds.num_tokens, *bounds.segment_tokens)
        is_whole = fields.keys() == asdict(bounds).keys() and all(type(count) is int for count in counts)
        if not is_whole or not all(0 < low <= high for low, high in asdict(bounds).values()):
            raise ValueError
    except (OSError, ValueError, TypeError, AttributeError):
        raise UserError(f"{path} holds no load bounds; `dflop merge-shapes` writes them beside shapes.duckdb") from None
    return bounds


def fitted_depths(num_layers: int) -> tuple[int, int]:
    """The two depths at which layers are measured: what one layer adds is the difference."""
    return 1, max(2, min(4, num_layers))


class Design:
    """The points of one module in one layout, in the order in which to measure them."""

    def __init__(
        self,
        module: str,
        layout: LayoutKey,
        num_layers: int,
        bounds: LoadBounds,
        *,
        repeats: int,
        target_error: float,
        time_budget_s: float,
        room_bytes: float = math.inf,
    ) -> None:
        """`target_error` is the median relative error at which measuring may end; `room_bytes` is the memory that a
        rank has for microbatches: no point is chosen that would need more."""
        self.module, self.layout, self.num_layers, self.bounds = module, layout, num_layers, bounds
        self._reads_text = main_load(module) == "num_tokens"
        self.depths = fitted_depths(num_layers)
        self.target_error = target_error
        self.longest_s = max(_LEAST_LONGEST_S, time_budget_s * _LONGEST_SHARE)
        self.room_bytes = room_bytes
        self.error: tuple[float, float] | None = None
        self._rng = np.random.default_rng(0)
        self._num_held_out = 0
        self._repeats = repeats
        self._asked: Counter[Point] = Counter()
        self._shortest: dict[tuple[str, int, bool], tuple[int, float]] = {}
        # The largest size of each kind that does not take too long, and that fits into memory.
        self._limits: dict[tuple[str, int, bool], int] = {}
        self._fitting: dict[tuple[str, int, bool], int] = {}
        self._sizes = _geometric(*getattr(bounds, main_load(module)), ratio=math.sqrt(2))
        self._kinds = [("layers", depth, checkpointing) for checkpointing in (False, True) for depth in self.depths]
        self._kinds += [("first", 0, False), ("last", 0, False)]
        self._queue = self._rounds(self._spread_points(_FIRST_SIZES) + self._held_out(_FIRST_HELD_OUT))

    def next(self, rows: list[dict], parameters: pl.DataFrame) -> tuple[Point, int] | None:
        """The next point and the number of its repeat; None when predictions are good enough or no point is left.

        `rows` are all measurements so far. Points take turns, so that what slows the machine for a moment spoils one
        repeat of several points, and not all repeats of one. Raises `UserError` when points are too few for a fit.
        """
        while True:
            while self._queue:
                point = self._queue.pop(0)
                if not self._is_too_large(point):
                    self._asked[point] += 1
                    return point, self._asked[point] - 1
            more = self._more(rows, parameters)
            if not any(self._is_new(point) for point in more):
                return None
            self._queue = self._rounds(more)

    def _rounds(self, points: list[Point]) -> list[Point]:
        return self._repeats * list(dict.fromkeys(points))

    def _is_new(self, point: Point) -> bool:
        return point not in self._asked and not self._is_too_large(point)

    @property
    def is_covered(self) -> bool:
        """Whether every point of the queue has been asked for once, so that a fit is possible."""
        return not any(self._is_new(point) for point in self._queue)

    def took(self, point: Point, seconds: float | None, peak_bytes: int | None = None) -> None:
        """Note the seconds of one run of the point (None if it ran out of memory), and its peak bytes if known."""
        kind, size = point[:3], point.size
        if seconds is None:
            self._limits[kind] = min(size - 1, self._limits.get(kind, size))
            return
        if peak_bytes and math.isfinite(self.room_bytes):
            # Bytes are taken as proportional to the size. A constant part makes larger sizes need less than that.
            fitting = max(size, int(size * self.room_bytes / peak_bytes))
            self._fitting[kind] = max(fitting, self._fitting.get(kind, 0))
        least, least_s = self._shortest.setdefault(kind, (size, seconds))
        if size > least and kind not in self._limits and seconds > max(least_s, self.longest_s / 4):
            more = (self.longest_s - seconds) * (size - least) / (seconds - least_s)
            self._limits[kind] = max(self._sizes[:_LEAST_SIZES][-1], int(size + more))

    def _is_too_large(self, point: Point) -> bool:
        """Whether the point would take too long or too much memory."""
        return point.size > self._largest(point[:3])

    def _largest(self, kind: tuple[str, int, bool]) -> float:
        kinds = [kind, *self._kinds] if kind[0] == "whole" else [kind]
        return min(min(self._limits.get(kind, math.inf), self._fitting.get(kind, math.inf)) for kind in kinds)

    def _spread_points(self, count: int) -> list[Point]:
        """Points at `count` sizes of each piece, spread over the sizes that are not too large, small ones first."""
        points = []
        for kind in self._kinds:
            sizes = [size for size in self._sizes if size <= self._largest(kind)] or self._sizes[:1]
            for size in _spread(sizes, count - 2 if kind[2] else count):
                forms = self._forms(*kind, size)
                points += forms if kind[0] == "last" or not kind[2] else forms[:1]
        return sorted(points, key=lambda point: point.size)

    def _forms(self, piece: str, depth: int, checkpointing: bool, size: int) -> list[Point]:
        """The points of a size: one for an encoder; of text, with long and short segments, or few and many targets."""
        point = Point(piece, depth, checkpointing)
        if not self._reads_text:
            return [point._replace(num_items=size)]
        least, most = self.bounds.segment_tokens
        lengths = [min(size, most), min(size, least)] if piece == "layers" else [min(size, most)]
        shares = self.bounds.target_share if piece == "last" else (0.0,)
        return [_with_text(point, (length,) * max(1, size // length), share) for length in lengths for share in shares]

    def _held_out(self, count: int) -> list[Point]:
        """The next `count` held-out points: whole stages, between the fitted depths, a third with recomputed layers."""
        points = []
        depths = range(min(2, self.depths[1]), max(3, self.depths[1]))
        for _ in range(count):
            number, self._num_held_out = self._num_held_out, self._num_held_out + 1
            point = Point("whole", depths[number // 3 % len(depths)], number % 3 == 2)
            largest = max(self._sizes[0], min(self._sizes[-1], self._largest(point[:3])))
            size = round(_between((self._sizes[0], largest), (0.5 + number * _GOLDEN) % 1))
            if self._reads_text:
                point = _with_text(point, self._segments(size), _between(self.bounds.target_share, self._rng.random()))
            points.append(point if self._reads_text else point._replace(num_items=size))
        return points

    def _segments(self, num_tokens: int) -> tuple[int, ...]:
        """Segments of random lengths with `num_tokens` tokens in all."""
        lengths: list[int] = []
        while (rest := num_tokens - sum(lengths)) > 0:
            lengths.append(min(rest, round(_between(self.bounds.segment_tokens, self._rng.random()))))
        return tuple(lengths)

    def _more(self, rows: list[dict], parameters: pl.DataFrame) -> list[Point]:
        """The points to measure next; none when the predictions are good enough."""
        missing = [point for point in self._spread_points(_FIRST_SIZES) if self._is_new(point)]
        if missing:
            return missing  # sizes of the first round that took too long are replaced by smaller ones
        points = median_points(pl.DataFrame(rows, infer_schema_length=None))
        model = fit_model(points, parameters)
        errors = relative_errors(model, points)
        if len(errors):
            self.error = (float(errors["error"].median()), float(errors["error"].quantile(0.95, "linear")))
            good = self.error[0] <= self.target_error and self.error[1] <= _TAIL * self.target_error
            if good and len(errors) >= 2 * _LEAST_HELD_OUT:  # each has a forward and a backward row
                return []
        return self._most_doubtful(points, model) + [
            point for point in self._held_out(_HELD_OUT_A_BATCH) if self._is_new(point)
        ]

    def _most_doubtful(self, points: pl.DataFrame, model: CostModel) -> list[Point]:
        """The new points where fits to parts of the measurements disagree most, as a share of a whole stage's time."""
        doubts: list[tuple[float, Point]] = []
        for piece in PIECES:
            for checkpointing in (False, True) if piece == "layers" else (False,):
                own = points.filter((pl.col("piece") == piece) & (pl.col("checkpointing") == checkpointing))
                depth = int(self._rng.choice(self.depths)) if piece == "layers" else 0
                candidates = [
                    point
                    for size in self._sizes
                    for point in self._forms(piece, depth, checkpointing, size)
                    if self._is_new(point)
                ]
                if candidates:
                    doubts += zip(self._disagreement(own, piece, candidates, model), candidates, strict=True)
        doubts.sort(key=lambda entry: -entry[0])
        return [point for _, point in doubts[:_BATCH]]

    def _disagreement(
        self, points: pl.DataFrame, piece: str, candidates: list[Point], model: CostModel
    ) -> Iterable[float]:
        frame = pl.DataFrame([point.keys() for point in candidates])
        loads = measured_loads(frame)
        whole = model.stage_time(StageKind.whole(self.module, self.layout, self.num_layers), loads)
        total = np.zeros(len(candidates))
        for direction, whole_s in zip(("forward", "backward"), whole, strict=True):
            own = points.filter(pl.col("pass") == direction).sample(fraction=1.0, shuffle=True, seed=0)
            seconds = []
            for fold in range(_NUM_FOLDS):
                part = own.filter(pl.int_range(pl.len()) % _NUM_FOLDS != fold)
                fits = fit_piece(part, self.module, piece, "seconds")
                times = (1, self.num_layers) if piece == "layers" else (1,)
                seconds.append(sum(count * fit(loads) for count, fit in zip(times, fits, strict=True)))
            total += np.std(seconds, axis=0) / whole_s
        return total


def _with_text(point: Point, segments: tuple[int, ...], target_share: float) -> Point:
    num_tokens = sum(segments)
    return point._replace(segments=segments, num_targets=min(num_tokens, math.ceil(num_tokens * target_share)))


def _between(bounds: tuple[float, float], share: float) -> float:
    """The number at this share of the way from the lower to the upper bound, on a logarithmic scale."""
    low, high = bounds
    return low * (high / low) ** share


def _geometric(low: int, high: int, *, ratio: float) -> list[int]:
    """Sizes from `low` to `high`, both included, each about `ratio` times the one before."""
    count = max(2, 1 + round(math.log(max(high / low, 1.0), ratio)))
    return sorted({round(size) for size in np.geomspace(low, high, count)})


def _spread(sizes: list[int], count: int) -> list[int]:
    """`count` of the sizes, evenly from first to last."""
    return [sizes[place] for place in sorted({round(at) for at in np.linspace(0, len(sizes) - 1, count)})]


def _power_above(value: float) -> int:
    return 1 << max(0, math.ceil(math.log2(value)))


def _power_below(value: float) -> int:
    return 1 << max(0, math.floor(math.log2(value)))
