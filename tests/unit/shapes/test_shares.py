"""Shares of a sample: together they are the sample, and each is about as much work as the others."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_samples import media_of, samples_of, shapes_of

from dflop.config import AudioConfig, ModelConfig
from dflop.models import family_names, load_model_spec
from dflop.shapes.shares import SampleDivider, pieces_of, runs_of

DEGREES = st.sampled_from([1, 2, 4, 8])


@pytest.fixture(scope="module", params=family_names())
def spec(request):
    return load_model_spec(ModelConfig(family=request.param, preset="tiny"))


@given(num_tokens=st.integers(0, 5000), degree=DEGREES)
def test_the_runs_of_all_shares_are_the_sample_once_and_as_much_causal_attention_each(num_tokens, degree):
    shares = [runs_of(num_tokens, degree, share) for share in range(degree)]
    assert sorted(itertools.chain(*itertools.chain(*shares))) == list(range(num_tokens))
    assert np.ptp([sum(map(len, runs)) for runs in shares]) <= 2
    attended = [sum(run.stop**2 - run.start**2 for run in runs) for runs in shares]
    assert np.ptp(attended) <= 4 * (num_tokens + 1)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_what_a_sample_is_its_shares_are_together(spec, data):
    media = data.draw(st.lists(media_of(spec), min_size=1, max_size=4))
    words = data.draw(st.lists(st.integers(1, 400), min_size=len(media), max_size=len(media)))
    whole = samples_of(spec, media, words, max_llm_tokens=data.draw(st.integers(50, 3000)))
    degree = np.array(data.draw(st.lists(DEGREES, min_size=len(media), max_size=len(media))))
    shares = SampleDivider(spec, AudioConfig()).divided(whole, degree)

    assert len(shares) == degree.sum()
    first = np.cumsum(degree) - degree
    for name in ("llm_tokens", "target_tokens", "num_items", "kept_tokens", "sum_sq_items", "sum_sq_tokens"):
        np.testing.assert_allclose(np.add.reduceat(getattr(shares, name), first), getattr(whole, name), err_msg=name)
    if (degree > 1).any():
        assert shares.share.tolist() == [share for own in degree for share in range(own)]
        np.testing.assert_array_equal(shares.whole_tokens, np.repeat(whole.llm_tokens, degree))
        # Each share attends to all keys before its second run, some in both runs, and has its own.
        ends = [runs_of(*sizes) for sizes in zip(shares.whole_tokens, shares.degree, shares.share, strict=True)]
        foreign = [(early.stop + late.stop) - len(early) - len(late) for early, late in ends]
        np.testing.assert_array_equal(shares.foreign_tokens, np.where(shares.degree > 1, foreign, 0))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), degree=DEGREES)
def test_each_frame_is_in_one_piece_in_order_and_no_share_has_more_than_one_step_too_many(spec, data, degree):
    shapes = shapes_of(spec, data.draw(media_of(spec)))
    for encoder in spec.encoders:
        shares = pieces_of(shapes, encoder.media, degree)
        pieces = list(itertools.chain(*shares))
        assert [(piece.medium, piece.first) for piece in pieces] == sorted(
            (piece.medium, piece.first) for piece in pieces
        )
        own = {number: shape for number, shape in enumerate(shapes) if shape.kind in encoder.media}
        largest = 0
        for number, shape in own.items():
            of_medium = [piece for piece in pieces if piece.medium == number]
            assert [piece.first for piece in of_medium] == [0, *(piece.end for piece in of_medium[:-1])]
            frames = itertools.chain(*(piece.frames(shape) for piece in of_medium))
            assert list(frames) == list(range(shape.num_frames))
            counts = [piece.of(shape).count for piece in of_medium]
            assert sum(count.num_items for count in counts) == shape.count.num_items
            assert sum(count.num_tokens for count in counts) == shape.count.num_tokens
            assert sum(count.sum_sq_items for count in counts) == pytest.approx(shape.count.sum_sq_items)
            largest = max(largest, shape.count.num_items // (of_medium[-1].end or 1))
        num_items = [sum(piece.of(shapes[piece.medium]).count.num_items for piece in share) for share in shares]
        assert max(num_items) <= sum(num_items) / degree + largest
