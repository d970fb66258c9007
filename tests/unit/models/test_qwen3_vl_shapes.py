"""Qwen3-VL's rules for clips are transformers' own. Those for pictures and positions are in `test_qwen_vl_shapes.py`.

The oracles are `Qwen3VLVideoProcessor` (patches, by its size-only function for every size; it needs torchvision for
more) and `Qwen3VLProcessor` (what stands around frames).
"""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from test_qwen_vl_shapes import sizes
from transformers import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from dflop.config import DataConfig, VideoConfig
from dflop.models.qwen2_5_vl.shapes import PixelLimits
from dflop.models.qwen3_vl import PRESETS, Qwen3VlShapes, make_spec
from dflop.models.qwen3_vl.processing import Qwen3VlPatches
from dflop.shapes.media import VideoHeader, frame_indices
from dflop.shapes.reader import MediumSize, ShapeReader
from dflop.shapes.records import parse_record

TINY = make_spec("a model", PRESETS["tiny"])
CAPPED = {"video_processor": {"cap_pixels_per_frame": True, "max_video_tokens": 300}}


@pytest.fixture(scope="module", params=["tiny", "qwen3_vl_4b", "capped"])
def rules(request) -> Qwen3VlShapes:
    if request.param == "capped":
        return make_spec("a model", PRESETS["qwen3_vl_4b"], CAPPED).rules
    return make_spec("a model", PRESETS[request.param]).rules


def patches_of_clip(rules: Qwen3VlShapes, num_frames: int, width: int, height: int) -> int:
    """As transformers counts them."""
    processor = SimpleNamespace(
        size={"shortest_edge": rules.clip.least, "longest_edge": rules.clip.most},
        patch_size=rules.patch_size,
        merge_size=rules.merge_size,
        temporal_patch_size=rules.temporal_patch_size,
        cap_pixels_per_frame=rules.max_frame_tokens is not None,
        max_video_tokens=rules.max_frame_tokens,
    )
    return Qwen3VLVideoProcessor.get_num_of_video_patches(processor, num_frames, height, width)


@settings(max_examples=300)
@given(size=sizes, num_frames=st.integers(2, 100))
@example(size=(640, 360), num_frames=5)  # two and a half steps, which round to two
@example(size=(640, 360), num_frames=64)
@example(size=(5, 30), num_frames=2)
def test_a_clip_has_a_step_for_two_frames_and_the_patches_that_transformers_gives_it(rules, size, num_frames):
    try:
        expected = patches_of_clip(rules, num_frames, *size)
    except ValueError:  # scaled up and rounded down, it is too long
        with pytest.raises(ValueError, match="200 times"):
            rules.video(num_frames, *size)
        return
    count = rules.video(num_frames, *size)
    assert math.prod(count.grid) == expected
    assert count.grid[0] == -(-num_frames // 2)
    assert count.num_items == count.num_tokens == expected // 4
    # Patches of a step attend to each other, in squares of items.
    assert count.sum_sq_items == count.grid[0] * (count.grid[1] * count.grid[2] / 4) ** 2


def test_a_clip_of_one_frame_is_that_of_the_frame_twice(rules):
    assert rules.video(1, 300, 200) == rules.video(2, 300, 200)


def test_a_clip_that_is_too_long_is_refused_as_transformers_refuses_it(rules):
    with pytest.raises(ValueError, match="one side is more than 200 times the other"):
        rules.video(4, 40_000, 100)
    with pytest.raises(ValueError, match="must be smaller than 200"):
        patches_of_clip(rules, 4, 40_000, 100)


headers = st.tuples(st.integers(1, 3000), st.sampled_from([5.0, 12.5, 24.0, 24000 / 1001, 25.0, 30000 / 1001, 30.0]))


@settings(max_examples=200)
@given(header=headers, fps=st.sampled_from([0.5, 1.0, 2.0, 4.0]), max_frames=st.integers(1, 40))
@example(header=(90, 30.0), fps=2.0, max_frames=32)  # means of 0.25 s and a half each, which round to even
def test_a_clips_text_tells_the_times_that_transformers_tells_of_its_frames(header, fps, max_frames):
    """From what profiling stores of a clip, without its file."""
    config = DataConfig(video=VideoConfig(fps=fps, max_frames=max_frames))
    rules, (num_frames, rate) = TINY.rules, header
    indices = frame_indices(VideoHeader(num_frames, rate, 64, 64), config.video)
    spread_us = round(1e6 * num_frames / rate / len(indices))
    reader = ShapeReader(rules, config)
    turns = [{"from": "human", "value": "<video>\nWhat?"}, {"from": "gpt", "value": "This."}]
    record = parse_record({"id": "a", "video": "a.mp4", "conversations": turns})
    stored = MediumSize(64, 64, len(indices), spread_us, rate_uhz=round(1e6 * rate))
    placed = reader.place_media(record, reader.stored_media(record, [stored]))
    count = placed.media[0].count
    processor = object.__new__(Qwen3VLProcessor)
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    processor.video_token = "<|video_pad|>"
    about = SimpleNamespace(fps=rate, frames_indices=np.array(indices))
    theirs = processor.replace_video_token({"video_grid_thw": np.array([count.grid]), "video_metadata": [about]}, 0)
    theirs = re.sub(r"(<\|video_pad\|>)+", "<|video_pad|>", theirs)
    assert placed.turns[0].content == f"<|vision_start|>{theirs}<|vision_end|>\nWhat?"
    assert len(placed.media) == count.grid[0]
    assert sum(placed.num_tokens) == count.num_tokens


def test_frames_of_a_clip_are_scaled_and_normalised_as_a_picture_of_that_size():
    """Colours lie around 0.5 with a deviation of 0.5."""
    spec = make_spec("a model", PRESETS["tiny"])
    rules = replace(spec.rules, picture=PixelLimits(1, 1 << 30), clip=PixelLimits(1, 1 << 30))
    processor, rng = Qwen3VlPatches(replace(spec, rules=rules)), np.random.default_rng(1)
    first, second = (Image.fromarray(rng.integers(0, 256, (150, 200, 3), dtype=np.uint8)) for _ in range(2))
    (alone,), (other,) = processor.images([first]), processor.images([second])
    np.testing.assert_allclose(processor.frames([first]), alone, atol=1e-6)
    both = processor.frames([first, second]).reshape(len(alone), 4, 3, 2, -1)
    np.testing.assert_allclose(both[:, :, :, 0], alone.reshape(both.shape)[:, :, :, 0], atol=1e-6)
    np.testing.assert_allclose(both[:, :, :, 1], other.reshape(both.shape)[:, :, :, 0], atol=1e-6)
    white = processor.images([Image.new("RGB", (200, 150), "white")])[0]
    assert (processor.pixel_values.of(torch.from_numpy(white), torch.float32) == 1.0).all()


def test_limits_are_the_checkpoints_own_or_those_of_the_released_ones():
    usual = make_spec("mine", PRESETS["qwen3_vl_8b"]).rules
    assert (usual.picture, usual.clip) == (PixelLimits(65_536, 16_777_216), PixelLimits(4096, 25_165_824))
    assert usual.max_frame_tokens is None
    own = {"size": {"shortest_edge": 4000, "longest_edge": 9000}}
    rules = make_spec("mine", PRESETS["qwen3_vl_8b"], own | {"video_processor": own}).rules
    assert rules.picture == rules.clip == PixelLimits(4000, 9000)
