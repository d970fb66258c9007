"""Shares: how a long sample is divided over the ranks that compute it together (context parallelism).

Over `degree` ranks, a sample's tokens are cut into `2 * degree` runs of about the same length. Share k has run k and
the k-th from the end, so that causal attention is as much work for each share. Its media are divided at the steps of
clips: a share encodes about as many items as the others, and no item is cut. So a share encodes other media tokens than
those that stand in its runs; ranks exchange them before the LLM's first layer.

The scheduler, the loaders and the ranks all follow this file, so that each knows what the others have.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from dflop.config import AudioConfig, DataConfig
from dflop.models import ItemCount, ModelSpec, ModuleSpec, ShapeRules
from dflop.shapes.reader import MediumShape, MediumSize, ShapeReader
from dflop.shapes.samples import SampleShapes, run_bounds

__all__ = ["LEAST_TOKENS", "Piece", "SampleDivider", "pieces_of", "runs_of"]

# A share has at least so many tokens: attention kernels compute the queries of a run 128 at a time.
LEAST_TOKENS = 256


def runs_of(num_tokens: int, degree: int, share: int) -> tuple[range, range]:
    """The positions of a share's two runs."""
    first, second = run_bounds(num_tokens, degree, share)
    return range(*first), range(*second)


class Piece(NamedTuple):
    """Steps `[first, end)` of a sample's medium; a picture or a sound is one step."""

    medium: int
    first: int
    end: int

    def of(self, shape: MediumShape) -> MediumShape:
        """The piece as a medium of its own. Tokens behind a clip's last step, such as a line break, are of that."""
        steps, count, whole = self.end - self.first, shape.count, _num_steps(shape)
        if steps == whole:
            return shape
        of_step, rest = divmod(count.num_tokens, whole)
        own = ItemCount(
            num_items=steps * (count.num_items // whole),
            num_tokens=steps * of_step + rest * (self.end == whole),
            sum_sq_items=count.sum_sq_items * steps / whole,
            grid=(steps, *count.grid[1:]) if count.grid[0] else count.grid,
        )
        return shape._replace(count=own, num_frames=len(self.frames(shape)))

    def frames(self, shape: MediumShape) -> range:
        """Which of the clip's frames that are used the piece has."""
        of_step = -(-shape.num_frames // _num_steps(shape))
        return range(self.first * of_step, min(self.end * of_step, shape.num_frames))


def pieces_of(shapes: Sequence[MediumShape], kinds: Sequence[str], degree: int) -> list[list[Piece]]:
    """What each share encodes of a sample's media of these kinds, in order: about the same number of items."""
    media = [number for number, shape in enumerate(shapes) if shape.kind in kinds]
    num_items, before = sum(shapes[number].count.num_items for number in media), 0
    pieces: list[list[Piece]] = [[] for _ in range(degree)]
    for number in media:
        of_step = shapes[number].count.num_items // _num_steps(shapes[number])
        owners = []
        for _ in range(_num_steps(shapes[number])):
            owners.append(min(degree - 1, (2 * before + of_step) * degree // (2 * num_items)) if num_items else 0)
            before += of_step
        first = 0
        for share, own in itertools.groupby(owners):
            end = first + len(list(own))
            pieces[share].append(Piece(number, first, end))
            first = end
    return pieces


def _num_steps(shape: MediumShape) -> int:
    """Into how many steps a medium may be cut."""
    return (shape.count.grid[0] or shape.count.num_items) if shape.kind == "video" else 1


class SampleDivider:
    """Divides samples into shares, by the model's rules."""

    def __init__(self, spec: ModelSpec, audio: AudioConfig) -> None:
        self._encoded = _encoded(spec.encoders, spec.rules, audio)

    def divided(self, shapes: SampleShapes, degree: np.ndarray) -> SampleShapes:
        """The shapes with `degree` rows for each sample, [num_samples]: those of its shares, one after the other. All
        target tokens are taken to be the first share's, as answers stand at a sample's end."""
        if (degree == 1).all():
            return shapes
        rows = np.repeat(np.arange(len(shapes)), degree)
        share = np.arange(len(rows)) - np.repeat(np.cumsum(degree) - degree, degree)
        made, whole = shapes.take(rows), shapes.llm_tokens[rows]
        lengths = sum(end - start for start, end in run_bounds(whole, degree[rows], share))
        made = replace(
            made,
            degree=degree[rows],
            share=share,
            whole_tokens=whole,
            llm_tokens=lengths.astype(whole.dtype),
            target_tokens=np.where(share == 0, made.target_tokens, 0),
        )
        with_media = np.flatnonzero((degree > 1) & (shapes.num_items.sum(axis=1) > 0)).tolist()
        if with_media:
            self._divide_media(made, shapes, degree, with_media)
        return made

    def _divide_media(self, made: SampleShapes, shapes: SampleShapes, degree: np.ndarray, samples: list[int]) -> None:
        """Write what each share of these samples encodes into its row of `made`."""
        media, starts = shapes.media, np.cumsum(degree) - degree
        assert media is not None, "only samples that can be divided are"
        ends = np.cumsum(media.counts)
        for sample in samples:
            own = media.values[ends[sample] - media.counts[sample] : ends[sample]]
            encoded = self._encoded(tuple(map(tuple, own.tolist())), int(degree[sample]))
            for column, shares in enumerate(encoded):
                left = int(shapes.kept_tokens[sample, column])
                for row, share in enumerate(shares, int(starts[sample])):
                    kept = min(left, share.num_tokens)
                    left -= kept
                    made.num_items[row, column], made.kept_tokens[row, column] = share.num_items, kept
                    if made.sum_sq_items is not None:
                        made.sum_sq_items[row, column] = share.sum_sq_items


@lru_cache(maxsize=8)
def _encoded(
    encoders: tuple[ModuleSpec, ...], rules: ShapeRules, audio: AudioConfig
) -> Callable[[tuple[tuple[int, ...], ...], int], list[list[ItemCount]]]:
    """`_shares_of`, which remembers: a scheduler tries several degrees, of which most samples have the same, and of
    each batch a choice among plans tries many schedules."""
    return lru_cache(maxsize=16384)(partial(_shares_of, encoders, ShapeReader(rules, DataConfig(audio=audio))))


def _shares_of(
    encoders: Sequence[ModuleSpec], reader: ShapeReader, media: Sequence[tuple[int, ...]], degree: int
) -> list[list[ItemCount]]:
    """What each share of a sample with media of these sizes (`MediaSizes`) encodes, by encoder."""
    sizes = [MediumSize(*size) for size in media]
    kinds = ["video" if size.num_frames else "audio" if size.num_samples else "image" for size in sizes]
    num_images = kinds.count("image")
    shapes = [reader.stored(kind, size, num_images) for kind, size in zip(kinds, sizes, strict=True)]
    found = []
    for encoder in encoders:
        counts = (
            [piece.of(shapes[piece.medium]).count for piece in own] for own in pieces_of(shapes, encoder.media, degree)
        )
        found.append([_sum_of(own) for own in counts])
    return found


def _sum_of(counts: Sequence[ItemCount]) -> ItemCount:
    return ItemCount(
        sum(count.num_items for count in counts),
        sum(count.num_tokens for count in counts),
        sum(count.sum_sq_items for count in counts),
    )
