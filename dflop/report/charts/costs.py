"""The costs: measured seconds beside fitted ones, and throughput against load."""

import numpy as np
import polars as pl

from dflop.costs import CostModel, Loads, StageKind, launch_bound_load
from dflop.models.loads import FEATURES, loads_behind, main_load
from dflop.plan.layout_key import LayoutKey
from dflop.report.facts import Facts
from dflop.report.picture import Panel, Picture, hover, kind, layer, log_axis, number, rows
from dflop.report.style import module_colour

__all__ = ["draw", "measured_points"]

_SHAPES = ("circle", "triangle-up", "square", "diamond")
_DOT = {"filled": True, "size": 45, "opacity": 1}
_THOUSANDS = {"labelExpr": "format(datum.value, '~s')"}
_DASHES = ([1, 0], [6, 3], [2, 2])


def draw(facts: Facts) -> Picture:
    run = facts.run
    points = measured_points(run.measurements, run.costs)
    panels = []
    for module, tp in points.select("module", "tp").unique(maintain_order=True).rows():
        layout_points = points.filter((pl.col("module") == module) & (pl.col("tp") == tp))
        errors = run.fit_error.filter((pl.col("module") == module) & (pl.col("tp") == tp))
        panels += [_parity(layout_points.filter(pl.col("piece") == "whole"), errors, module, tp)]
        panels += [_throughput(layout_points.filter(pl.col("piece") == "layers"), run.costs, module, tp)]
    seconds = run.fit_error.filter(pl.col("quantity") == "seconds")
    finding = "Costs: nothing was measured"
    if len(seconds):
        least, most = seconds["median_error"].min(), seconds["median_error"].max()
        finding = f"On whole stages, which no fit saw, the cost model is off by {least:.0%} to {most:.0%} (median)"
    note = (
        f"Costs are {run.costs_source}, on {run.device_name}. Dots: median of the repeats, bars: their range. "
        "Left: whole stages, from embedding to loss, against the sum of their separately measured parts."
    )
    return Picture(section="costs", finding=finding, note=note, panels=[panel for panel in panels if panel], columns=2)


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


def _parity(points: pl.DataFrame, errors: pl.DataFrame, module: str, tp: int) -> Panel | None:
    """Measured against fitted seconds of whole stages, forward and backward."""
    if points.is_empty():
        return None
    low = 0.7 * min(points["least_s"].min(), points["fitted_s"].min())
    high = 1.4 * max(points["most_s"].max(), points["fitted_s"].max())
    depths = points["num_layers"].unique().sort().to_list()
    labels = {depth: f"{depth} layer{'s' * (depth > 1)}" for depth in depths}
    table = points.select("fitted_s", "seconds", "least_s", "most_s", pl.col("pass").alias("direction")).with_columns(
        depth=pl.Series([labels[depth] for depth in points["num_layers"]])
    )
    x, y = (number(name) | log_axis(low, high) for name in ("fitted_s", "seconds"))
    x["title"], y["title"] = "fitted seconds", "measured seconds"
    colours = kind("direction", {name: module_colour(module, name) for name in ("forward", "backward")})
    shapes = kind("depth", dict(zip(labels.values(), _SHAPES * len(labels), strict=False)))
    said = hover(direction="", depth="", fitted_s=".3~g", seconds=".3~g")
    ends = {"values": [{"low": low, "high": high}]}
    x_low, y_low, y_least = x | {"field": "low"}, y | {"field": "low"}, y | {"field": "least_s"}
    view = {
        "data": rows(table),
        "layer": [
            layer("rule", data=ends, x=x_low, x2="high", y=y_low, y2="high"),
            layer("rule", x=x, y=y_least, y2="most_s", color=colours),
            layer("point", look=_DOT, x=x, y=y, color=colours, shape=shapes, tooltip=said),
        ],
    }
    of_passes = [
        f"{row['pass']} {row['median_error']:.0%} (p95 {row['p95_error']:.0%})"
        for row in errors.filter(pl.col("quantity") == "seconds").iter_rows(named=True)
    ]
    title = f"{_name(module, tp)}: held-out error {', '.join(of_passes) or 'unknown'}"
    return Panel(title=title, view=view, height=250)


def _throughput(points: pl.DataFrame, costs: CostModel, module: str, tp: int) -> Panel | None:
    """Throughput of forward and backward together at the largest measured depth, with a curve for each form of
    microbatch (the length of its segments)."""
    if points.is_empty():
        return None
    depth, load = points["num_layers"].max(), main_load(module)
    unit = load.removeprefix("num_")
    both = (
        points.filter(pl.col("num_layers") == depth)
        .group_by(["num_layers", *FEATURES], maintain_order=True)
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
        return None
    # Microbatches of a single segment belong to the longest form.
    lengths = both.filter(pl.col("length") < pl.col("num_tokens"))["length"].unique().sort(descending=True).to_list()
    longest = max([both["length"].max(), *lengths])
    forms = sorted({longest, *lengths[-1:]}, reverse=True)
    stage = StageKind(module=module, layout=LayoutKey(tp), num_layers=depth, is_first=False, is_last=False)
    tables: list[pl.DataFrame] = []
    names = []
    for index, length in enumerate(forms):
        of_form = length if length != longest else pl.min_horizontal("num_tokens", pl.lit(longest))
        frame = both.filter(pl.col("length") == of_form)
        names.append("all" if len(forms) == 1 else f"segments of {'up to ' * (index == 0)}{length:,}")
        smooth, rate = _fitted_rates(costs, stage, frame, length)
        fit = pl.DataFrame({"load": smooth, "rate": rate, "form": names[-1], "source": "fitted"})
        measured = frame.select(pl.col(load).cast(float).alias("load"), "rate", form=pl.lit(names[-1]))
        tables += [fit, measured.with_columns(source=pl.lit("measured"))]
    low, high = both[load].min(), both[load].max()
    x = number("load", f"{unit} a microbatch") | log_axis(0.9 * low, 1.1 * high)
    y = number("rate", f"{unit}/s, {depth} layer{'s' * (depth > 1)}, both passes", axis=_THOUSANDS)
    legend = {} if len(forms) > 1 else {"legend": None}
    dashes, shapes = (kind("form", dict(zip(names, of, strict=False)), **legend) for of in (_DASHES, _SHAPES))
    look, said = {"color": module_colour(module)}, hover(form="", source="", load=",.0f", rate=",.0f")
    line = layer("line", look=look | {"strokeWidth": 1.5}, x=x, y=y, strokeDash=dashes)
    dots = layer("point", look=look | _DOT, x=x, y=y, shape=shapes, tooltip=said)
    for mark, source in ((line, "fitted"), (dots, "measured")):
        mark["transform"] = [{"filter": f"datum.source == '{source}'"}]
    view = {"data": rows(pl.concat(tables)), "layer": [line, dots]}
    best, smallest = both.sort("rate").row(-1, named=True), both.row(0, named=True)
    title = (
        f"{_name(module, tp)}: {best['rate'] / smallest['rate']:.1f}x the throughput "
        f"at {best[load]:,} {unit} as at {smallest[load]:,}; line: fitted, dots: measured"
    )
    if (least := launch_bound_load(costs, module, LayoutKey(tp))) is not None:
        title += f"; below {least:,.0f} {unit} a microbatch takes the same time (launches bind it)"
    return Panel(title=title, view=view, height=250)


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


def _name(module: str, tp: int) -> str:
    return module if tp == 1 else f"{module} tp{tp}"
