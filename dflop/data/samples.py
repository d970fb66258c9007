"""The shapes of a dataset as arrays: what planning, scheduling and training know of the data."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dflop.runtime import UserError
from dflop.store import read_table

__all__ = ["SampleShapes", "load_samples"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleShapes:
    """One entry a sample, in the order of `samples`; every array is [num_samples]."""

    sample_id: np.ndarray
    source: np.ndarray
    row: np.ndarray
    num_items: np.ndarray
    kept_vision_tokens: np.ndarray
    llm_tokens: np.ndarray
    target_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.sample_id)

    def take(self, index: np.ndarray) -> "SampleShapes":
        return SampleShapes(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})


def load_samples(path: Path) -> tuple[SampleShapes, int]:
    """The samples of `shapes.duckdb` that can be trained on, and how many hold audio and therefore cannot.

    No family has an audio encoder yet; such samples are profiled and left out of plans and training.

    Raises:
        UserError: when nothing is left.
    """
    frame = read_table(path, "samples", made_by="merge-shapes")
    usable = frame.filter(pl.col("audio_tokens") == 0)
    num_left_out = len(frame) - len(usable)
    if not len(usable):
        raise UserError(
            f"{path} holds no sample to train on ({num_left_out} with audio left out); "
            f"`from rejects` in it says what became of the records"
        )
    columns = {name: usable[name].to_numpy() for name in SampleShapes.__dataclass_fields__}
    return SampleShapes(**columns), num_left_out
