"""The page's section on the data: how much samples differ, what was rejected, and what no device can hold."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from dflop.models import ModelSpec
from dflop.report.charts.shapes import groups_of, items_tokens_correlation, rejects_by_reason, shapes_finding
from dflop.shapes import without_unencoded

__all__ = ["DataSection", "data_section"]

_MOST_NAMED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The distribution of one quantity over a group of samples."""

    p50: float
    p95: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Samples of a modality or a source, with their shares of all items and of all tokens."""

    name: str
    num_samples: int
    share_of_items: float
    share_of_tokens: float
    items: Spread
    tokens: Spread


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """The section. `groups` begin with all samples; `rejects` are reasons, each with its count and an example."""

    finding: str
    num_samples: int
    num_rejects: int
    num_truncated: int
    unencoded: dict[str, int]
    num_sources: int
    groups: tuple[Group, ...]
    rejects: tuple[tuple[str, int, str], ...]
    left_out: tuple[dict[str, Any], ...]
    num_left_out: int
    correlation: float | None


def data_section(samples: pl.DataFrame, rejects: pl.DataFrame, left_out: pl.DataFrame, spec: ModelSpec) -> DataSection:
    """The section, from the tables `samples` and `rejects` of `shapes.duckdb`; `left_out` are the samples that the
    plan's devices cannot hold."""
    return DataSection(
        finding=shapes_finding(samples),
        num_samples=len(samples),
        num_rejects=len(rejects),
        num_truncated=int(samples["truncated"].sum()),
        unencoded=without_unencoded(samples, spec.encoders)[1],
        num_sources=samples["source"].n_unique(),
        groups=tuple(_group(name, frame, samples) for name, frame in groups_of(samples).items()),
        rejects=tuple(rejects_by_reason(rejects)),
        left_out=tuple(left_out.head(_MOST_NAMED).iter_rows(named=True)),
        num_left_out=len(left_out),
        correlation=items_tokens_correlation(samples),
    )


def _group(name: str, frame: pl.DataFrame, samples: pl.DataFrame) -> Group:
    shares = (frame[column].sum() / max(1, samples[column].sum()) for column in ("num_items", "llm_tokens"))
    of_items, of_tokens = shares
    return Group(
        name=name,
        num_samples=len(frame),
        share_of_items=of_items,
        share_of_tokens=of_tokens,
        items=_spread(frame["num_items"].to_numpy()),
        tokens=_spread(frame["llm_tokens"].to_numpy()),
    )


def _spread(values: np.ndarray) -> Spread:
    p50, p95 = np.quantile(values, (0.5, 0.95)) if len(values) else (0.0, 0.0)
    return Spread(p50=float(p50), p95=float(p95), most=float(values.max(initial=0)))
