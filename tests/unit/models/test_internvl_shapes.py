"""The shape rules are transformers' own: every number equals its image processor's, its processor's or its model's.

The oracles are `GotOcr2ImageProcessorPil` (tiles; on real pictures where they are small, by its size-only function for
every size), `InternVLProcessor` (the text) and `InternVLModel` on the meta device (features of a tile). Only the rule
for several pictures in one sample is not transformers': InternVL's training code divides the largest number of tiles.
"""

import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import InternVLConfig, InternVLModel, InternVLProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from dflop.base import UserError
from dflop.models import ItemCount
from dflop.models.internvl import PRESETS, InternvlShapes, make_spec

sides = st.one_of(st.integers(1, 10_000), st.integers(1, 150))
properties = settings(max_examples=200)


class Oracle:
    """transformers' processor and model of one geometry."""

    def __init__(self, fields: dict) -> None:
        self.rules: InternvlShapes = make_spec("a model", fields).rules
        side = self.rules.image_size
        self.image_processor = GotOcr2ImageProcessorPil(size={"height": side, "width": side})
        # Built without its tokenizer and video processor, which would need files and torchvision.
        self.processor = object.__new__(InternVLProcessor)
        self.processor.image_processor = self.image_processor
        self.processor.image_seq_length = fields["image_seq_length"]
        self.processor.image_token = "<IMG_CONTEXT>"
        self.processor.start_image_token, self.processor.end_image_token = self.rules.special_tokens
        shallow = fields["vision_config"] | {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
        with torch.device("meta"):
            config = InternVLConfig(
                vision_config=shallow,
                text_config=PRESETS["tiny"]["text_config"],
                downsample_ratio=fields["downsample_ratio"],
            )
            self.model = InternVLModel(config)

    def tiles(self, width: int, height: int, num_images: int = 1) -> int:
        settings = InternVLProcessor.images_kwargs | {"max_patches": max(1, 12 // num_images)}
        return self.image_processor.get_number_of_image_patches(height, width, settings)

    def text_of_image(self, num_tiles: int) -> str:
        return self.processor.replace_image_token({"num_patches": [num_tiles]}, 0)

    def text_of_video(self, num_frames: int) -> str:
        clip = torch.empty(num_frames, 3, 1, 1, device="meta")
        return self.processor.replace_video_token({"pixel_values_videos": [clip]}, 0)

    def features(self, num_tiles: int) -> int:
        side = self.rules.image_size
        tiles = torch.empty(num_tiles, 3, side, side, device="meta")
        return self.model.get_image_features(tiles).pooler_output.flatten(0, 1).shape[0]


@pytest.fixture(scope="module", params=["tiny", "internvl_8b"])
def oracle(request) -> Oracle:
    return Oracle(PRESETS[request.param])


@pytest.fixture(scope="module")
def real() -> Oracle:
    return Oracle(PRESETS["internvl_8b"])


def test_all_real_models_have_the_same_rules(real):
    fields = [PRESETS[name] for name in PRESETS if name != "tiny"]
    assert len(fields) > 4
    assert all(make_spec("a model", each).rules == real.rules for each in fields)
    assert all(each["image_seq_length"] == real.rules.tokens_per_tile for each in fields)


def with_tokens(text: str, count: ItemCount) -> str:
    """The text that the tokenizer gets, each of its placeholders as often as it stands for a token."""
    num_tokens, rest = divmod(count.num_tokens, text.count("<IMG_CONTEXT>"))
    assert not rest
    return text.replace("<IMG_CONTEXT>", "<IMG_CONTEXT>" * num_tokens)


@properties
@given(width=sides, height=sides, num_images=st.integers(1, 15))
@example(width=10_000, height=1, num_images=1)
@example(width=1, height=10_000, num_images=1)
@example(width=1, height=1, num_images=1)
@example(width=10_000, height=10_000, num_images=1)
@example(width=2520, height=8526, num_images=1)
@example(width=10_000, height=1, num_images=12)
@example(width=10_000, height=1, num_images=13)
def test_a_picture_becomes_as_many_tiles_as_transformers_cuts(oracle, width, height, num_images):
    """Where there are several pictures, transformers is asked with the share of tiles that each may have."""
    count = oracle.rules.image(width, height, num_images)
    assert count[:2] == (oracle.tiles(width, height, num_images), count.num_items * oracle.rules.tokens_per_tile)


grids = st.tuples(st.integers(1, 12), st.integers(1, 12)).filter(lambda grid: grid[0] * grid[1] <= 12)


@properties
@given(first=grids, second=grids, scale=st.integers(1, 400), num_images=st.integers(1, 4))
@example(first=(1, 1), second=(1, 1), scale=316, num_images=1)  # 632 px, just too small for two tiles a side
@example(first=(1, 1), second=(1, 1), scale=317, num_images=1)
@example(first=(6, 1), second=(7, 1), scale=100, num_images=1)
@example(first=(1, 6), second=(1, 7), scale=100, num_images=1)
def test_ties_between_grids_are_broken_as_transformers_breaks_them(oracle, first, second, scale, num_images):
    """The aspect ratio is midway between two grids': the same for both, or two that are often equally close."""
    numerator = first[0] * second[1] + second[0] * first[1]
    denominator = 2 * first[1] * second[1]
    width, height = numerator * scale, denominator * scale
    assert oracle.rules.image(width, height, num_images).num_items == oracle.tiles(width, height, num_images)


@pytest.mark.parametrize(("width", "height", "num_tiles"), [(126, 56, 3), (135, 60, 9), (144, 64, 11)])
def test_of_equally_close_grids_the_largest_is_taken_that_the_picture_covers_more_than_half(width, height, num_tiles):
    """9:4 is as far from 2:1 (one tile high or two) as from 5:2; 126 x 56 pixels are exactly half of 8 tiles of 42."""
    processor = GotOcr2ImageProcessorPil(size={"height": 42, "width": 42}, crop_to_patches=True)
    rules = InternvlShapes(image_size=42, patch_size=14, downsample_ratio=1.0, min_tiles=1, max_tiles=12)
    assert rules.image(width, height, 1).num_items == num_tiles
    assert processor.get_number_of_image_patches(height, width) == num_tiles


@settings(max_examples=60)
@given(
    width=sides, height=sides, bounds=st.tuples(st.integers(1, 20), st.integers(0, 40)), num_images=st.integers(1, 3)
)
@example(width=30, height=10, bounds=(5, 4), num_images=1)  # no grid has so many and so few tiles
def test_a_checkpoints_own_numbers_of_tiles_are_kept(real, width, height, bounds, num_images):
    fewest, most = bounds
    rules = make_spec("mine", PRESETS["internvl_8b"], {"min_patches": fewest, "max_patches": most}).rules
    share = {"min_patches": fewest, "max_patches": max(1, most // num_images), "crop_to_patches": True}
    expected = real.image_processor.get_number_of_image_patches(height, width, share)
    assert rules.image(width, height, num_images).num_items == expected


@settings(max_examples=30)
@given(sizes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=3))
@example(sizes=[(300, 1)])
@example(sizes=[(1, 300)])
def test_real_pictures_are_cut_into_the_tiles_that_the_rules_promise(sizes):
    oracle = Oracle(PRESETS["tiny"])
    side, most = oracle.rules.image_size, max(1, 12 // len(sizes))
    pictures = [Image.new("RGB", size) for size in sizes]
    made = oracle.image_processor(pictures, max_patches=most, return_tensors=None, **InternVLProcessor.images_kwargs)
    counts = [oracle.rules.image(*size, len(sizes)) for size in sizes]
    assert [count.num_items for count in counts] == list(made["num_patches"])
    assert [tile.shape for tile in made["pixel_values"]] == [(3, side, side)] * sum(count.num_items for count in counts)


def test_the_llm_sees_as_many_tokens_of_a_tile_as_the_model_makes(oracle):
    for num_tiles in (1, 13):
        assert num_tiles * oracle.rules.tokens_per_tile == oracle.features(num_tiles)
    assert oracle.rules.tokens_per_tile == oracle.processor.image_seq_length


def test_the_real_models_tile_takes_256_tokens(real):
    assert real.rules.tokens_per_tile == 256
    assert real.rules.image(1024, 768, 1)[:2] == (13, 13 * 256)


@settings(max_examples=30)
@given(width=sides, height=sides, num_images=st.integers(1, 4))
def test_a_picture_stands_in_the_text_as_transformers_writes_it(oracle, width, height, num_images):
    count = oracle.rules.image(width, height, num_images)
    text = oracle.rules.in_text("image", count)
    assert with_tokens(text, count) == oracle.text_of_image(count.num_items)


@settings(max_examples=20)
@given(num_frames=st.integers(1, 64))
def test_a_clip_is_one_tile_a_frame_and_stands_in_the_text_as_transformers_writes_it(oracle, num_frames):
    count = oracle.rules.video(num_frames, 64, 48)
    assert count[:2] == (num_frames, oracle.features(num_frames))
    assert with_tokens(oracle.rules.in_text("video", count), count) == oracle.text_of_video(num_frames)


def test_the_text_holds_no_other_special_token_than_those_that_are_named(real):
    text = "".join(
        real.rules.in_text(kind, count)
        for kind, count in (("image", real.rules.image(640, 480, 1)), ("video", real.rules.video(3, 64, 48)))
    )
    assert set(re.findall(r"<[^>]+>", text)) == {*real.rules.special_tokens, "<IMG_CONTEXT>"}


@pytest.mark.parametrize("table", ["coco_val2017", "math_v", "tuxpaint_stamps"])
def test_the_published_shapes_of_real_pictures_are_met(shape_table, real, table):
    """Without exception: the tables' rule and transformers' list grids of equal area in another order, which changes
    the form of the grid that wins a tie, but not its number of tiles."""
    rows = shape_table(table)
    sizes = [(int(row["width"]), int(row["height"])) for row in rows]
    tiles = [real.rules.image(*size, 1).num_items for size in sizes]
    assert len(rows) > 700
    assert tiles == [int(row["internvl_tiles"]) for row in rows]
    assert tiles == [real.tiles(*size) for size in sizes]


@pytest.mark.parametrize(
    "table", ["nextqa_video", "activitynet_captions_train", "activitynet_captions_val", "charades_train"]
)
def test_the_published_shapes_of_real_clips_are_met(shape_table, real, table):
    """The tables hold one tile a frame; `ov_tiles` are the frames that LLaVA-OneVision takes of the same clips."""
    rows = shape_table(table)
    assert len(rows) > 500
    assert [real.rules.video(int(row["ov_tiles"]), 64, 48).num_items for row in rows] == [
        int(row["internvl_tiles"]) for row in rows
    ]


@pytest.mark.parametrize(
    ("vision", "complaint"),
    [
        ({"image_size": [448, 224]}, r"`vision_config.image_size` \[448, 224\]; only squares are known"),
        ({"image_size": 70}, "5 patches a side and `downsample_ratio` 0.5: 2.5 are left, which must be a whole number"),
    ],
)
def test_a_config_that_the_rules_cannot_use_is_refused(vision, complaint):
    with pytest.raises(UserError, match=complaint):
        make_spec("mine", PRESETS["tiny"] | {"vision_config": vision})


def test_a_config_may_leave_out_what_transformers_knows():
    fields = {"model_type": "internvl", "text_config": PRESETS["internvl_8b"]["text_config"]}
    spec, whole = make_spec("mine", fields), make_spec("mine", PRESETS["internvl_8b"])
    assert (spec.rules, spec.modules) == (whole.rules, whole.modules)
    assert InternVLConfig(**fields).downsample_ratio == spec.rules.downsample_ratio
