"""The page's section on the data: how much samples differ, what was rejected, and what no device can hold."""

from typing import Any

import numpy as np
import polars as pl

from dflop.models import ModelSpec
from dflop.report.charts.shapes import groups_of, items_tokens_correlation, rejects_by_reason, shapes_finding
from dflop.shapes import without_unencoded

__all__ = ["data_section"]

_MOST_NAMED = 20


def data_section(
    samples: pl.DataFrame, rejects: pl.DataFrame, left_out: pl.DataFrame, spec: ModelSpec
) -> dict[str, Any]:
    """The section, from the tables `samples` and `rejects` of `shapes.duckdb`; `left_out` are the samples that the
    plan's devices cannot hold. `groups` begin with all samples; `rejects` are reasons, each with its count and an
    example."""
    return {
        "finding": shapes_finding(samples),
        "num_samples": len(samples),
        "num_rejects": len(rejects),
        "num_truncated": int(samples["truncated"].sum()),
        "unencoded": without_unencoded(samples, spec.encoders)[1],
        "num_sources": samples["source"].n_unique(),
        "groups": [_group(name, frame, samples) for name, frame in groups_of(samples).items()],
        "rejects": rejects_by_reason(rejects),
        "left_out": left_out.head(_MOST_NAMED).to_dicts(),
        "num_left_out": len(left_out),
        "correlation": items_tokens_correlation(samples),
    }


def _group(name: str, frame: pl.DataFrame, samples: pl.DataFrame) -> dict[str, Any]:
    """Samples of a modality or a source: the spread of items and of tokens, and the shares of all items and tokens."""
    group: dict[str, Any] = {"name": name, "num_samples": len(frame)}
    for column in ("num_items", "llm_tokens"):
        values = frame[column].to_numpy()
        p50, p95 = np.quantile(values, (0.5, 0.95)) if len(values) else (0.0, 0.0)
        share = frame[column].sum() / max(1, samples[column].sum())
        group[column] = {"p50": p50, "p95": p95, "most": values.max(initial=0), "share": share}
    return group
