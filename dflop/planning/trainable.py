"""Which rows of the search space can be trained today."""

import numpy as np
import polars as pl

from dflop.models import why_family_cannot_run
from dflop.pipeline import why_not_runnable
from dflop.planning.space import Splits, modules_of, plan_of

__all__ = ["trainable_rows"]


def trainable_rows(family: str, rows: pl.DataFrame, splits: Splits) -> np.ndarray:
    """Which rows can be trained today, bool [num_rows]. Since rows are many, one row of each kind is checked."""
    if why_family_cannot_run(family):
        return np.zeros(len(rows), dtype=bool)
    modules = modules_of(rows.columns)
    sizes = [f"{module}_{size}" for module in modules for size in ("tp", "pp")]
    kinds = {
        "placement": pl.col("placement"),
        "schedule": pl.col("schedule"),
        "has_chunks": pl.col("num_chunks") > 1,
        **{f"has_{name}": pl.col(name) > 1 for name in sizes},
        **{f"{module}_sharding": pl.col(f"{module}_sharding") for module in modules},
    }
    of_kind = rows.select(**kinds).with_row_index("row")
    firsts = of_kind.group_by(*kinds).agg(pl.col("row").first())
    said = [why_not_runnable(plan_of(rows.row(row, named=True), splits)) is None for row in firsts["row"]]
    named = firsts.drop("row").with_columns(runnable=pl.Series(said, dtype=pl.Boolean))
    return of_kind.join(named, on=list(kinds), how="left", maintain_order="left")["runnable"].to_numpy()
