"""The page's section on the data: how much samples differ, what was rejected, and what no device can hold."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from dflop.data import without_unencoded
from dflop.models import ModelSpec
from dflop.reporting.shapes import items_tokens_correlation, shapes_finding
from dflop.store import MODALITIES

__all__ = ["DataSection", "data_section"]

_NUM_BINS = 32
_MOST_SOURCES, _MOST_NAMED, _MOST_DOTS = 8, 20, 1200


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The distribution of one quantity over a group of samples. `bars` are the heights of a histogram's bars, from 0 to
    1, on a logarithmic axis."""

    p50: float
    p95: float
    most: float
    bars: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Samples of a modality or a source, with their shares of all items and of all tokens."""

    name: str
    kind: str
    num_samples: int
    share_of_items: float
    share_of_tokens: float
    items: Spread
    tokens: Spread


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """The section. `ranges` has the ends of the histograms' axes; `dots` has [items, tokens] pairs by modality, for the
    scatter plot."""

    finding: str
    num_samples: int
    num_rejects: int
    num_truncated: int
    unencoded: dict[str, int]
    num_sources: int
    groups: tuple[Group, ...]
    ranges: dict[str, tuple[float, float]]
    rejects: tuple[tuple[str, int, str], ...]
    left_out: tuple[dict[str, Any], ...]
    num_left_out: int
    correlation: float | None
    dots: dict[str, list[list[int]]]
    num_dots: int


def data_section(samples: pl.DataFrame, rejects: pl.DataFrame, left_out: pl.DataFrame, spec: ModelSpec) -> DataSection:
    """The section, from the tables `samples` and `rejects` of `shapes.duckdb`; `left_out` are the samples that the
    plan's devices cannot hold."""
    ranges = {name: _range(samples[column].to_numpy()) for name, column in _COLUMNS.items()}
    totals = {column: max(1, samples[column].sum()) for column in _COLUMNS.values()}
    dots = samples
    if len(samples) > _MOST_DOTS:
        dots = samples[np.sort(np.random.default_rng(0).permutation(len(samples))[:_MOST_DOTS])]
    return DataSection(
        finding=shapes_finding(samples),
        num_samples=len(samples),
        num_rejects=len(rejects),
        num_truncated=int(samples["truncated"].sum()),
        unencoded=without_unencoded(samples, spec.encoders)[1],
        num_sources=samples["source"].n_unique(),
        groups=tuple(_group(name, kind, frame, totals, ranges) for name, kind, frame in _groups(samples)),
        ranges=ranges,
        rejects=_rejects(rejects),
        left_out=tuple(left_out.head(_MOST_NAMED).iter_rows(named=True)),
        num_left_out=len(left_out),
        correlation=items_tokens_correlation(samples),
        dots={
            modality.replace("_", " "): np.column_stack(
                [own[column].to_numpy() for column in _COLUMNS.values()]
            ).tolist()
            for modality in MODALITIES
            if len(own := dots.filter(pl.col("modality") == modality))
        },
        num_dots=len(dots),
    )


_COLUMNS = {"items": "num_items", "tokens": "llm_tokens"}


def _groups(samples: pl.DataFrame) -> list[tuple[str, str, pl.DataFrame]]:
    """All samples, those of each modality, and those of the largest sources, if there are several."""
    groups = [("all samples", "all", samples)]
    modalities = samples.partition_by("modality", as_dict=True)
    present = [name for name in MODALITIES if (name,) in modalities]
    if len(present) > 1:
        groups += [(name.replace("_", " "), name, modalities[name,]) for name in present]
    sources = sorted(samples.partition_by("source", as_dict=True).items(), key=lambda item: (-len(item[1]), item[0]))
    if len(sources) > 1:
        groups += [(f"from {name}", "source", frame) for (name,), frame in sources[:_MOST_SOURCES]]
    return groups


def _group(
    name: str, kind: str, frame: pl.DataFrame, totals: dict[str, int], ranges: dict[str, tuple[float, float]]
) -> Group:
    items, tokens = (_spread(frame[column].to_numpy(), ranges[key]) for key, column in _COLUMNS.items())
    return Group(
        name=name,
        kind=kind,
        num_samples=len(frame),
        share_of_items=frame["num_items"].sum() / totals["num_items"],
        share_of_tokens=frame["llm_tokens"].sum() / totals["llm_tokens"],
        items=items,
        tokens=tokens,
    )


def _spread(values: np.ndarray, limits: tuple[float, float]) -> Spread:
    present = values[values > 0]
    counts, _ = np.histogram(present, np.geomspace(*limits, _NUM_BINS + 1))
    p50, p95 = np.quantile(values, (0.5, 0.95)) if len(values) else (0.0, 0.0)
    return Spread(
        p50=float(p50),
        p95=float(p95),
        most=float(values.max(initial=0)),
        bars=tuple(round(float(count), 3) for count in counts / max(1, counts.max())),
    )


def _range(values: np.ndarray) -> tuple[float, float]:
    """From just below the least to just above the largest value; zeros are not on a logarithmic axis."""
    present = values[values > 0]
    return (0.95 * float(present.min()), 1.05 * float(present.max())) if len(present) else (0.95, 1.05)


def _rejects(rejects: pl.DataFrame) -> tuple[tuple[str, int, str], ...]:
    """Each reason with its number of records and one example, the most frequent first."""
    reasons = rejects.group_by("reason", maintain_order=True).agg(
        pl.len(), pl.col("source").first(), pl.col("row").first(), pl.col("detail").first()
    )
    reasons = reasons.sort("len", "reason", descending=[True, False])
    return tuple(
        (reason, count, f"{source}, row {row}: {detail}") for reason, count, source, row, detail in reasons.rows()
    )
