"""The plot of the costs: measured seconds beside fitted ones, and throughput against load."""

from collections.abc import Mapping

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from dflop.costs import CostModel, Loads
from dflop.reporting.style import INK, MODULE_SHADES, MUTED, format_count, heading, say_instead

__all__ = ["costs_height_in", "draw_costs", "measured_points"]

_FEATURES = ("num_items", "num_tokens", "sum_sq_tokens", "num_targets")
_DEPTH_MARKERS = ("o", "^", "s", "D")
_FORM_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


def costs_height_in(points: pl.DataFrame) -> float:
    return 1.2 + 3.0 * max(1, len(points.select("module", "tp").unique()))


def measured_points(measurements: pl.DataFrame, costs: CostModel) -> pl.DataFrame:
    """One row a measured point: median, least and most seconds of its repeats, and the fitted seconds."""
    missing = [pl.lit(0).alias(name) for name in _FEATURES if name not in measurements.columns]
    keys = ["module", "tp", "num_layers", *_FEATURES, "pass"]
    points = (
        measurements.with_columns(missing)
        .group_by(keys, maintain_order=True)
        .agg(
            pl.col("seconds").median(),
            pl.col("seconds").min().alias("least_s"),
            pl.col("seconds").max().alias("most_s"),
        )
    )
    fitted = np.zeros(len(points))
    place = np.arange(len(points))
    for keys_of, frame in points.with_columns(place=place).group_by("module", "tp", "num_layers", "pass"):
        module, tp, depth, direction = keys_of
        loads = Loads(*(frame[name].to_numpy().astype(float) for name in _FEATURES))
        fitted[frame["place"].to_numpy()] = _fitted(costs, module, tp, depth, loads)[direction == "backward"]
    return points.with_columns(pl.Series("fitted_s", fitted))


def draw_costs(
    figure: Figure,
    points: pl.DataFrame,
    fit_error: pl.DataFrame,
    costs: CostModel,
    meta: Mapping[str, str],
    device: str,
) -> None:
    """`points` from `measured_points`; `meta` is that of `costs.duckdb`."""
    modules = points.select("module", "tp").unique(maintain_order=True).rows()
    grid = figure.subplots(max(1, len(modules)), 3, squeeze=False, width_ratios=[1, 1, 1.25])
    if not modules:
        for axes in grid[0]:
            say_instead(axes, "nothing was measured")
    errors = {(row["module"], row["tp"], row["pass"]): row for row in fit_error.iter_rows(named=True)}
    for row, (module, tp) in enumerate(modules):
        own = points.filter((pl.col("module") == module) & (pl.col("tp") == tp))
        for column, direction in enumerate(("forward", "backward")):
            _parity(grid[row, column], own.filter(pl.col("pass") == direction), errors.get((module, tp, direction)))
        _throughput(grid[row, 2], own, costs)
    finding = "Costs: nothing was measured"
    if len(fit_error):
        least, most = fit_error["median_error"].min(), fit_error["median_error"].max()
        finding = f"On points it has not seen, the cost model is off by {least:.0%} to {most:.0%} (median of each pass)"
    heading(
        figure,
        finding,
        f"Costs are {meta.get('source', 'measured')}, on {device}. Dots: median of the repeats, bars: their range. "
        "Held-out error: of the third of the points that a trial fit did not see; the model drawn is fitted to all.",
    )


def _fitted(costs: CostModel, module: str, tp: int, depth: int, loads: Loads) -> tuple[np.ndarray, np.ndarray]:
    return costs.stage_time(module, tp, depth, loads, with_rest=True)


def _parity(axes: Axes, points: pl.DataFrame, error: dict | None) -> None:
    if points.is_empty():
        say_instead(axes, "not measured")
        return
    module, tp, direction = points.select("module", "tp", "pass").row(0)
    colour = _shades(module)[direction == "backward"]
    low = 0.7 * min(points["least_s"].min(), points["fitted_s"].min())
    high = 1.4 * max(points["most_s"].max(), points["fitted_s"].max())
    axes.plot([low, high], [low, high], color=MUTED, linewidth=0.8, zorder=1)
    for marker, depth in zip(_DEPTH_MARKERS, points["num_layers"].unique().sort(), strict=False):
        frame = points.filter(pl.col("num_layers") == depth)
        seconds = frame["seconds"].to_numpy()
        axes.errorbar(
            frame["fitted_s"].to_numpy(),
            seconds,
            yerr=np.abs(np.vstack([seconds - frame["least_s"].to_numpy(), frame["most_s"].to_numpy() - seconds])),
            fmt=marker,
            markersize=4.5,
            color=colour,
            markeredgecolor="white",
            markeredgewidth=0.5,
            ecolor=colour,
            elinewidth=0.8,
            label=f"{depth} layer{'s' if depth > 1 else ''}",
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="fitted seconds", ylabel="measured seconds")
    axes.set_aspect("equal", adjustable="box")
    axes.grid(True)
    _plain_seconds(axes.xaxis)
    _plain_seconds(axes.yaxis)
    name = _name(module, tp)
    title = f"{name} {direction}"
    if error:
        title += f": held-out error {error['median_error']:.0%} (p95 {error['p95_error']:.0%})"
    axes.set_title(title)
    axes.legend(loc="upper left", handletextpad=0.1, borderpad=0)


def _throughput(axes: Axes, points: pl.DataFrame, costs: CostModel) -> None:
    """Forward and backward together, at the largest measured depth; a curve a form of microbatch."""
    module, tp, depth = points["module"][0], points["tp"][0], points["num_layers"].max()
    load, unit = ("num_tokens", "tokens") if module == "llm" else ("num_items", "items")
    keys = ["num_layers", *_FEATURES]
    both = (
        points.filter(pl.col("num_layers") == depth)
        .group_by(keys, maintain_order=True)
        .agg(pl.col("seconds").sum(), pl.len().alias("num_passes"))
        .filter(pl.col("num_passes") == 2)
        .with_columns(
            segments=pl.when(pl.col("sum_sq_tokens") > 0)
            .then((pl.col("num_tokens").pow(2) / pl.col("sum_sq_tokens")).round())
            .otherwise(1)
            .cast(pl.Int64),
            rate=pl.col(load) / pl.col("seconds"),
        )
        .sort(load)
    )
    if both.is_empty():
        say_instead(axes, "forward and backward were not measured together")
        return
    forms = both["segments"].unique().sort()
    for index, num_segments in enumerate(forms):
        frame = both.filter(pl.col("segments") == num_segments)
        smooth = np.geomspace(frame[load].min(), frame[load].max(), 60)
        loads = Loads(
            smooth if module != "llm" else np.zeros(60),
            smooth if module == "llm" else np.zeros(60),
            smooth**2 / num_segments if module == "llm" else np.zeros(60),
            smooth * (frame["num_targets"] / frame[load]).mean(),
        )
        rate = smooth / sum(_fitted(costs, module, tp, depth, loads))
        colour = _shades(module)[1]
        label = "" if len(forms) == 1 else f"{num_segments} segment{'s' if num_segments > 1 else ''}"
        fill = colour if index == 0 else "white"
        marker = _DEPTH_MARKERS[index % len(_DEPTH_MARKERS)]
        axes.plot(smooth, rate, color=colour, linewidth=1.3, linestyle=_FORM_DASHES[index % 3])
        axes.plot(frame[load], frame["rate"], marker, color=colour, markersize=4.5, markerfacecolor=fill, label=label)
    axes.set(xscale="log", xlabel=f"{unit} a microbatch", ylabel=f"{unit}/s, {depth} layers, forward + backward")
    axes.set_ylim(0, None)
    axes.grid(True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    best = both.sort("rate").row(-1, named=True)
    smallest = both.filter(pl.col("segments") == best["segments"]).row(0, named=True)
    axes.set_title(
        f"{_name(module, tp)}: {best['rate'] / smallest['rate']:.1f}x the throughput "
        f"at {best[load]:,} {unit} as at {smallest[load]:,}"
    )
    axes.plot([], [], "-", color=INK, linewidth=1.3, label="fitted")
    axes.plot([], [], "o", color=INK, markersize=4.5, label="measured")
    axes.legend(loc="lower right", ncols=2 if len(forms) > 1 else 1, handletextpad=0.4, columnspacing=1.2)


def _plain_seconds(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _name(module: str, tp: int) -> str:
    return module if tp == 1 else f"{module} tp{tp}"


def _shades(module: str) -> tuple[str, str]:
    return MODULE_SHADES.get(module, ("#bbbbbb", "#444444"))
