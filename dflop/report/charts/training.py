"""The training run: loss, throughput, and step time and idle beside what was predicted."""

import polars as pl

from dflop.report.facts import Facts
from dflop.report.picture import Panel, Picture, hover, kind, layer, number, rows
from dflop.report.style import colour, format_seconds
from dflop.train import NUM_WARMUP_STEPS

__all__ = ["draw", "draw_training"]

_MOST_POINTS = 600
_DASHED = [5, 3]


def draw(facts: Facts) -> Picture | None:
    return draw_training(facts.run.trained.metrics) if facts.run.trained else None


def draw_training(metrics: pl.DataFrame) -> Picture:
    """The picture of the fields of `metrics.jsonl`, one row a step."""
    steady = metrics[NUM_WARMUP_STEPS:] if len(metrics) > NUM_WARMUP_STEPS else metrics
    metrics = metrics.with_columns(tokens_per_s=pl.col("num_tokens") / pl.col("step_s"))
    drawn, thinned = _thinned(metrics)
    width = max(1, min(5, len(metrics) // 2))
    first, last = metrics["loss"].head(width).mean(), metrics["loss"].tail(width).mean()
    overall = steady["num_tokens"].sum() / steady["step_s"].sum()
    took, expected = steady["pipeline_s"].median(), steady["predicted_step_s"].median()
    idle = f"Idle: {steady['idle'].mean():.0%} measured"
    if "predicted_idle" in drawn.columns:
        idle += f", {steady['predicted_idle'].mean():.0%} predicted"
    panels = [
        _panel(drawn, f"Loss {first:.3g} → {last:.3g} (measured)", "nats a target token", "loss", "evaluation_loss"),
        _panel(drawn, f"Throughput: {overall:,.0f} tokens/s (measured)", "LLM tokens a second", "tokens_per_s"),
        _panel(
            drawn,
            f"Step time: median {format_seconds(took)} measured, {format_seconds(expected)} predicted",
            "seconds a step",
            "pipeline_s",
            "predicted_step_s",
        ),
        _panel(drawn, idle, "idle share of rank time", "idle", "predicted_idle"),
    ]
    return Picture(
        section="training",
        finding=f"{len(metrics):,} steps: a step takes {took / expected:.2f}x what was predicted",
        note=_note(len(metrics) - len(steady), width, thinned),
        panels=panels,
        columns=2,
    )


def _panel(drawn: pl.DataFrame, title: str, unit: str, *columns: str) -> Panel:
    """Measured values in grey and, if there are enough, their moving mean or median over them; single slow steps do
    not move a median. What was predicted is dashed."""
    columns = tuple(name for name in columns if name in drawn.columns and drawn[name].dtype != pl.Null)
    is_loss, window = columns[0] == "loss", _window(len(drawn))
    curves = {"measured": (drawn[columns[0]], colour("measured" if window < 3 else "raw"), [1, 0])}
    if window >= 3:
        rolling = drawn[columns[0]].rolling_mean if is_loss else drawn[columns[0]].rolling_median
        smooth = rolling(window, center=True, min_samples=window // 2 + 1)
        name = f"measured, {'mean' if is_loss else 'median'} of {window} steps"
        curves[name] = (smooth, colour("measured"), [1, 0])
    for column in columns[1:]:
        name, of, dash = ("evaluation set", "evaluated", [1, 0]) if is_loss else ("predicted", "predicted", _DASHED)
        curves[name] = (drawn[column], colour(of), dash)
    table = pl.concat(
        pl.DataFrame({"step": drawn["step"], "value": values.cast(float), "curve": name})
        for name, (values, *_) in curves.items()
    ).drop_nulls("value")
    top = _top(drawn, *columns)
    percent = columns[0] == "idle"
    scale = {"zero": False} if is_loss else {"domain": [0, top], "nice": False}
    x = number("step", "step", scale={"nice": False}, axis={"format": ",d", "tickMinStep": 1, "grid": False})
    if len(drawn) < 12:
        x["axis"]["values"] = drawn["step"].to_list()
    form = {"idle": ".0%", "tokens_per_s": "~s"}.get(columns[0], "~g")
    y = number("value", unit, scale=scale, axis={"labelExpr": f"format(datum.value, '{form}')"})
    legend = {"symbolType": "stroke"} if len(curves) > 1 else None
    colours = kind("curve", {name: shade for name, (_, shade, _) in curves.items()}, legend=legend)
    dashes = kind("curve", {name: pattern for name, (*_, pattern) in curves.items()}, legend=legend)
    look = {"clip": True, "strokeWidth": 1.6, "point": {"size": 30} if len(drawn) < 12 else False}
    said = hover(curve="", step=",d", value=".1%" if percent else ",.4~g")
    layers = [
        layer("line", look=look, x=x, y=y, color=colours, strokeDash=dashes),
        # Points that cannot be seen, for what is said of a step that is pointed at.
        layer("point", look={"clip": True, "opacity": 0, "size": 90}, x=x, y=y, tooltip=said),
    ]
    above = drawn.filter(pl.col(columns[0]) > top) if columns[0] in ("pipeline_s", "idle") else drawn[:0]
    if len(above):
        # A few slow first steps would flatten all others: they leave the axis and are told instead.
        row = above.row(0, named=True)
        more = f" (and {len(above) - 1} more)" if len(above) > 1 else ""
        value = f"{row[columns[0]]:.0%}" if percent else format_seconds(row[columns[0]])
        side = {"align": "right", "dx": -6} if row["step"] > drawn["step"].max() * 0.7 else {"align": "left", "dx": 6}
        told = {"values": [{"step": row["step"], "words": f"step {row['step']}: {value}{more}"}]}
        look = side | {"color": colour("muted")}
        layers.append(layer("text", look=look, data=told, x=x, y={"value": 8}, text="words"))
    return Panel(title=title, view={"data": rows(table), "layer": layers}, height=200)


def _top(drawn: pl.DataFrame, *columns: str) -> float:
    """The end of the axis: above nearly all steps after the warm-up, and above all steps if the largest is not far
    away."""
    warm = drawn[NUM_WARMUP_STEPS:] if len(drawn) > NUM_WARMUP_STEPS else drawn
    usual = max(warm[column].quantile(0.95, "linear") or 0.0 for column in columns)
    largest = max(drawn[column].max() or 0.0 for column in columns)
    return 1.15 * (largest if largest <= 2 * usual else 1.25 * usual) or 1.0


def _window(num_points: int) -> int:
    """The number of points in the moving window: about a tenth of all, and odd; 1 for runs too short to smooth."""
    return 2 * (num_points // 20) + 1


def _thinned(metrics: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Means over neighbouring steps, so that the plot of a long run is a small file. Also returns the number of steps
    that a point is the mean of."""
    width = -(-len(metrics) // _MOST_POINTS)
    if width == 1:
        return metrics, 1
    numbers = [name for name, dtype in metrics.schema.items() if dtype.is_numeric() and name != "step"]
    place = pl.int_range(pl.len()) // width
    means = metrics.group_by(place.alias("place"), maintain_order=True).agg(
        pl.col("step").min(), pl.col(numbers).mean()
    )
    return means, width


def _note(num_left_out: int, num_loss_steps: int, thinned: int) -> str:
    ends = f"of the first and last {num_loss_steps} steps" if num_loss_steps > 1 else "of the first and last step"
    note = f"Loss in the title: mean {ends}."
    if num_left_out:
        note += f" The other titles leave out the first {num_left_out} steps, which warm up."
    return note + (f" Every point is the mean of {thinned} steps." if thinned > 1 else "")
