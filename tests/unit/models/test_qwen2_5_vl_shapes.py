"""Qwen2.5-VL's rules for clips and windows are transformers' own. Those for pictures and positions are in
`test_qwen_vl_shapes.py`.

The oracles are `Qwen2VLImageProcessorPil` (patches, by its size-only function for every size) and the functions with
which the model's encoder finds windows. The video processor needs torchvision; its resize is the image processor's with
other limits, and it puts two frames into a step.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_qwen_vl_shapes import RELEASED, sizes
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_window_index

from dflop.config import load_config
from dflop.models.qwen2_5_vl import PRESETS, Qwen25VlShapes, make_spec
from dflop.models.qwen2_5_vl.processing import Qwen25VlPatches
from dflop.models.qwen2_5_vl.shapes import PixelLimits
from dflop.shapes.reader import MediumSize, ShapeReader
from dflop.shapes.record_media import RecordError
from dflop.shapes.records import parse_record


@pytest.fixture(scope="module", params=["tiny", "qwen2_5_vl_7b", "as released"])
def rules(request) -> Qwen25VlShapes:
    if request.param == "as released":
        return make_spec("a model", PRESETS["qwen2_5_vl_7b"], RELEASED).rules
    return make_spec("a model", PRESETS[request.param]).rules


@settings(max_examples=100)
@given(size=sizes, num_frames=st.integers(1, 64))
def test_a_clip_has_a_step_for_two_frames_and_the_patches_that_transformers_gives_a_frame(rules, size, num_frames):
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": rules.frame.least, "longest_edge": rules.frame.most},
        patch_size=rules.patch_size,
        merge_size=rules.merge_size,
    )
    count = rules.video(num_frames, *size)
    assert count.grid[0] == -(-num_frames // 2)
    assert math.prod(count.grid[1:]) == processor.get_number_of_image_patches(*size[::-1])


def test_a_record_with_a_picture_that_is_too_long_is_rejected_and_says_why():
    reader = ShapeReader(make_spec("a model", PRESETS["tiny"]).rules, load_config().data)
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A line."}]
    record = parse_record({"id": "a", "image": "a.png", "conversations": turns})
    assert len(reader.stored_media(record, [MediumSize(200, 1, 0)])) == 1
    with pytest.raises(RecordError, match="201 x 1 pixels: one side is more than 200 times the other") as refused:
        reader.stored_media(record, [MediumSize(201, 1, 0)])
    assert refused.value.reason == "unreadable_media"


grids = st.tuples(st.integers(1, 6), st.integers(1, 60), st.integers(1, 60))


@settings(max_examples=100)
@given(grid=grids)
def test_squares_are_those_of_the_segments_that_transformers_attends_in(rules, grid):
    grid = (grid[0], 2 * grid[1], 2 * grid[2])
    whole = get_vision_cu_seqlens(torch.tensor([grid]))
    _, windows = get_vision_window_index(torch.tensor([grid]), 2, rules.window_size, rules.patch_size)
    of_whole, of_windows = (float((ends.diff().double() ** 2).sum()) / 16 for ends in (whole, windows))
    full = rules.num_full_layers
    expected = (full * of_whole + (rules.num_layers - full) * of_windows) / rules.num_layers
    assert rules.sum_sq_items(grid) == pytest.approx(expected, rel=1e-12)


def test_a_clip_of_one_frame_is_the_picture_twice_and_frames_of_a_step_lie_behind_each_other():
    spec = make_spec("a model", PRESETS["tiny"])
    spec = replace(spec, rules=replace(spec.rules, picture=spec.rules.frame))
    processor, rng = Qwen25VlPatches(spec), np.random.default_rng(1)
    first, second = (Image.fromarray(rng.integers(0, 256, (150, 200, 3), dtype=np.uint8)) for _ in range(2))
    (alone,) = processor.images([first])
    np.testing.assert_allclose(processor.frames([first]), alone, atol=1e-6)
    values = (processor.item_shape[0], 3, 2, spec.rules.patch_size**2)
    both = processor.frames([first, second, second])
    assert len(both) == 2 * len(alone) == spec.rules.video(3, 200, 150).num_items
    of_steps = both.reshape(2, len(alone), *values)
    (other,) = processor.images([second])
    np.testing.assert_allclose(of_steps[0, :, :, :, 0], alone.reshape(-1, *values)[:, :, :, 0], atol=1e-6)
    np.testing.assert_allclose(of_steps[0, :, :, :, 1], other.reshape(-1, *values)[:, :, :, 0], atol=1e-6)
    np.testing.assert_allclose(of_steps[1], other.reshape(-1, *values), atol=1e-6)


def test_a_picture_stands_in_the_text_as_the_chat_template_has_it(rules):
    assert rules.in_text("image", rules.image(9, 9, 1)) == "<|vision_start|><|image_pad|><|vision_end|>"
    assert rules.in_text("video", rules.video(9, 9, 9)) == "<|vision_start|><|video_pad|><|vision_end|>"


def test_a_config_without_sections_is_read_as_transformers_reads_it():
    whole = PRESETS["qwen2_5_vl_7b"]
    text = {key: value for key, value in whole["text_config"].items() if key not in ("model_type", "rope_parameters")}
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    flat = {"model_type": "qwen2_5_vl", "vision_config": whole["vision_config"], **text, **rope}
    spec = make_spec("mine", flat)
    assert (spec.rules, spec.modules) == (make_spec("mine", whole).rules, make_spec("mine", whole).modules)
    fields = {key: value for key, value in spec.hf_config.items() if key != "model_type"}
    config = Qwen2_5_VLConfig(**fields).text_config
    assert config.rope_parameters["mrope_section"] == [16, 24, 24]
    assert (config.hidden_size, config.num_hidden_layers) == (3584, 28)


@pytest.mark.parametrize(
    ("processor", "picture", "frame"),
    [
        ({}, (3136, 1_003_520), (100_352, 602_112)),
        (RELEASED | {"video_processor": RELEASED}, (3136, 12_845_056), (3136, 12_845_056)),
        ({"size": {"shortest_edge": 4000, "longest_edge": 9000}}, (4000, 9000), (100_352, 602_112)),
    ],
)
def test_limits_are_the_checkpoints_own(processor, picture, frame):
    rules = make_spec("mine", PRESETS["qwen2_5_vl_7b"], processor).rules
    assert (rules.picture, rules.frame) == (PixelLimits(*picture), PixelLimits(*frame))
