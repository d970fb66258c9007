"""The shapes of a dataset as arrays: what planning, scheduling and training know of the data.

Encoders are an axis: per-encoder arrays have one column an encoder, in the order of `SampleShapes.encoders`. A model
may have none, one or several.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl

from dflop.base import UserError
from dflop.models import ModuleSpec
from dflop.store import read_table

__all__ = [
    "HOW_DRAWN",
    "MEDIA_COLUMNS",
    "MediaSizes",
    "Mixture",
    "SampleShapes",
    "load_samples",
    "run_bounds",
    "without_unencoded",
]

# One number, or one a sample.
Count = TypeVar("Count", int, np.ndarray)

# The columns of `samples` with the items of an encoder of these media, and with the tokens that the LLM gets from it.
_COLUMNS = {
    ("image", "video"): ("num_items", "kept_vision_tokens"),
    ("audio",): ("num_audio_windows", "kept_audio_tokens"),
}

# The list columns of `samples`, with one number a medium, in the order of the columns of `MediaSizes.values`.
MEDIA_COLUMNS = ("media_width", "media_height", "media_frames", "media_frame_us", "media_samples", "media_rate_uhz")


@dataclass(frozen=True, slots=True, eq=False)
class MediaSizes:
    """What the headers of samples' media said, sample after sample.

    `values` is int32 [num_media, 6]: width and height in pixels; the number of frames that are used of a clip (0 for
    other media); the mean microseconds between two of these frames; a sound's samples at 16 kHz; a clip's frame rate in
    µHz (frames in a million seconds). `counts` is int64 [num_samples]: how many media each sample has.
    """

    values: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: np.ndarray) -> "MediaSizes":
        """The sizes of some samples, by a mask or by positions."""
        starts, counts = (np.cumsum(self.counts) - self.counts)[index], self.counts[index]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return MediaSizes(self.values[np.repeat(starts, counts) + within], counts)

    def of_each(self) -> list[np.ndarray]:
        """One array for each sample, [num_media of the sample, 6]."""
        return np.split(self.values, np.cumsum(self.counts)[:-1]) if len(self) else []


@dataclass(frozen=True, slots=True)
class Mixture:
    """How often samples are drawn, by the name of their source.

    Either each sample of a source is drawn `epochs` times in an epoch, or a source gets its `weights` part of as many
    samples as there are.
    """

    epochs: dict[str, float]
    weights: dict[str, float]

    def draws(self, source: np.ndarray) -> list[tuple[np.ndarray, float]]:
        """For samples of these sources, [num_samples]: the indices of each source's samples, and how many samples an
        epoch draws from them."""
        indices = {name: np.flatnonzero(source == name) for name in sorted(set(source))}
        if not self.weights:
            return [(index, self.epochs.get(name, 1.0) * len(index)) for name, index in indices.items()]
        total = sum(self.weights[name] for name in indices)
        return [(index, self.weights[name] / total * len(source)) for name, index in indices.items()]


# Fields of `SampleShapes` by which epochs are drawn. What is drawn has none.
HOW_DRAWN = ("mixture", "among")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleShapes:
    """One row a sample, in the order of `samples`; one column an encoder, in the order of `encoders`.

    `num_items`, `sum_sq_items` (`models.ItemCount`) and `kept_tokens` (what truncation leaves of the items' tokens) are
    [num_samples, num_encoders], all other arrays [num_samples]. `sum_sq_items` is None if every encoder's items attend
    to the same number of items. `media` is needed by training only, and is None for shapes that come from no file.

    A row may be a share of a sample (`shares`): that number `share` of `degree` (both [num_samples]), with the number
    of the whole sample's LLM tokens in `whole_tokens`. The three are None where all rows are whole samples.
    """

    encoders: tuple[str, ...]
    sample_id: np.ndarray
    source: np.ndarray
    row: np.ndarray
    num_items: np.ndarray
    kept_tokens: np.ndarray
    llm_tokens: np.ndarray
    target_tokens: np.ndarray
    media: MediaSizes | None = None
    sum_sq_items: np.ndarray | None = None
    degree: np.ndarray | None = None
    share: np.ndarray | None = None
    whole_tokens: np.ndarray | None = None
    mixture: Mixture | None = None  # None: an epoch draws each sample once
    # Where some samples were left out: the places that the others had, [num_samples], and the number of all.
    among: tuple[np.ndarray, int] | None = None

    def __len__(self) -> int:
        return len(self.sample_id)

    def take(self, index: np.ndarray) -> "SampleShapes":
        """The rows of some samples, by a mask or by positions."""
        others = ("encoders", *HOW_DRAWN)
        arrays = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in others}
        among = self.among and (self.among[0][index], self.among[1])
        return replace(self, among=among, **{name: array[index] for name, array in arrays.items() if array is not None})

    def without(self, left_out: np.ndarray) -> "SampleShapes":
        """The samples for which the mask `left_out` does not hold, in the order in which they are drawn anyway."""
        return replace(self, among=self.among or (np.arange(len(self)), len(self))).take(~left_out)

    def draws(self) -> list[tuple[np.ndarray, float]]:
        """The samples of each source that is drawn apart, and how many of them an epoch draws (`Mixture.draws`)."""
        if self.mixture is None:
            return [(np.arange(len(self)), float(len(self)))]
        return self.mixture.draws(self.source)

    def times_drawn(self) -> np.ndarray:
        """How often an epoch draws each sample, [num_samples]; a mean where that is no whole number."""
        times = np.ones(len(self))
        for index, per_epoch in self.draws():
            times[index] = per_epoch / len(index)
        return times

    def items_of(self, encoder: str) -> np.ndarray:
        """Items of each sample for one encoder, [num_samples]."""
        return self.num_items[:, self.encoders.index(encoder)]

    def sum_sq_of(self, encoder: str) -> np.ndarray:
        """Sum of the squared lengths of each sample's runs of items that attend to each other, [num_samples]; zeros if
        `sum_sq_items` is None."""
        if self.sum_sq_items is None:
            return np.zeros(len(self))
        return self.sum_sq_items[:, self.encoders.index(encoder)]

    @property
    def can_be_divided(self) -> np.ndarray:
        """Whether what a share of each sample encodes is known: the sizes of its media are, or it has none."""
        has_items = self.num_items.any(axis=1)
        return ~has_items if self.media is None else ~has_items | (self.media.counts > 0)

    @property
    def sum_sq_tokens(self) -> np.ndarray:
        """What causal attention of each row costs, as the squared length of a sample that costs as much. A share's run
        from token a to b attends to all before b: b^2 - a^2."""
        if self.degree is None:
            return self.llm_tokens.astype(float) ** 2
        return np.sum([ends.astype(float) ** 2 - starts.astype(float) ** 2 for starts, ends in self._runs()], axis=0)

    @property
    def foreign_tokens(self) -> np.ndarray:
        """Tokens of other shares whose keys and values each row attends to, those of both of its runs counted twice,
        [num_samples]."""
        if self.degree is None:
            return np.zeros(len(self))
        return np.where(self.degree > 1, np.sum([ends for _, ends in self._runs()], axis=0) - self.llm_tokens, 0.0)

    def _runs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where the two runs of each row begin and end; those of a whole sample are its halves."""
        return run_bounds(self.whole_tokens, self.degree, self.share)

    def kept_by(self, encoder: str) -> np.ndarray:
        """Tokens of each sample that the LLM gets from one encoder, [num_samples]."""
        return self.kept_tokens[:, self.encoders.index(encoder)]


def run_bounds(num_tokens: Count, degree: Count, share: Count) -> list[tuple[Count, Count]]:
    """Where the two runs of a share begin and end, of samples of `num_tokens` tokens that are cut into `2 * degree`
    runs: run `share`, and that from the end (`shares`)."""
    places = (share, 2 * degree - 1 - share)
    return [(place * num_tokens // (2 * degree), (place + 1) * num_tokens // (2 * degree)) for place in places]


def load_samples(
    path: Path, encoders: Sequence[ModuleSpec], *, evaluation: bool = False
) -> tuple[SampleShapes, dict[str, int]]:
    """The samples of `shapes.duckdb` that a model with these encoders can be trained on, or evaluated on.

    Also returns how many samples are left out because the model has no encoder for their media: `{"audio": 12}`.

    Raises:
        UserError: when no sample is left, or the file cannot be read.
        ValueError: when `samples` has no columns for an encoder's items.
    """
    for encoder in encoders:
        if encoder.media not in _COLUMNS:
            raise ValueError(f"{encoder.name}: `samples` has no columns for an encoder of {encoder.media} alone")
    frame = read_table(path, "samples", made_by="merge-shapes").filter(pl.col("evaluation") == evaluation)
    frame, left_out = without_unencoded(frame, encoders)
    if not len(frame):
        why = ", ".join(f"{count} with {media} left out" for media, count in left_out.items())
        raise UserError(
            f"{path} holds no sample to {'evaluate' if evaluation else 'train'} on{why and f' ({why})'}; "
            f"`from rejects` in it says what became of the records"
        )
    items, kept = ([_COLUMNS[encoder.media][number] for encoder in encoders] for number in range(2))
    return SampleShapes(
        encoders=tuple(encoder.name for encoder in encoders),
        **{name: frame[name].to_numpy() for name in ("sample_id", "source", "row", "llm_tokens", "target_tokens")},
        num_items=_columns(frame, items),
        kept_tokens=_columns(frame, kept),
        media=_media_sizes(frame),
        sum_sq_items=_sum_sq_items(frame, encoders),
        mixture=None if evaluation else _mixture(path),
    ), left_out


def _mixture(path: Path) -> Mixture | None:
    sources = read_table(path, "sources", made_by="merge-shapes")
    epochs, weights = (dict(sources["name", key].drop_nulls().rows()) for key in ("epochs", "weight"))
    return Mixture(epochs, weights) if epochs or weights else None


def without_unencoded(samples: pl.DataFrame, encoders: Sequence[ModuleSpec]) -> tuple[pl.DataFrame, dict[str, int]]:
    """The rows of `samples` whose media all have an encoder, and how many others there are by medium: `{"audio": 12}`.

    A sample with several media that have no encoder counts for the first of them.
    """
    encoded = [encoder.media for encoder in encoders]
    left_out = {}
    for media, columns in _COLUMNS.items():
        if media in encoded:
            continue
        usable = samples.filter(pl.sum_horizontal(columns) == 0)
        if len(usable) < len(samples):
            left_out[" or ".join(media)] = len(samples) - len(usable)
        samples = usable
    return samples, left_out


def _sum_sq_items(frame: pl.DataFrame, encoders: Sequence[ModuleSpec]) -> np.ndarray | None:
    of_vision = frame["sum_sq_items"].fill_null(0.0).to_numpy()
    if not of_vision.any():
        return None
    return np.column_stack([of_vision * ("image" in encoder.media) for encoder in encoders])


def _media_sizes(frame: pl.DataFrame) -> MediaSizes:
    lists = frame.select(pl.col(name).fill_null([]) for name in MEDIA_COLUMNS)
    counts = lists[MEDIA_COLUMNS[0]].list.len().to_numpy().astype(np.int64)
    return MediaSizes(lists.filter(counts > 0).explode(MEDIA_COLUMNS).to_numpy().astype(np.int32), counts)


def _columns(frame: pl.DataFrame, names: Sequence[str]) -> np.ndarray:
    return np.array([frame[name].to_numpy() for name in names], dtype=np.int64).reshape(len(names), len(frame)).T
