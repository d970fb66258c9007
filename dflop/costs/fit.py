"""From measurements to the fitted tables, with the error on points that the fit has not seen.

One non-negative least-squares problem a module and pass: columns for the constant and for each load, once
plain (the part that a module has once) and once times the number of layers. Attention's quadratic part
belongs to layers alone, target tokens to the head alone. Rows are weighted by 1/seconds, so that the fit
minimises relative errors. A third of the points is held out and gives `fit_error`; the tables are then
fitted on all points.
"""

import numpy as np
import polars as pl
from scipy.optimize import nnls

from dflop.costs.model import FEATURES, column_of
from dflop.errors import UserError

__all__ = ["fit_costs"]

_HELD_OUT_SHARE = 1 / 3
_NOT_IN_REST = ("sum_sq_tokens",)
_NOT_IN_LAYER = ("num_targets",)


def fit_costs(measurements: pl.DataFrame, parameters: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """The tables `time_model`, `memory_model` and `fit_error`.

    `measurements` has the columns of DESIGN's table and `num_targets`; `parameters` has module, tp, part,
    parameter_bytes and, for each load, the bytes of a layer's input.

    Raises:
        UserError: when a module has too few points to fit.
    """
    time_rows, memory_rows, error_rows = [], [], []
    keys = ["module", "tp", "num_layers", *FEATURES, "pass"]
    points = measurements.group_by(keys, maintain_order=True).agg(
        pl.col("seconds").median(), pl.col("peak_bytes").max()
    )
    for (module, tp, direction), frame in points.group_by(["module", "tp", "pass"], maintain_order=True):
        held_out = np.zeros(len(frame), dtype=bool)
        held_out[np.random.default_rng(0).permutation(len(frame))[: round(len(frame) * _HELD_OUT_SHARE)]] = True
        if (~held_out).sum() < 6 or frame["num_layers"].n_unique() < 2:
            raise UserError(
                f"{module} tp={tp}: {len(frame)} {direction} points at {frame['num_layers'].n_unique()} depth(s) are "
                "too few for a fit; run `dflop profile-costs` again"
            )
        design, seconds = _design(frame), frame["seconds"].to_numpy()
        trial = _fit(design[~held_out], seconds[~held_out])
        errors = np.abs(design[held_out] @ trial / seconds[held_out] - 1)
        error_rows.append(
            {
                "module": module,
                "tp": tp,
                "pass": direction,
                "num_points": len(frame),
                "num_held_out": int(held_out.sum()),
                "median_error": float(np.median(errors)),
                "p95_error": float(np.quantile(errors, 0.95)),
            }
        )
        time_rows += _rows({"module": module, "tp": tp, "pass": direction}, _fit(design, seconds), "s")
        if direction == "forward":
            in_bytes = frame["peak_bytes"].to_numpy().astype(float)
            fitted = _rows({"module": module, "tp": tp}, _fit(design, np.maximum(in_bytes, 1.0)), "bytes")
            sizes = parameters.filter((pl.col("module") == module) & (pl.col("tp") == tp))
            by_part = {row["part"]: row for row in sizes.iter_rows(named=True)}
            memory_rows += [row | {"parameter_bytes": by_part[row["part"]]["parameter_bytes"]} for row in fitted]
            memory_rows.append({"module": module, "tp": tp} | by_part["layer_input"])
    memory_order = ["module", "tp", "part", "parameter_bytes", "const_bytes"]
    memory_order += [column_of(feature, "bytes") for feature in FEATURES]
    return {
        "time_model": pl.DataFrame(time_rows),
        "memory_model": pl.DataFrame([{name: row[name] for name in memory_order} for row in memory_rows]),
        "fit_error": pl.DataFrame(error_rows),
    }


def _design(frame: pl.DataFrame) -> np.ndarray:
    """[num_points, 2 * (1 + num_features)]: the rest's columns, then the same times the number of layers."""
    loads = np.column_stack([np.ones(len(frame)), *(frame[name].to_numpy().astype(float) for name in FEATURES)])
    in_rest = np.array([True, *(name not in _NOT_IN_REST for name in FEATURES)])
    in_layer = np.array([True, *(name not in _NOT_IN_LAYER for name in FEATURES)])
    return np.hstack([loads * in_rest, loads * in_layer * frame["num_layers"].to_numpy()[:, None]])


def _fit(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Non-negative coefficients that minimise the relative error; columns are scaled to be comparable."""
    weighted = design / target[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    coefficients, _ = nnls(weighted / scale, np.ones(len(target)))
    return coefficients / scale


def _rows(keys: dict[str, object], coefficients: np.ndarray, unit: str) -> list[dict[str, object]]:
    width = 1 + len(FEATURES)
    names = [f"const_{unit}", *(column_of(feature, unit) for feature in FEATURES)]
    return [
        keys | {"part": part} | dict(zip(names, map(float, coefficients[start : start + width]), strict=True))
        for part, start in (("rest", 0), ("layer", width))
    ]
