"""Samples with media of every kind, as profiling stores them, for tests of samples that several replicas compute."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from dflop.config import DataConfig
from dflop.models import ModelSpec
from dflop.shapes import SampleShapes, ShapeReader
from dflop.shapes.reader import MediumShape, MediumSize
from dflop.shapes.samples import MediaSizes

_SIDES = st.integers(28, 300)
PICTURES = st.tuples(_SIDES, _SIDES).map(lambda sides: MediumSize(*sides, 0))
CLIPS = st.tuples(_SIDES, _SIDES, st.integers(1, 21)).map(
    lambda clip: MediumSize(*clip, frame_us=500_000, rate_uhz=2_000_000)
)
SOUNDS = st.integers(4_000, 400_000).map(lambda length: MediumSize(0, 0, 0, num_samples=length))


def media_of(spec: ModelSpec) -> st.SearchStrategy[list[MediumSize]]:
    """The media of a sample, of all kinds that the model has an encoder for."""
    kinds = [kind for encoder in spec.encoders for kind in encoder.media]
    drawn = {"image": PICTURES, "video": CLIPS, "audio": SOUNDS}
    return st.lists(st.one_of([drawn[kind] for kind in kinds]), max_size=4)


def shapes_of(spec: ModelSpec, media: Sequence[MediumSize]) -> list[MediumShape]:
    """What the model makes of a sample's media."""
    kinds = ["video" if size.num_frames else "audio" if size.num_samples else "image" for size in media]
    reader = ShapeReader(spec.rules, DataConfig())
    return [reader.stored(kind, size, kinds.count("image")) for kind, size in zip(kinds, media, strict=True)]


def samples_of(
    spec: ModelSpec, media: Sequence[Sequence[MediumSize]], num_words: Sequence[int], max_llm_tokens: int = 1 << 30
) -> SampleShapes:
    """Samples with their media in the beginning and then so many words, a third of them learned."""
    shapes = [shapes_of(spec, own) for own in media]
    rows = []
    for own, words in zip(shapes, num_words, strict=True):
        left, kept = max_llm_tokens, dict.fromkeys((encoder.name for encoder in spec.encoders), 0)
        for shape in own:
            encoder = next(encoder.name for encoder in spec.encoders if shape.kind in encoder.media)
            kept[encoder] += min(left, shape.count.num_tokens)
            left -= min(left, shape.count.num_tokens)
        rows.append((list(kept.values()), sum(kept.values()) + min(left, words)))
    by_encoder = [
        [[shape.count for shape in own if shape.kind in encoder.media] for encoder in spec.encoders] for own in shapes
    ]
    return SampleShapes(
        encoders=tuple(encoder.name for encoder in spec.encoders),
        sample_id=np.array([f"s{number}" for number in range(len(media))], dtype=object),
        source=np.full(len(media), "drawn", dtype=object),
        row=np.arange(len(media)),
        num_items=np.array([[sum(count.num_items for count in own) for own in sample] for sample in by_encoder]),
        sum_sq_items=np.array([[sum(count.sum_sq_items for count in own) for own in sample] for sample in by_encoder]),
        kept_tokens=np.array([kept for kept, _ in rows]),
        llm_tokens=np.array([tokens for _, tokens in rows]),
        target_tokens=np.array(num_words) // 3,
        media=MediaSizes(
            np.array([size for own in media for size in own], dtype=np.int32).reshape(-1, 6),
            np.array([len(own) for own in media]),
        ),
    )
