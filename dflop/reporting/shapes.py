"""The plot of the data's shapes: how much samples differ, and how far items and LLM tokens go together."""

from collections.abc import Mapping

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from dflop.reporting.style import INK, MODALITY_COLOURS, MUTED, format_count, heading
from dflop.store import MODALITIES

__all__ = ["draw_shapes", "items_tokens_correlation", "shapes_height_in"]

_QUANTITIES = {"num_items": "encoder items", "text_tokens": "text tokens", "llm_tokens": "LLM tokens"}
_NUM_BINS = 28
_MOST_DOTS = 2500
_MARKERS = dict(zip(MODALITIES, "ovsDP^", strict=True))


def shapes_height_in(samples: pl.DataFrame) -> float:
    return 2.4 + 0.8 * max(3, len(_groups(samples)))


def draw_shapes(figure: Figure, samples: pl.DataFrame, rejects: Mapping[str, int]) -> None:
    """`rejects` counts the rejected records by reason."""
    groups = _groups(samples)
    has_items = bool(samples["num_items"].sum())
    left, right = figure.subfigures(1, 2, width_ratios=[1.75, 1]) if has_items else (figure, None)
    grid = left.subplots(len(groups), len(_QUANTITIES), sharex="col", squeeze=False)
    for column, (quantity, name) in enumerate(_QUANTITIES.items()):
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
                axes.set_ylabel(
                    f"{group.replace('_', ' ')}\n{len(frame):,}", rotation=0, ha="right", va="center", labelpad=8
                )
    if right:
        _scatter(right.subplots(), samples)
    heading(figure, _finding(samples), _note(samples, rejects))


def items_tokens_correlation(samples: pl.DataFrame) -> float | None:
    """Pearson's r over all samples; None where one of the two does not vary."""
    items, tokens = samples["num_items"].to_numpy(), samples["llm_tokens"].to_numpy()
    if len(samples) < 2 or not items.std() or not tokens.std():
        return None
    return float(np.corrcoef(items, tokens)[0, 1])


def _groups(samples: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """All samples first, unless there is one modality only, then each modality."""
    parts = samples.partition_by("modality", as_dict=True)
    groups = {name: parts[name,] for name in MODALITIES if (name,) in parts}
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
        edges = np.unique(np.round(np.geomspace(*limits, _NUM_BINS))) - 0.5
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
    # Samples that share their counts would hide each other: dots are moved a little.
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


def _count_axis(axis: Axis, zero_at: float | None = None) -> None:
    """Ticks at 1, 2, 5, 10 …; on a logarithmic axis nothing is drawn at zero, so 0 stands at `zero_at`."""
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in LogLocator(subs=(1, 2, 5)).tick_values(max(low, 0.7), high) if tick >= 1]
    if high / max(low, 0.7) > 100:
        ticks = [tick for tick in ticks if f"{tick:.0e}"[0] == "1"]
    axis.set_major_locator(FixedLocator([zero_at, *ticks] if zero_at and low <= zero_at else ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value == zero_at else f"{value:,.0f}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def _finding(samples: pl.DataFrame) -> str:
    if not len(samples):
        return "No record can be used"
    middle, high = np.quantile(samples["llm_tokens"].to_numpy(), [0.5, 0.95])
    finding = f"Samples differ: the 95th percentile has {high / max(middle, 1):.1f}x the LLM tokens of the median"
    items = samples["num_items"].to_numpy()
    if items.max():
        share = np.sort(items)[::-1][: max(1, len(items) // 10)].sum() / items.sum()
        finding += f", and a tenth of them holds {share:.0%} of the encoder items"
    return finding


def _note(samples: pl.DataFrame, rejects: Mapping[str, int]) -> str:
    note = f"Measured from headers and text. {len(samples):,} samples, "
    if rejects:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejects.items())
        note += f"{sum(rejects.values()):,} records rejected ({reasons})."
    else:
        note += "no record rejected."
    num_audio = int((samples["audio_tokens"] > 0).sum()) if "audio_tokens" in samples.columns else 0
    if num_audio:
        note += f" {num_audio:,} with audio are counted here but not trained on."
    if not samples["num_items"].sum():
        note += " No sample has encoder items."
    return note + " Solid line: median (p50), dashed: 95th percentile (p95)."
