"""What loading costs: how long training's loaders take for the samples of a step, as `dflop profile-loading` measured.

The measurement itself needs torch; it is in `measure`.
"""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from dflop.base import UserError
from dflop.store import LOADING_SCHEMA, read_parquet

__all__ = ["LoadingTimes", "read_loading_times"]


@dataclass(frozen=True, slots=True)
class LoadingTimes:
    """A table of `LOADING_SCHEMA`."""

    frame: pl.DataFrame

    @property
    def num_cores(self) -> int:
        """CPU cores of the machine that was measured."""
        return int(self.frame["num_cores"].max())  # type: ignore[arg-type]

    def of_batch(self, module: str, global_batch_size: int) -> tuple[float, float]:
        """Expected wall seconds and core seconds in which one process loads a module's part of a global batch."""
        rows = self.frame.filter(pl.col("module") == module)
        # The module's rows lack the modalities that it does not read, so the sums are divided by all samples.
        num_samples = int(self.frame.unique("modality")["num_samples"].sum())
        seconds, core_s = (
            float((rows["num_samples"] * rows[column]).sum()) / num_samples * global_batch_size
            for column in ("seconds", "core_s")
        )
        return seconds, core_s


def read_loading_times(path: Path) -> LoadingTimes:
    """Read the file that `dflop profile-loading` made.

    Raises:
        UserError: when it does not exist, cannot be read, or is not such a table.
    """
    frame = read_parquet(path, made_by="profile-loading")
    if frame.schema != LOADING_SCHEMA or not len(frame):
        raise UserError(f"{path} holds no measured loading; make it with `dflop profile-loading`")
    return LoadingTimes(frame)
