"""From measurements to the fitted tables, with the error on stages that the fit has not seen.

Each piece that was measured alone (`layers` at two depths, `first`, `last`) gives one non-negative least-squares
problem for each pass. It has columns for a constant, for each load, and for the load beyond a few hinges. So time never
falls as a load grows, and may rise faster where caches are full or kernels no longer wait for their launch. The bytes
of a head that computes one chunk of logits at a time rise more slowly beyond one chunk. Rows are weighted by 1/seconds,
so that relative errors count, and weighted down where they are outliers of a noisy machine.

The backward of a recomputed layer takes the time of another layer's backward, of its attention, and of a share of the
rest of its forward. Where costs are measured, recomputed layers have no more of their own than this share: the noise
between two fits is as large as the time of recomputing one layer. Counted costs have no noise, and count what is
recomputed: torch stops a layer at the last tensor that backward reads, so its last matrix product is not repeated. A
layer that is recomputed but for attention does not repeat the seconds of attention (`CostModel.part_forms`). An LLM's
were clocked inside its layers' forward (`attention_s`), and have a fit of their own, so the layer's is theirs and that
of the rest. Where they were not, attention's are the seconds that grow with squared lengths.

Whole stages (`whole`: embedding to loss, at depths between the fitted ones, some with recomputed layers) are kept out
of every fit. The error of their predictions is `fit_error`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from dflop.base import UserError
from dflop.costs.fitted import ATTENTION, LoadRange, attention_of, column_of
from dflop.costs.measured import POINT_KEYS
from dflop.costs.model import CostModel
from dflop.costs.stage_kind import StageKind
from dflop.models.loads import FEATURES, Coefficients, Loads, loads_behind, main_load, ramp
from dflop.plan.layout_key import LayoutKey

__all__ = [
    "PIECES",
    "fit_costs",
    "fit_model",
    "fit_piece",
    "measured_loads",
    "median_points",
    "relative_errors",
]

# The pieces that are measured, and the parts that each is made of. A piece has its `layer` part once a layer.
PIECES = {"layers": ("stage", "layer"), "first": ("first",), "last": ("last",)}

# Module, layout and whether layers are recomputed; the same of a part.
_Key = tuple[str, LayoutKey, bool]
_PartKey = tuple[str, LayoutKey, str, bool]
_PASSING = "passing_backward", "passing_kept"
# Seconds by module, layout, part, whether layers are recomputed, and pass.
Times = dict[tuple[str, LayoutKey, str, bool, str], Coefficients]

_NUM_HINGES = 4
# With fewer sizes, seconds are straight lines.
_LEAST_BENT_SIZES = 4
_NUMBERS = pl.List(pl.Float64)
_LEAST_POINTS = {"layers": 4, "first": 2, "last": 2}
# Relative residuals beyond this weigh less.
_OUTLIER = 0.08
_REWEIGHTINGS = 4


@dataclass(frozen=True, slots=True)
class _Columns:
    """One part's columns of the least-squares problem.

    The part depends on the loads `features`, and a row has it `times` [num_points] times. Besides, its cost may rise
    with the load `along` inside each range of `ramps`, whose end may be infinite.
    """

    part: str
    along: int
    features: tuple[int, ...]
    times: np.ndarray
    ramps: tuple[tuple[float, float], ...]

    def design(self, loads: np.ndarray) -> np.ndarray:
        """[num_points, 1 + num_loads + num_ramps]"""
        columns = [np.ones(len(loads)), *(loads[:, index] for index in self.features)]
        columns += [np.clip(loads[:, self.along], start, end) - start for start, end in self.ramps]
        return np.column_stack(columns) * self.times[:, None]

    def coefficients(self, solution: np.ndarray) -> Coefficients:
        per_load = [0.0] * len(FEATURES)
        for place, index in enumerate(self.features, start=1):
            per_load[index] = float(solution[place])
        slopes = solution[1 + len(self.features) :]
        own = Coefficients(float(solution[0]), tuple(per_load))
        for (start, end), slope in zip(self.ramps, slopes, strict=True):
            if slope > 0:
                own += ramp(FEATURES[self.along], start, end, float(slope))
        return own


def median_points(measurements: pl.DataFrame) -> pl.DataFrame:
    """One row a point and pass: the median seconds and the most bytes of its repeats, without those that ran out of
    memory."""
    return (
        measurements.filter(pl.col("seconds").is_not_null())
        .group_by(*POINT_KEYS, "pass", maintain_order=True)
        .agg(pl.col("seconds", "attention_s").cast(pl.Float64).median(), pl.col("peak_bytes", "saved_bytes").max())
    )


def fit_model(points: pl.DataFrame, parameters: pl.DataFrame, source: str = "measured") -> CostModel:
    """The cost model of all modules and layouts in `points` (a frame of `median_points`).

    `parameters` has the columns module, tp, part, parameter_bytes and targets_at_once (infinite where it is missing).

    Raises:
        UserError: when a module has too few points to fit.
    """
    at_once = {
        (row["module"], LayoutKey.of_row(row)): row.get("targets_at_once", math.inf)
        for row in parameters.iter_rows(named=True)
        if row["part"] == "last"
    }
    times, activations, transients = {}, {}, {}
    for (module, *sizes, piece, checkpointing, direction), frame in points.filter(pl.col("piece") != "whole").group_by(
        "module", *LayoutKey.columns(), "piece", "checkpointing", "pass", maintain_order=True
    ):
        layout = LayoutKey(*sizes)
        depths = frame["num_layers"].n_unique()
        if len(frame) < _LEAST_POINTS[piece] or (piece == "layers" and depths < 2):
            raise UserError(
                f"{module} {layout}: {len(frame)} {direction} points of {piece} at {depths} depth(s) are too few for a "
                "fit; raise `costs.time_budget_s` and run `dflop profile-costs` again"
            )
        key, chunk = (module, layout, checkpointing), at_once.get((module, layout), math.inf)
        chunk = chunk if piece == "last" else math.inf
        if not checkpointing or source == "analytic":
            times |= {(*about, direction): fit for about, fit in _times_of(frame, key, piece, direction, chunk).items()}
        if direction == "forward":
            kept, on_top = _bytes_of(frame, key, piece, chunk)
            activations |= kept
            transients |= on_top
    times = _recomputing(times, _repeated_shares(points, times)) | times
    sizes, partial = (_by_part(parameters, column) for column in ("parameter_bytes", "adapter_bytes"))
    shares, attention_bytes = (_by_layout(parameters, *of) for of in (_PASSING, ("attention_bytes",)))
    ranges = _ranges(points)
    nothing_of_stages = {(module, layout, "stage"): 0.0 for module, layout, _ in ranges}
    return CostModel(
        times=times,
        activations=activations,
        transients=transients,
        parameter_bytes=sizes | nothing_of_stages,
        partial_bytes=partial | nothing_of_stages,
        passing=shares,
        attention_bytes={about: own for about, (own,) in attention_bytes.items()},
        ranges=ranges,
        source=source,
    )


def _times_of(frame: pl.DataFrame, key: _Key, piece: str, direction: str, chunk: float) -> dict[_PartKey, Coefficients]:
    """The seconds of each of the piece's parts, fitted to one pass's points."""
    (module, layout, checkpointing), known, times = key, None, {}
    if (piece, direction) == ("layers", "forward") and not frame["attention_s"].has_nulls():
        known = _fit_attention(frame, module)
        times[module, layout, ATTENTION, checkpointing] = known
    fits = fit_piece(frame, module, piece, "seconds", chunk=chunk, known=known)
    return times | {(module, layout, part, checkpointing): fit for part, fit in zip(PIECES[piece], fits, strict=True)}


def _bytes_of(frame: pl.DataFrame, key: _Key, piece: str, chunk: float) -> tuple[dict[_PartKey, Coefficients], ...]:
    """The bytes that each of the piece's parts keeps, and those that it needs on top while it computes."""
    module, layout, checkpointing = key
    keys = [(module, layout, part, checkpointing) for part in PIECES[piece]]
    kept = dict(zip(keys, fit_piece(frame, module, piece, "saved_bytes", chunk=chunk), strict=True))
    passing = frame.with_columns(transient=(pl.col("peak_bytes") - pl.col("saved_bytes")).clip(0))
    # Layers run one after the other: however many there are, only one at a time has transient bytes.
    on_top = dict.fromkeys(keys, Coefficients(0.0, (0.0,) * len(FEATURES)))
    only = PIECES[piece][-1:]
    on_top[keys[-1]] = fit_piece(passing, module, piece, "transient", parts=only, chunk=chunk)[0]
    return kept, on_top


def _by_part(parameters: pl.DataFrame, column: str) -> dict[tuple[str, LayoutKey, str], float]:
    """A column of the parameters' sizes, by module, layout and part."""
    return {
        (row["module"], LayoutKey.of_row(row), row["part"]): row.get(column) or 0.0
        for row in parameters.iter_rows(named=True)
    }


def _by_layout(parameters: pl.DataFrame, *columns: str) -> dict[tuple[str, LayoutKey], tuple[float, ...]]:
    """These columns, by module and layout, where they have values."""
    return {
        (row["module"], LayoutKey.of_row(row)): tuple(row[column] for column in columns)
        for row in parameters.iter_rows(named=True)
        if row.get(columns[0]) is not None
    }


def _ranges(points: pl.DataFrame) -> dict[tuple[str, LayoutKey, bool], LoadRange]:
    """Between which loads each module's layers were measured."""
    ranges = {}
    for (module, *sizes, checkpointing), layers in points.filter(pl.col("piece") == "layers").group_by(
        "module", *LayoutKey.columns(), "checkpointing"
    ):
        layout = LayoutKey(*sizes)
        own = points.filter(pl.col("module") == module, **layout._asdict())
        bounds = [_bounds(own if feature == "num_targets" else layers, feature) for feature in FEATURES]
        ranges[module, layout, checkpointing] = LoadRange(*(tuple(bound[end] for bound in bounds) for end in (0, 1)))
    return ranges


def _recomputing(times: Times, repeated: Mapping[tuple[str, LayoutKey], float]) -> Times:
    """Seconds of recomputed layers, and of the part `stage` in stages that have such layers."""
    own: Times = {}
    for (module, layout, part, checkpointing, direction), fit in times.items():
        if part not in PIECES["layers"] or checkpointing:
            continue
        if (part, direction) == ("layer", "backward"):
            attention = attention_of(times, module, layout)
            others = times[module, layout, "layer", False, "forward"].without(attention)
            fit = (fit + attention + repeated.get((module, layout), 1.0) * others).merged()
        own[module, layout, part, True, direction] = fit
    return own


def _repeated_shares(points: pl.DataFrame, times: Times) -> dict[tuple[str, LayoutKey], float]:
    """How much of a layer's forward is added to backward where the layer is recomputed, at most 1, beside attention:
    compiled, it leaves out the last product, and layers that are kept repeat pointwise results as well. It is the
    median over the longest microbatches, as the seconds of short ones are of launches, but no longer ones than were
    measured without recomputing."""
    shares = {}
    again = pl.col("checkpointing") & (pl.col("piece") == "layers") & (pl.col("pass") == "backward")
    kept_layers = points.filter(~pl.col("checkpointing") & (pl.col("piece") == "layers"))
    for (module, *sizes), frame in points.filter(again).group_by("module", *LayoutKey.columns()):
        layout, load = LayoutKey(*sizes), main_load(module)
        most = kept_layers.filter(pl.col("module") == module, **layout._asdict())[load].max()
        frame = frame.filter(pl.col(load) <= most)
        loads, depths = measured_loads(frame), frame["num_layers"].to_numpy()
        attention = attention_of(times, module, layout)
        others = times[module, layout, "layer", False, "forward"].without(attention)
        kept = times[module, layout, "layer", False, "backward"] + attention
        kept_s = times[module, layout, "stage", False, "backward"](loads) + depths * kept(loads)
        others_s, added_s = depths * others(loads), frame["seconds"].to_numpy() - kept_s
        longest = (frame[load] >= (frame[load].max() or 0) / 2).to_numpy() & (others_s > 0)
        if longest.any():
            shares[module, layout] = float(np.clip(np.median(added_s[longest] / others_s[longest]), 0.0, 1.0))
    return shares


def _bounds(points: pl.DataFrame, feature: str) -> tuple[float, float]:
    """The smallest measured load, and the largest load that was measured at every depth; 0 and 0 where none was."""
    points = points.filter(pl.col(feature) > 0)
    if points.is_empty():
        return 0.0, 0.0
    if feature == "num_targets":
        return float(points[feature].min()), float(points[feature].max())
    return float(points[feature].min()), float(points.group_by("num_layers").agg(pl.col(feature).max())[feature].min())


def relative_errors(model: CostModel, points: pl.DataFrame) -> pl.DataFrame:
    """The points of whole stages, with their predicted seconds `predicted_s` and absolute relative `error`."""
    rows = []
    for (module, *sizes, depth, checkpointing, direction), frame in points.filter(pl.col("piece") == "whole").group_by(
        "module", *LayoutKey.columns(), "num_layers", "checkpointing", "pass", maintain_order=True
    ):
        both = model.stage_time(_whole(module, LayoutKey(*sizes), depth, checkpointing), measured_loads(frame))
        predicted_s = both[direction == "backward"]
        rows.append(frame.with_columns(predicted_s=pl.Series(predicted_s)))
    if not rows:
        return points.clear().with_columns(predicted_s=pl.lit(0.0), error=pl.lit(0.0))
    return pl.concat(rows).with_columns(error=(pl.col("predicted_s") / pl.col("seconds") - 1).abs())


def memory_errors(model: CostModel, points: pl.DataFrame) -> pl.DataFrame:
    """The points of whole stages, with their predicted peak `predicted_bytes` and absolute relative `error`."""
    frames = [points.clear().with_columns(predicted_bytes=pl.lit(0.0))]
    known = points.filter((pl.col("piece") == "whole") & (pl.col("pass") == "forward") & (pl.col("peak_bytes") > 0))
    for (module, *sizes, depth, checkpointing), frame in known.group_by(
        "module", *LayoutKey.columns(), "num_layers", "checkpointing", maintain_order=True
    ):
        memory = model.stage_memory(_whole(module, LayoutKey(*sizes), depth, checkpointing), measured_loads(frame))
        frames.append(frame.with_columns(predicted_bytes=pl.Series(memory.activation_bytes + memory.transient_bytes)))
    return pl.concat(frames).with_columns(error=(pl.col("predicted_bytes") / pl.col("peak_bytes") - 1).abs())


def _whole(module: str, layout: LayoutKey, num_layers: int, checkpointing: bool) -> StageKind:
    return StageKind.whole(module, layout, num_layers, num_recomputed=num_layers if checkpointing else 0)


def measured_loads(points: pl.DataFrame) -> Loads:
    """The loads of the points, arrays [num_points]."""
    return Loads(*(points[feature].to_numpy().astype(float) for feature in FEATURES))


def fit_costs(
    measurements: pl.DataFrame, parameters: pl.DataFrame, source: str = "measured"
) -> dict[str, pl.DataFrame]:
    """The tables `time_model`, `memory_model`, `load_range` and `fit_error`.

    `fit_error` has a row for the seconds of each pass and one, without a pass, for the bytes at the peak. It has no
    rows for analytic costs.

    `measurements` has the columns of `dflop profile-costs`; `parameters` those of `fit_model`.

    Raises:
        UserError: when a module has too few points to fit.
    """
    points = median_points(measurements)
    model = fit_model(points, parameters, source)
    errors, byte_errors = relative_errors(model, points), memory_errors(model, points)
    if source == "analytic":  # sums of the same formulas do not show how far the formulas are off
        errors, byte_errors = errors.clear(), byte_errors.clear()
    memory = [
        _row(key, fit, "bytes")
        | {"kind": kind, "parameter_bytes": model.parameter_bytes[key[:3]]}
        | {"adapter_bytes": model.partial_bytes.get(key[:3], 0.0)}
        | dict(zip(_PASSING, model.passing.get(key[:2], (None, None)), strict=True))
        | {"attention_bytes": model.attention_bytes.get(key[:2])}
        for kind, fits in (("activation", model.activations), ("transient", model.transients))
        for key, fit in fits.items()
    ]
    times = [_row(key[:4], fit, "s") | {"pass": key[4]} for key, fit in model.times.items()]
    ranges = [
        {"module": module, **layout._asdict(), "checkpointing": checkpointing}
        | dict(zip((f"least_{feature}" for feature in FEATURES), bounds.least, strict=True))
        | dict(zip((f"most_{feature}" for feature in FEATURES), bounds.most, strict=True))
        for (module, layout, checkpointing), bounds in model.ranges.items()
    ]
    return {
        "time_model": pl.DataFrame(times, schema_overrides=dict.fromkeys(("hinge_at", "hinge_s"), _NUMBERS)),
        "memory_model": pl.DataFrame(
            memory,
            schema_overrides=dict.fromkeys(("hinge_at", "hinge_bytes"), _NUMBERS)
            | dict.fromkeys((*_PASSING, "attention_bytes"), pl.Float64),
        ),
        "load_range": pl.DataFrame(ranges),
        "fit_error": pl.concat(
            [
                _error_summary(errors, "seconds", "predicted_s", by=("module", *LayoutKey.columns(), "pass")),
                _error_summary(byte_errors, "peak_bytes", "predicted_bytes", by=("module", *LayoutKey.columns())),
            ],
            how="diagonal",
        ),
    }


def _error_summary(errors: pl.DataFrame, quantity: str, predicted: str, *, by: tuple[str, ...]) -> pl.DataFrame:
    return errors.group_by(*by, maintain_order=True).agg(
        quantity=pl.lit(quantity),
        num_held_out=pl.len(),
        median_error=pl.col("error").median(),
        p95_error=pl.col("error").quantile(0.95, "linear"),
        bias=(pl.col(predicted) / pl.col(quantity)).median() - 1,
    )


def fit_piece(
    frame: pl.DataFrame,
    module: str,
    piece: str,
    target: str,
    parts: tuple[str, ...] | None = None,
    chunk: float = math.inf,
    known: Coefficients | None = None,
) -> list[Coefficients]:
    """Coefficients of each of the piece's parts, fitted to the column `target` of one pass's points.

    With `parts`, the piece is taken to have each of these parts once, however many layers it has. A head holds logits
    for `chunk` targets at a time: beyond that many targets, bytes grow more slowly and seconds faster. Of the last
    part, `known` is fitted before: the rest is fitted to what it leaves.
    """
    loads = np.column_stack(measured_loads(frame))
    once = np.ones(len(frame))
    layers = frame["num_layers"].to_numpy().astype(float) if parts is None else once
    columns = [
        _columns(module, part, loads, layers if part == "layer" else once, target, chunk)
        for part in parts or PIECES[piece]
    ]
    designs = [own.design(loads) for own in columns]
    of_known = known(measured_loads(frame)) * layers if known else 0.0
    target_values = np.maximum(frame[target].to_numpy().astype(float), 1e-12)
    solution = _non_negative(np.hstack(designs), target_values, of_known)
    ends = np.cumsum([design.shape[1] for design in designs])[:-1]
    fits = [own.coefficients(solved) for own, solved in zip(columns, np.split(solution, ends), strict=True)]
    return [*fits[:-1], (fits[-1] + known).merged()] if known else fits


def _fit_attention(frame: pl.DataFrame, module: str) -> Coefficients:
    """The seconds of attention in a layer's forward, from one pass's points of layers: a constant, and what grows with
    tokens and with squared lengths, so that it holds for longer segments than were measured."""
    of_layer = frame.with_columns(attention_s=pl.col("attention_s") / pl.col("num_layers"))
    return fit_piece(of_layer, module, "layers", "attention_s", parts=("layer",))[0]


def _columns(
    module: str, part: str, loads: np.ndarray, times: np.ndarray, target: str, chunk: float = math.inf
) -> _Columns:
    along = FEATURES.index(main_load(module, part))
    sizes, ramps = np.unique(loads[:, along]), set()
    is_beyond = sizes.max() > chunk
    num_hinges = min(_NUM_HINGES, len(sizes) // 2)
    is_bent = len(sizes) >= (_LEAST_BENT_SIZES if target == "seconds" else 2 * _NUM_HINGES)
    if is_bent and target not in ("saved_bytes", "attention_s") and part != "stage":
        hinges = np.quantile(sizes, np.linspace(0, 1, num_hinges + 2)[1:-1])
        ramps = {(float(at), math.inf) for at in hinges if target == "seconds" or not is_beyond}
    if is_beyond:
        ramps |= {(chunk, math.inf)} if target == "seconds" else {(0.0, chunk)}
        ramps |= {(chunk, 2 * chunk)} if target == "transient" else set()
    features = tuple(FEATURES.index(load) for load in loads_behind(module, part))
    return _Columns(part, along, features, times, tuple(sorted(ramps)))


def _non_negative(design: np.ndarray, target: np.ndarray, known: np.ndarray | float = 0.0) -> np.ndarray:
    """Non-negative coefficients [num_columns] of small relative error, from `design` [num_points, num_columns] and
    `target` [num_points], of which `known` is explained already. Columns are scaled to be comparable."""
    from scipy.optimize import nnls  # takes longer to import than most commands take

    weighted = design / target[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    weights, missing = np.ones(len(target)), 1 - known / target
    for _ in range(_REWEIGHTINGS):
        roots = np.sqrt(weights)
        solution, _ = nnls(weighted / scale * roots[:, None], roots * missing)
        residuals = np.abs(weighted / scale @ solution - missing)
        weights = np.minimum(1.0, _OUTLIER / np.maximum(residuals, 1e-12))
    return solution / scale


def _row(key: tuple[str, LayoutKey, str, bool], fit: Coefficients, unit: str) -> dict[str, object]:
    module, layout, part, checkpointing = key
    return (
        {"module": module, **layout._asdict(), "part": part, "checkpointing": checkpointing}
        | {f"const_{unit}": fit.const}
        | dict(zip((column_of(feature, unit) for feature in FEATURES), fit.per_load, strict=True))
        | {"hinge_at": [hinge.at for hinge in fit.hinges], f"hinge_{unit}": [hinge.slope for hinge in fit.hinges]}
    )
