"""How much samples differ, how items and LLM tokens correlate, and what was rejected."""

from typing import Any

import numpy as np
import polars as pl

from dflop.report.facts import Facts
from dflop.report.picture import Panel, Picture, as_given, hover, kind, layer, log_axis, names, number, rows
from dflop.report.style import MODALITY_COLOURS, colour, format_count
from dflop.store import MODALITIES

__all__ = ["draw", "draw_shapes", "groups_of", "items_tokens_correlation", "rejects_by_reason", "shapes_finding"]

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
_SHAPES = dict(zip(MODALITIES, ("circle", "triangle-down", "square", "diamond", "cross", "triangle-up"), strict=True))
_LONGEST_EXAMPLE = 92
# Pixels of a group's histogram and of the words above it.
_BAND = 50
# Samples are said to differ if the 95th percentile is this many times the median, or if a tenth of the samples holds
# this many tenths of the items.
_MUCH = 1.5
_BARS = dict.fromkeys(("group", "colour"), pl.String)
_BARS |= dict.fromkeys(("low", "high", "top", "foot", "samples"), pl.Float64)
_LINES = {"name": pl.String, "low": pl.Float64, "top": pl.Float64, "foot": pl.Float64}
_WORDS = {"words": pl.String, "top": pl.Float64}


def draw(facts: Facts) -> Picture:
    return draw_shapes(facts.run.samples, facts.run.rejects)


def draw_shapes(samples: pl.DataFrame, rejects: pl.DataFrame) -> Picture:
    """The picture of the tables `samples` and `rejects` of `shapes.duckdb`."""
    shown = [name for name in _QUANTITIES if samples[name].sum() or name == "llm_tokens"]
    groups = groups_of(samples)
    panels = [
        Panel(
            title=f"{_QUANTITIES[name]} a sample", view=_histograms(samples, groups, name), height=_BAND * len(groups)
        )
        for name in shown
    ]
    if samples["num_items"].sum():
        panels.append(_scatter(samples))
    if len(rejects):
        panels.append(_rejects(rejects, len(samples)))
    return Picture(
        section="data", finding=shapes_finding(samples), note=_note(samples, rejects), panels=panels, columns=2
    )


def items_tokens_correlation(samples: pl.DataFrame) -> float | None:
    """Pearson's r of items and LLM tokens over all samples; None if one of the two does not vary."""
    items, tokens = samples["num_items"].to_numpy(), samples["llm_tokens"].to_numpy()
    if len(samples) < 2 or not items.std() or not tokens.std():
        return None
    return float(np.corrcoef(items, tokens)[0, 1])


def groups_of(samples: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """All samples, then, if there are several, those of each modality and of the largest sources."""
    modalities = samples.partition_by("modality", as_dict=True)
    groups = {name.replace("_", " "): modalities[name,] for name in MODALITIES if (name,) in modalities}
    groups = groups if len(groups) > 1 else {}
    sources = sorted(samples.partition_by("source", as_dict=True).items(), key=lambda item: (-len(item[1]), item[0]))
    if len(sources) > 1:
        groups |= {f"from {name}": frame for (name,), frame in sources[:_MOST_SOURCES]}
    return {"all samples": samples, **groups}


def _histograms(samples: pl.DataFrame, groups: dict[str, pl.DataFrame], quantity: str) -> dict[str, Any]:
    """A histogram of each group, one below the other, on one logarithmic axis, with the group's name above it."""
    present = samples[quantity].filter(samples[quantity] > 0)
    limits = (0.7 * present.min(), 1.4 * present.max()) if len(present) else (0.7, 1.4)
    edges = np.geomspace(*limits, _NUM_BINS)
    if samples[quantity].dtype.is_integer():
        whole = np.unique(np.round(edges))
        edges = np.append(whole, whole[-1] + 1) - 0.5
        edges = edges[edges > 0]
    limits = (min(limits[0], edges[0]), max(limits[1], edges[-1]))
    bars, lines, words = [], [], []
    for place, (group, frame) in enumerate(groups.items()):
        values = frame[quantity].to_numpy()
        held = values[values > 0]
        said, foot = [], place + 1
        if len(held):
            counts, _ = np.histogram(held, edges)
            heights = 0.62 * counts / max(1, counts.max())
            modality = MODALITY_COLOURS.get(group.replace(" ", "_"), colour("bar"))
            for low, high, count, height in zip(edges[:-1], edges[1:], counts, heights, strict=True):
                if count:
                    bars.append((group, modality, low, high, foot - height, foot, count))
            middle, high = np.quantile(values, [0.5, 0.95])
            lines += [(name, value, foot - 0.66, foot) for value, name in ((middle, "p50"), (high, "p95")) if value > 0]
            said.append(f"p50 {format_count(middle)} · p95 {format_count(high)}")
        if len(held) < len(values):
            said.append(f"{1 - len(held) / len(values):.0%} none" if len(held) else "none")
        words.append((f"{_shortened(group, 24)} ({len(frame):,}): {', '.join(said) or 'none'}", place + 0.17))
    bar, line, word = (
        rows(pl.DataFrame(table, schema=columns, orient="row"))
        for table, columns in ((bars, _BARS), (lines, _LINES), (words, _WORDS))
    )
    x, y = number("low") | log_axis(*limits), number("top", axis=None, scale={"domain": [len(groups), 0]})
    x["axis"]["grid"] = False
    edge = {"stroke": colour("page"), "strokeWidth": 0.5}
    said = hover(group="", low=",.0f", high=",.0f", samples=",d")
    dash = kind("name", {"p50": [1, 0], "p95": [3, 2]}, legend=None)
    left = {"align": "left", "baseline": "middle"}
    return {
        "layer": [
            layer("rect", look=edge, data=bar, x=x, x2="high", y=y, y2="foot", color=as_given("colour"), tooltip=said),
            layer("rule", look={"color": colour("ink")}, data=line, x=x, y=y, y2="foot", strokeDash=dash),
            layer("text", look=left, data=word, x={"value": 2}, y=y, text="words"),
        ]
    }


def _scatter(samples: pl.DataFrame) -> Panel:
    chosen = samples
    if len(samples) > _MOST_DOTS:
        chosen = samples[np.sort(np.random.default_rng(0).permutation(len(samples))[:_MOST_DOTS])]
    # Dots are moved a little, because samples with equal counts would hide each other.
    jitter = np.random.default_rng(0).normal(0, 0.02, (len(chosen), 2))
    dots = chosen.select(pl.col("modality").str.replace_all("_", " "), "num_items", "llm_tokens").with_columns(
        x=np.maximum(chosen["num_items"].to_numpy(), 0.5) * np.exp(jitter[:, 0]),
        y=np.maximum(chosen["llm_tokens"].to_numpy(), 1) * np.exp(jitter[:, 1]),
    )
    present = {name.replace("_", " "): name for name in MODALITIES if name in set(chosen["modality"])}
    zero_at = 0.5 if (chosen["num_items"] == 0).any() else None
    title = "Items and LLM tokens"
    if (correlation := items_tokens_correlation(samples)) is not None:
        title += f": correlation r = {correlation:.2f}"
    if len(chosen) < len(samples):
        title += f" ({len(chosen):,} of {len(samples):,} drawn)"
    shapes, colours = ({shown: of[name] for shown, name in present.items()} for of in (_SHAPES, MODALITY_COLOURS))
    ends = [(dots[axis].min() / 1.1, dots[axis].max() * 1.1) for axis in ("x", "y")]
    view = layer(
        "point",
        look={"filled": True, "size": 26, "opacity": 0.65},
        data=rows(dots),
        x=number("x", "encoder items a sample") | log_axis(*ends[0], zero_at),
        y=number("y", "LLM tokens a sample") | log_axis(*ends[1]),
        color=kind("modality", colours),
        shape=kind("modality", shapes),
        tooltip=hover(modality="", num_items=",d", llm_tokens=",d"),
    )
    return Panel(title=title, view=view, height=230)


def rejects_by_reason(rejects: pl.DataFrame) -> list[tuple[str, int, str]]:
    """Each reason with its number of records and one example, the most frequent first."""
    reasons = rejects.group_by("reason", maintain_order=True).agg(
        pl.len(), pl.col("source").first(), pl.col("row").first(), pl.col("detail").first()
    )
    reasons = reasons.sort("len", "reason", descending=[True, False])
    return [(reason, count, f"{source}, row {row}: {detail}") for reason, count, source, row, detail in reasons.rows()]


def _rejects(rejects: pl.DataFrame, num_samples: int) -> Panel:
    """A bar for each reason, with the detail of one of its records below."""
    reasons = rejects_by_reason(rejects)
    frame = pl.DataFrame(
        [
            {"place": str(place), "words": f"{reason}: {count:,}", "count": count}
            | {"example": _shortened(example, _LONGEST_EXAMPLE)}
            for place, (reason, count, example) in enumerate(reasons)
        ]
    )
    words = {"align": "left", "baseline": "middle"}
    view = {
        "data": rows(frame),
        "encoding": {"y": names("place", axis=None)},
        "layer": [
            layer("bar", look={"height": 6}, x=number("count", axis=None)),
            layer("text", look=words | {"dy": -12}, x={"value": 0}, text="words"),
            layer("text", look=words | {"dy": 13, "color": colour("muted")}, x={"value": 0}, text="example"),
        ],
    }
    title = f"Rejected: {len(rejects):,} of {num_samples + len(rejects):,} records, one example a reason"
    return Panel(title=title, view=view, height=54 * len(reasons), is_table=True)


def _shortened(text: str, length: int) -> str:
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
