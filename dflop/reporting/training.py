"""The plot of the training run: loss, throughput, and step time and idle beside what was predicted."""

from collections.abc import Callable
from typing import Literal

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dflop.reporting.style import EVALUATED, MEASURED, MUTED, PREDICTED, format_seconds, heading
from dflop.training import NUM_WARMUP_STEPS

__all__ = ["draw_training"]

_MOST_POINTS = 1500


def draw_training(figure: Figure, metrics: pl.DataFrame) -> None:
    """Draw the plot. `metrics` has the fields of `metrics.jsonl`, one row a step."""
    steady = metrics[NUM_WARMUP_STEPS:] if len(metrics) > NUM_WARMUP_STEPS else metrics
    metrics = metrics.with_columns(tokens_per_s=pl.col("num_tokens") / pl.col("step_s"))
    drawn, thinned = _thinned(metrics)
    (loss, rate), (seconds, idle) = figure.subplots(2, 2, sharex=True)

    width = max(1, min(5, len(metrics) // 2))
    first, last = metrics["loss"].head(width).mean(), metrics["loss"].tail(width).mean()
    _measured_line(loss, drawn, "loss", "mean")
    evaluated = metrics.filter(pl.col("evaluation_loss").is_not_null()) if "evaluation_loss" in metrics.columns else []
    if len(evaluated):
        loss.plot(
            evaluated["step"].to_numpy(),
            evaluated["evaluation_loss"].to_numpy(),
            "D-",
            color=EVALUATED,
            markersize=3.5,
            linewidth=1.0,
            label="evaluation set",
        )
    loss.set(title=f"Loss {first:.3g} → {last:.3g} (measured)", ylabel="nats a target token")

    overall = steady["num_tokens"].sum() / steady["step_s"].sum()
    _measured_line(rate, drawn, "tokens_per_s")
    rate.set(title=f"Throughput: {overall:,.0f} tokens/s (measured)", ylabel="LLM tokens a second")
    rate.set_ylim(0, _top(drawn, "tokens_per_s"))
    rate.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))

    took, expected = steady["pipeline_s"].median(), steady["predicted_step_s"].median()
    _measured_line(seconds, drawn, "pipeline_s")
    _predicted_line(seconds, drawn, "predicted_step_s")
    _cut_off(seconds, drawn, ["pipeline_s", "predicted_step_s"], format_seconds)
    seconds.set(
        title=f"Step time: median {format_seconds(took)} measured, {format_seconds(expected)} predicted",
        xlabel="step",
        ylabel="seconds a step",
    )

    share = steady["idle"].mean()
    title = f"Idle: {share:.0%} measured"
    _measured_line(idle, drawn, "idle")
    if "predicted_idle" in drawn.columns:
        _predicted_line(idle, drawn, "predicted_idle")
        title += f", {steady['predicted_idle'].mean():.0%} predicted"
    _cut_off(idle, drawn, ["idle", "predicted_idle"], lambda value: f"{value:.0%}")
    idle.set(title=title, xlabel="step", ylabel="idle share of rank time")
    idle.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))

    for axes in (loss, rate, seconds, idle):
        axes.grid(True)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (loss, seconds):
        axes.legend(loc="best", handlelength=1.6)
    heading(
        figure,
        f"{len(metrics):,} steps: a step takes {took / expected:.2f}x what was predicted",
        _note(len(metrics) - len(steady), width, thinned),
    )


def _measured_line(
    axes: Axes, drawn: pl.DataFrame, column: str, smoothing: Literal["mean", "median"] = "median"
) -> None:
    """Draw the raw values and, if there are enough, their moving mean or median. Single slow steps do not move a
    median."""
    steps, values = drawn["step"].to_numpy(), drawn[column].to_numpy()
    window = _window(len(drawn))
    if window < 3:
        axes.plot(steps, values, "o-", color=MEASURED, markersize=4, linewidth=1.2, label="measured")
        return
    rolling = drawn[column].rolling_mean if smoothing == "mean" else drawn[column].rolling_median
    smooth = rolling(window, center=True, min_samples=window // 2 + 1).to_numpy()
    axes.plot(steps, values, color="#b5b5b5", linewidth=0.9, label="measured")
    axes.plot(steps, smooth, color=MEASURED, linewidth=1.6, label=f"measured, {smoothing} of {window} steps")


def _predicted_line(axes: Axes, drawn: pl.DataFrame, column: str) -> None:
    axes.plot(
        drawn["step"].to_numpy(),
        drawn[column].to_numpy(),
        color=PREDICTED,
        linewidth=1.1,
        linestyle=(0, (4, 1.5)),
        label="predicted",
    )


def _cut_off(axes: Axes, drawn: pl.DataFrame, columns: list[str], written: Callable[[float], str]) -> None:
    """End the axis above the usual values, because slow first steps would flatten the rest. The first value above the
    axis is written as text."""
    top = _top(drawn, *(column for column in columns if column in drawn.columns))
    axes.set_ylim(0, top)
    above = drawn.filter(pl.col(columns[0]) > top)
    if len(above):
        row = above.row(0, named=True)
        more = f" (and {len(above) - 1} more)" if len(above) > 1 else ""
        is_late = row["step"] > drawn["step"].max() * 0.7
        axes.annotate(
            f"step {row['step']}: {written(row[columns[0]])}{more}",
            (row["step"], 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(-8 if is_late else 8, 0),
            textcoords="offset points",
            ha="right" if is_late else "left",
            va="top",
            fontsize=8,
            color=MUTED,
        )


def _top(drawn: pl.DataFrame, *columns: str) -> float:
    """The end of the axis: above nearly all steps after the warm-up, and above all steps if the largest is not far
    away."""
    warm = drawn[NUM_WARMUP_STEPS:] if len(drawn) > NUM_WARMUP_STEPS else drawn
    usual = max(warm[column].quantile(0.95, "linear") for column in columns)
    largest = max(drawn[column].max() for column in columns)
    return 1.15 * (largest if largest <= 2 * usual else 1.25 * usual) or 1.0


def _window(num_points: int) -> int:
    """The number of points in the moving window: about a tenth of all, and odd; 1 for runs too short to smooth."""
    return 2 * (num_points // 20) + 1


def _thinned(metrics: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Means over neighbouring steps, so that the plot of a long run is a small file; and how many steps each point
    is of."""
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
