"""The shape rules are transformers' own: every number equals its image processor's, its processor's or its model's.

Only headers are known when shapes are profiled, so the rules are written anew in plain Python. The oracles here are
`LlavaOnevisionImageProcessorPil` (crops), `LlavaOnevisionProcessor` (placeholder tokens) and the model's
`pack_image_features` (features), run on the meta device so that nothing is computed.
"""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import LlavaOnevisionConfig, LlavaOnevisionProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel, image_size_to_num_patches

from dflop.models.llava_onevision import PRESETS, LlavaOnevisionShapes, make_spec
from dflop.models.llava_onevision.processing import LlavaOnevisionPixels

# The geometry of the released models (SigLIP at 384 px in patches of 14, any grid up to 6x6) under a small LLM.
REAL = PRESETS["llava_ov_7b"] | {"text_config": PRESETS["tiny"]["text_config"]}
GEOMETRIES = {"tiny": PRESETS["tiny"], "real": REAL}

sides = st.one_of(st.integers(1, 4000), st.integers(1, 120))
properties = settings(max_examples=150)


class Oracle:
    """transformers' processor and model of one geometry."""

    def __init__(self, fields: dict) -> None:
        self.rules: LlavaOnevisionShapes = make_spec("a model", fields).rules
        side = self.rules.image_size
        self.image_processor = LlavaOnevisionImageProcessorPil(size={"height": side, "width": side})
        self.image_processor.image_grid_pinpoints = fields["image_grid_pinpoints"]
        # Built without its tokenizer and video processor, which would need files and torchvision.
        self.processor = object.__new__(LlavaOnevisionProcessor)
        self.processor.image_processor = self.image_processor
        self.processor.num_image_tokens = self.rules.tokens_per_item
        self.processor.vision_aspect_ratio = "anyres_max_9"
        self.processor.video_token = "v"
        shallow = fields["vision_config"] | {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
        config = LlavaOnevisionConfig(**fields | {"vision_config": shallow, "text_config": fields["text_config"]})
        with torch.device("meta"):
            self.model = LlavaOnevisionModel(config)

    def crops_by_size(self, width: int, height: int) -> int:
        return image_size_to_num_patches(
            (height, width), self.image_processor.image_grid_pinpoints, self.rules.image_size
        )

    def crops(self, width: int, height: int, num_images: int) -> int:
        pictures = [Image.new("RGB", (width, height))] * num_images
        return len(self.image_processor([pictures], do_pad=False, return_tensors=None)["pixel_values"][0])

    def placeholder_tokens(self, width: int, height: int) -> int:
        return self.processor._get_number_of_features(height, width, self.rules.image_size, self.rules.image_size)

    def features(self, width: int, height: int, num_items: int) -> int:
        per_item = torch.empty(num_items, self.rules.tokens_per_item, 1, device="meta")
        newline = torch.empty(1, device="meta")
        packed, _ = self.model.pack_image_features([per_item], [(height, width)], image_newline=newline)
        return len(packed[0])


@pytest.fixture(scope="module", params=GEOMETRIES)
def oracle(request) -> Oracle:
    return Oracle(GEOMETRIES[request.param])


@properties
@given(width=sides, height=sides)
@example(width=4000, height=1)
@example(width=1, height=4000)
@example(width=1, height=1)
@example(width=4000, height=4000)
@example(width=2304, height=2304)
@example(width=82, height=205)  # 205 * (6 / 82) is 15, but not quite so in floating point
@example(width=423, height=188)
@example(width=94, height=423)
def test_a_single_picture_takes_as_many_tokens_as_transformers_gives_it(oracle, width, height):
    count = oracle.rules.image(width, height, 1)
    assert count.num_items == oracle.crops_by_size(width, height)
    assert count.num_tokens == oracle.placeholder_tokens(width, height)
    assert count.num_tokens == oracle.features(width, height, count.num_items)


@settings(max_examples=40)
@given(width=st.integers(1, 300), height=st.integers(1, 300), num_images=st.integers(1, 3))
@example(width=300, height=1, num_images=1)
@example(width=1, height=300, num_images=1)
def test_a_picture_becomes_as_many_crops_as_the_image_processor_cuts(oracle, width, height, num_images):
    assert oracle.rules.image(width, height, num_images).num_items == oracle.crops(width, height, num_images)


@properties
@given(width=sides, height=sides, num_images=st.integers(2, 9))
def test_a_picture_among_others_is_one_crop_and_a_newline(oracle, width, height, num_images):
    count = oracle.rules.image(width, height, num_images)
    assert count[:2] == (1, oracle.processor.num_image_tokens + 1)
    assert count.num_tokens == oracle.features(width, height, 1)


@given(num_frames=st.integers(1, 64))
@settings(max_examples=20)
def test_a_clip_takes_as_many_tokens_as_transformers_gives_it(oracle, num_frames):
    clip = {"pixel_values_videos": [[None] * num_frames]}
    pooled = oracle.model.apply_pooling(torch.empty(num_frames, oracle.rules.tokens_per_item, 1, device="meta"))
    count = oracle.rules.video(num_frames, 64, 48)
    assert count[:2] == (num_frames, len(oracle.processor.replace_video_token(clip, 0)))
    assert count.num_tokens == pooled.flatten(0, 1).shape[0] + 1


@properties
@given(width=sides, height=sides)
def test_the_llm_never_sees_more_than_the_cap_of_crops_allows(oracle, width, height):
    """Scaling begins only 1.1 times above the cap; the base crop and a newline a row come on top."""
    rules = oracle.rules
    rows = rules.patches_per_side * 6
    most = rules.tokens_per_item * (1 + rules.max_crops * 1.1**2) + rows
    assert rules.tokens_per_item <= rules.image(width, height, 1).num_tokens <= most


@settings(max_examples=25)
@given(sizes=st.lists(st.tuples(st.integers(1, 250), st.integers(1, 250)), min_size=1, max_size=3))
def test_the_training_path_makes_the_items_that_the_rules_promise(sizes):
    rules = make_spec("tiny", PRESETS["tiny"]).rules
    pixels = LlavaOnevisionPixels(make_spec("tiny", PRESETS["tiny"]))
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)) for size in sizes]
    crops = pixels.images(pictures)
    assert [len(items) for items in crops] == [rules.image(*size, len(sizes)).num_items for size in sizes]
    assert {items.shape[1:] for items in crops} == {(3, rules.image_size, rules.image_size)}
    made = pixels.processor([pictures], do_pad=False, return_tensors=None)["pixel_values"]
    found = pixels.pixel_values.of(torch.from_numpy(np.concatenate(crops)), torch.float32)
    np.testing.assert_array_equal(found, np.concatenate(made))


def test_frames_pass_through_the_steps_of_a_picture_that_needs_no_cutting():
    """A frame of the encoder's own size is only rescaled and normalised, as a single crop of a picture is."""
    rules = make_spec("tiny", PRESETS["tiny"]).rules
    pixels = LlavaOnevisionPixels(make_spec("tiny", PRESETS["tiny"]))
    noise = np.random.default_rng(0).integers(0, 256, (rules.image_size, rules.image_size, 3), dtype=np.uint8)
    frame = Image.fromarray(noise)
    np.testing.assert_array_equal(pixels.frames([frame]), pixels.images([frame])[0][:1])
    (item,) = pixels.pixel_values.of(torch.from_numpy(pixels.frames([frame])), torch.float32)
    mean, std = np.array(pixels.processor.image_mean), np.array(pixels.processor.image_std)
    np.testing.assert_allclose(item, ((noise / 255 - mean) / std).transpose(2, 0, 1), atol=1e-5)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_placeholder_stays_in_the_text_as_it_is(kind):
    rules = make_spec("tiny", PRESETS["tiny"]).rules
    assert rules.special_tokens == ()
    assert rules.in_text(kind, rules.video(3, 64, 48)) == rules.placeholder(kind) == f"<{kind}>"


def test_every_size_of_the_published_pictures_is_met(shape_table, oracle):
    """All distinct sizes, up to 2,520 x 8,526, by transformers' functions that need no pixels."""
    sizes = set()
    for table in ("coco_val2017", "math_v", "tuxpaint_stamps"):
        sizes |= {(int(row["width"]), int(row["height"])) for row in shape_table(table)}
    assert len(sizes) > 3000
    assert (2520, 8526) in sizes
    for size in sizes:
        counts = oracle.crops_by_size(*size), oracle.placeholder_tokens(*size)
        assert oracle.rules.image(*size, 1)[:2] == counts, size


@pytest.mark.parametrize(
    "table", ["nextqa_video", "activitynet_captions_train", "activitynet_captions_val", "charades_train"]
)
def test_the_published_shapes_of_real_clips_are_met(shape_table, table):
    """The tables leave out the one newline token that transformers puts after a clip."""
    rules = Oracle(REAL).rules
    rows = shape_table(table)
    assert len(rows) > 500
    assert [rules.video(int(row["ov_tiles"]), 64, 48).num_tokens - 1 for row in rows] == [
        int(row["ov_visual_tokens"]) for row in rows
    ]
