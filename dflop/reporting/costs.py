"""The plot of the costs: measured seconds beside fitted ones, and throughput against load."""

from collections.abc import Mapping

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from dflop.costs import CostModel, Loads, StageKind
from dflop.models.loads import FEATURES, loads_behind, main_load
from dflop.parallelism.layout_key import LayoutKey
from dflop.reporting.style import INK, MODULE_SHADES, MUTED, format_count, heading, say_instead

__all__ = ["costs_height_in", "draw_costs", "measured_points"]

_DEPTH_MARKERS = ("o", "^", "s", "D")
_FORM_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


def costs_height_in(points: pl.DataFrame) -> float:
    return 1.2 + 3.0 * max(1, len(points.select("module", "tp").unique()))


def measured_points(measurements: pl.DataFrame, costs: CostModel) -> pl.DataFrame:
    """The measurements of whole stages and of layers alone, without checkpointing, one row a load and pass: median,
    least and most seconds of the repeats (`seconds`, `least_s`, `most_s`), and the fitted seconds (`fitted_s`)."""
    points = (
        measurements.filter(pl.col("piece").is_in(("whole", "layers")) & ~pl.col("checkpointing"))
        .filter(pl.col("seconds").is_not_null())
        .group_by("module", "tp", "piece", "num_layers", *FEATURES, "pass", maintain_order=True)
        .agg(
            pl.col("seconds").median(),
            pl.col("seconds").min().alias("least_s"),
            pl.col("seconds").max().alias("most_s"),
        )
    )
    fitted = np.zeros(len(points))
    place = np.arange(len(points))
    for keys_of, frame in points.with_columns(place=place).group_by("module", "tp", "piece", "num_layers", "pass"):
        module, tp, piece, depth, direction = keys_of
        loads = Loads(*(frame[name].to_numpy().astype(float) for name in FEATURES))
        ends = {"is_first": piece == "whole", "is_last": piece == "whole"}
        both = costs.stage_time(StageKind(module=module, layout=LayoutKey(tp), num_layers=depth, **ends), loads)
        fitted[frame["place"].to_numpy()] = both[direction == "backward"]
    return points.with_columns(pl.Series("fitted_s", fitted))


def draw_costs(
    figure: Figure,
    points: pl.DataFrame,
    fit_error: pl.DataFrame,
    costs: CostModel,
    meta: Mapping[str, str],
    device: str,
) -> None:
    """Draw the plot. `points` are from `measured_points`, `fit_error` and `meta` from `costs.duckdb`."""
    modules = points.select("module", "tp").unique(maintain_order=True).rows()
    grid = figure.subplots(max(1, len(modules)), 3, squeeze=False, width_ratios=[1, 1, 1.25])
    if not modules:
        for axes in grid[0]:
            say_instead(axes, "nothing was measured")
    errors = {(row["module"], row["tp"], row["pass"]): row for row in fit_error.iter_rows(named=True)}
    for row, (module, tp) in enumerate(modules):
        own = points.filter((pl.col("module") == module) & (pl.col("tp") == tp))
        for column, direction in enumerate(("forward", "backward")):
            whole = own.filter((pl.col("pass") == direction) & (pl.col("piece") == "whole"))
            _parity(grid[row, column], whole, errors.get((module, tp, direction)))
        _throughput(grid[row, 2], own.filter(pl.col("piece") == "layers"), costs)
    finding = "Costs: nothing was measured"
    fit_error = fit_error.filter(pl.col("quantity") == "seconds")
    if len(fit_error):
        least, most = fit_error["median_error"].min(), fit_error["median_error"].max()
        finding = f"On whole stages, which no fit saw, the cost model is off by {least:.0%} to {most:.0%} (median)"
    heading(
        figure,
        finding,
        f"Costs are {meta.get('source', 'measured')}, on {device}. Dots: median of the repeats, bars: their range. "
        "Left: whole stages, from embedding to loss, against the sum of their separately measured parts.",
    )


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
    """Throughput of forward and backward together at the largest measured depth, with a curve for each form of
    microbatch (the length of its segments)."""
    module, tp, depth = points["module"][0], points["tp"][0], points["num_layers"].max()
    load = main_load(module)
    unit = load.removeprefix("num_")
    keys = ["num_layers", *FEATURES]
    both = (
        points.filter(pl.col("num_layers") == depth)
        .group_by(keys, maintain_order=True)
        .agg(pl.col("seconds").sum(), pl.len().alias("num_passes"))
        .filter(pl.col("num_passes") == 2)
        .with_columns(
            # An encoder has one form, whatever the lengths of its runs are.
            length=(pl.col("num_tokens") > 0) * pl.col("sum_sq_tokens") // pl.max_horizontal("num_tokens", 1),
            rate=pl.col(load) / pl.col("seconds"),
        )
        .sort(load)
    )
    if both.is_empty():
        say_instead(axes, "forward and backward were not measured together")
        return
    # Microbatches of a single segment belong to the longest form.
    lengths = both.filter(pl.col("length") < pl.col("num_tokens"))["length"].unique().sort(descending=True).to_list()
    longest = max([both["length"].max(), *lengths])
    forms = sorted({longest, *lengths[-1:]}, reverse=True)
    for index, length in enumerate(forms):
        frame = (
            both.filter(pl.col("length") == length)
            if length != longest
            else both.filter(pl.col("length") == pl.min_horizontal("num_tokens", pl.lit(longest)))
        )
        kind = StageKind(module=module, layout=LayoutKey(tp), num_layers=depth, is_first=False, is_last=False)
        smooth, rate = _fitted_rates(costs, kind, frame, length)
        colour = _shades(module)[1]
        label = "" if len(forms) == 1 else f"segments of {'up to ' * (index == 0)}{length:,}"
        fill = colour if index == 0 else "white"
        marker = _DEPTH_MARKERS[index % len(_DEPTH_MARKERS)]
        axes.plot(smooth, rate, color=colour, linewidth=1.3, linestyle=_FORM_DASHES[index % 3])
        axes.plot(frame[load], frame["rate"], marker, color=colour, markersize=4.5, markerfacecolor=fill, label=label)
    axes.set(
        xscale="log",
        xlabel=f"{unit} a microbatch",
        ylabel=f"{unit}/s, {depth} layer{'s' * (depth > 1)}, forward + backward",
    )
    axes.set_ylim(0, None)
    axes.grid(True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    best = both.sort("rate").row(-1, named=True)
    smallest = both.row(0, named=True)
    axes.set_title(
        f"{_name(module, tp)}: {best['rate'] / smallest['rate']:.1f}x the throughput "
        f"at {best[load]:,} {unit} as at {smallest[load]:,}"
    )
    axes.plot([], [], "-", color=INK, linewidth=1.3, label="fitted")
    axes.plot([], [], "o", color=INK, markersize=4.5, label="measured")
    axes.legend(loc="lower right", ncols=2 if len(forms) > 1 else 1, handletextpad=0.4, columnspacing=1.2)


def _fitted_rates(costs: CostModel, kind: StageKind, frame: pl.DataFrame, length: int) -> tuple[np.ndarray, np.ndarray]:
    """For one form of microbatch, loads over the measured range, and the fitted throughput at each of them."""
    load = main_load(kind.module)
    smooth = np.geomspace(frame[load].min(), frame[load].max(), 60)
    squares = smooth * np.minimum(smooth, length)
    if kind.module != "llm":
        squares = np.interp(smooth, frame[load], frame["sum_sq_tokens"])
    of_form = {load: smooth, "sum_sq_tokens": squares}
    behind = loads_behind(kind.module)
    loads = Loads(*(of_form[name] if name in behind else np.zeros(60) for name in FEATURES))
    return smooth, smooth / sum(costs.stage_time(kind, loads))


def _plain_seconds(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _name(module: str, tp: int) -> str:
    return module if tp == 1 else f"{module} tp{tp}"


def _shades(module: str) -> tuple[str, str]:
    return MODULE_SHADES.get(module, ("#bbbbbb", "#444444"))
