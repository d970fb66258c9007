"""The plot of the shapes: how much samples differ, how items and LLM tokens correlate, and what was rejected."""

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from dflop.reporting.style import INK, MODALITY_COLOURS, MUTED, PALE, format_count, heading, say_instead
from dflop.store import MODALITIES

__all__ = ["draw_shapes", "items_tokens_correlation", "shapes_finding", "shapes_height_in"]

_QUANTITIES = {
    "num_items": "encoder items",
    "vision_tokens": "vision tokens",
    "audio_s": "seconds of sound",
    "text_tokens": "text tokens",
    "llm_tokens": "LLM tokens",
}
_NUM_BINS = 28
_MOST_DOTS = 2500
_MOST_SOURCES = 8
_MARKERS = dict(zip(MODALITIES, "ovsDP^", strict=True))
_LONGEST_EXAMPLE = 92
# Samples are said to differ if the 95th percentile is this many times the median, or if a tenth of the samples holds
# this many tenths of the items.
_MUCH = 1.5


def shapes_height_in(samples: pl.DataFrame, rejects: pl.DataFrame) -> float:
    return sum(_heights_in(samples, rejects))


def draw_shapes(figure: Figure, samples: pl.DataFrame, rejects: pl.DataFrame) -> None:
    """Draw the plot from the tables `samples` and `rejects` of `shapes.duckdb`."""
    has_items, has_rejects = bool(samples["num_items"].sum()), bool(len(rejects))
    top, below = figure, None
    if has_items or has_rejects:
        top, below = figure.subfigures(2, 1, height_ratios=_heights_in(samples, rejects))
    _draw_spread(top, samples)
    if has_items:
        left, below = below.subfigures(1, 2, width_ratios=[1, 1.4])
        _scatter(left.subplots(), samples)
    if has_rejects:
        _rejects(below.subplots(), rejects, len(samples))
    elif has_items:
        say_instead(below.subplots(), "No record was rejected.")
    heading(figure, shapes_finding(samples), _note(samples, rejects))


def _heights_in(samples: pl.DataFrame, rejects: pl.DataFrame) -> tuple[float, float]:
    """The heights in inches of the histograms, and of the panels below them."""
    below = max(3.4 if samples["num_items"].sum() else 0.0, 0.8 + 0.55 * rejects["reason"].n_unique())
    return 1.2 + 0.75 * max(2, len(_groups(samples))), below if len(rejects) or samples["num_items"].sum() else 0.0


def _draw_spread(figure: Figure | SubFigure, samples: pl.DataFrame) -> None:
    groups = _groups(samples)
    quantities = {key: name for key, name in _QUANTITIES.items() if samples[key].sum() or key == "llm_tokens"}
    grid = figure.subplots(len(groups), len(quantities), sharex="col", squeeze=False)
    for column, (quantity, name) in enumerate(quantities.items()):
        present = samples[quantity].filter(samples[quantity] > 0)
        limits = (0.7 * present.min(), 1.4 * present.max()) if len(present) else (0.7, 1.4)
        for row, (group, frame) in enumerate(groups.items()):
            axes = grid[row, column]
            _histogram(axes, frame[quantity].to_numpy(), limits, MODALITY_COLOURS.get(group, "#444444"))
            if not len(present):
                axes.set_xticks([])
            if row == 0:
                axes.set_title(f"{name} a sample")
            if column == 0:
                label = _shortened(group if group.startswith("from ") else group.replace("_", " "), 24)
                axes.set_ylabel(f"{label}\n{len(frame):,}", rotation=0, ha="right", va="center", labelpad=8)


def items_tokens_correlation(samples: pl.DataFrame) -> float | None:
    """Pearson's r of items and LLM tokens over all samples; None if one of the two does not vary."""
    items, tokens = samples["num_items"].to_numpy(), samples["llm_tokens"].to_numpy()
    if len(samples) < 2 or not items.std() or not tokens.std():
        return None
    return float(np.corrcoef(items, tokens)[0, 1])


def _groups(samples: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """All samples, then those of each modality and of the largest sources, if there are several."""
    modalities = samples.partition_by("modality", as_dict=True)
    groups = {name: modalities[name,] for name in MODALITIES if (name,) in modalities}
    sources = sorted(samples.partition_by("source", as_dict=True).items(), key=lambda item: (-len(item[1]), item[0]))
    if len(sources) > 1:
        groups |= {f"from {name}": frame for (name,), frame in sources[:_MOST_SOURCES]}
    return groups if len(groups) == 1 else {"all": samples, **groups}


def _histogram(axes: Axes, values: np.ndarray, limits: tuple[float, float], colour: str) -> None:
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.set_xscale("log")
    axes.set_xlim(limits)
    _count_axis(axes.xaxis)
    present = values[values > 0]
    said = []
    if len(present):
        edges = np.geomspace(*limits, _NUM_BINS)
        if values.dtype.kind == "i":
            edges = np.unique(np.round(edges)) - 0.5
        counts, _ = np.histogram(present, edges)
        axes.bar(edges[:-1], counts / counts.max(), np.diff(edges), align="edge", color=colour, linewidth=0)
        middle, high = np.quantile(values, [0.5, 0.95])
        for value, dashes in ((middle, "-"), (high, (0, (2, 1.5)))):
            if value > 0:
                axes.plot([value, value], [0, 1.08], color=INK, linewidth=1.1, linestyle=dashes)
        said.append(f"p50 {format_count(middle)} · p95 {format_count(high)}")
    if len(present) < len(values):
        said.append(f"{1 - len(present) / len(values):.0%} none" if len(present) else "none")
    axes.set_ylim(0, 1.45)
    axes.text(0.015, 0.96, ", ".join(said), transform=axes.transAxes, va="top", fontsize=8, color=MUTED)


def _scatter(axes: Axes, samples: pl.DataFrame) -> None:
    correlation = items_tokens_correlation(samples)
    chosen = samples
    if len(samples) > _MOST_DOTS:
        chosen = samples[np.sort(np.random.default_rng(0).permutation(len(samples))[:_MOST_DOTS])]
    # Dots are moved a little, because samples with equal counts would hide each other.
    jitter = np.random.default_rng(0).normal(0, 0.02, (len(chosen), 2))
    chosen = chosen.with_columns(
        pl.Series("x", np.maximum(chosen["num_items"].to_numpy(), 0.5) * np.exp(jitter[:, 0])),
        pl.Series("y", np.maximum(chosen["llm_tokens"].to_numpy(), 1) * np.exp(jitter[:, 1])),
    )
    for modality in MODALITIES:
        frame = chosen.filter(pl.col("modality") == modality)
        if len(frame):
            axes.scatter(
                frame["x"],
                frame["y"],
                s=13,
                marker=_MARKERS[modality],
                color=MODALITY_COLOURS[modality],
                alpha=0.6,
                linewidths=0,
                label=modality.replace("_", " "),
            )
    axes.set(xscale="log", yscale="log", xlabel="encoder items a sample", ylabel="LLM tokens a sample")
    axes.grid(True)
    _count_axis(axes.xaxis, zero_at=0.5)
    _count_axis(axes.yaxis)
    title = "Items and LLM tokens"
    if correlation is not None:
        title += f": correlation r = {correlation:.2f}"
    if len(chosen) < len(samples):
        title += f" ({len(chosen):,} of {len(samples):,} drawn)"
    axes.set_title(title)
    axes.legend(loc="best", handletextpad=0.2, labelspacing=0.35)


def _rejects(axes: Axes, rejects: pl.DataFrame, num_samples: int) -> None:
    """A bar for each reason, with the detail of one of its records below."""
    reasons = rejects.group_by("reason", maintain_order=True).agg(
        pl.len(), pl.col("source").first(), pl.col("row").first(), pl.col("detail").first()
    )
    reasons = reasons.sort("len", "reason", descending=[True, False])
    places = np.arange(len(reasons))
    axes.barh(places, reasons["len"], height=0.34, color=PALE)
    for place, (_, count, source, row, detail) in zip(places, reasons.rows(), strict=True):
        axes.text(0, place, f" {count:,}", va="center")
        example = _shortened(f"{source}, row {row}: {detail}", _LONGEST_EXAMPLE)
        said = axes.text(0, place + 0.4, f" {example}", va="center", fontsize=8, color=MUTED, parse_math=False)
        said.set_in_layout(False)
    axes.set_yticks(places, reasons["reason"])
    axes.set_ylim(len(reasons) - 0.2, -0.5)
    axes.set_xticks([])
    for side in ("bottom", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"Rejected: {len(rejects):,} of {num_samples + len(rejects):,} records, one example a reason")


def _count_axis(axis: Axis, zero_at: float | None = None) -> None:
    """Ticks at 1, 2, 5, 10 … A logarithmic axis has no zero, so the tick of 0 is drawn at `zero_at`."""
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in LogLocator(subs=(1, 2, 5)).tick_values(max(low, 0.7), high) if tick >= 1]
    if high / max(low, 0.7) > 100:
        ticks = [tick for tick in ticks if f"{tick:.0e}"[0] == "1"]
    axis.set_major_locator(FixedLocator([zero_at, *ticks] if zero_at and low <= zero_at else ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value == zero_at else f"{value:,.0f}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def _shortened(text: str, length: int) -> str:
    """The text in at most `length` characters, with `?` for characters that an SVG may not hold."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= length else text[: length - 1] + "…"


def shapes_finding(samples: pl.DataFrame) -> str:
    """A sentence on how much samples differ."""
    if not len(samples):
        return "No record can be used"
    middle, high = np.quantile(samples["llm_tokens"].to_numpy(), [0.5, 0.95])
    times = high / max(middle, 1)
    differ = times >= _MUCH
    verdict = "Samples differ" if differ else "Samples are much alike"
    finding = f"{verdict}: the 95th percentile has {times:.1f}x the LLM tokens of the median"
    items = samples["num_items"].to_numpy()
    if len(items) >= 10 and items.max():
        share = np.sort(items)[::-1][: len(items) // 10].sum() / items.sum()
        finding += f", {'and' if differ == (share >= _MUCH / 10) else 'but'} a tenth of them holds {share:.0%} of the "
        finding += "encoder items"
    return finding


def _note(samples: pl.DataFrame, rejects: pl.DataFrame) -> str:
    note = f"Measured from headers and text. {len(samples):,} samples, "
    note += f"{len(rejects):,} record{'s' * (len(rejects) > 1)} rejected." if len(rejects) else "no record rejected."
    num_audio = int((samples["audio_tokens"] > 0).sum())
    if num_audio:
        note += f" {num_audio:,} with audio are counted here, but only models with an audio encoder train on them."
    if not samples["num_items"].sum():
        note += " No sample has encoder items."
    if (num_sources := samples["source"].n_unique()) > _MOST_SOURCES:
        note += f" The {_MOST_SOURCES} largest of {num_sources} sources are drawn."
    return note + " Solid line: median (p50), dashed: 95th percentile (p95)."
