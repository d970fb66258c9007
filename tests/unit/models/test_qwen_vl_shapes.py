"""What the rules of Qwen2.5-VL and Qwen3-VL share: pictures in patches, and positions in three dimensions.

The oracles are transformers' `Qwen2VLImageProcessorPil` (by its size-only function for every size) and its models.
"""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen3VLConfig, Qwen3VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dflop.base import UserError
from dflop.models import ShapeRules, qwen2_5_vl, qwen3_vl
from dflop.models.qwen2_5_vl.processing import Qwen25VlPatches
from dflop.models.qwen3_vl.processing import Qwen3VlPatches
from dflop.shapes.reader import MediumShape, PlacedText, expand_text, place_positions
from dflop.shapes.text import TokenizedText

IMAGE, VIDEO = 1, 2
RELEASED = {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
FAMILIES = {"qwen2_5_vl": (qwen2_5_vl, Qwen25VlPatches), "qwen3_vl": (qwen3_vl, Qwen3VlPatches)}
MODELS = {"qwen2_5_vl": (Qwen2_5_VLModel, Qwen2_5_VLConfig), "qwen3_vl": (Qwen3VLModel, Qwen3VLConfig)}
# (family, preset, the checkpoint's settings of its processor)
REAL = {
    "qwen2_5_vl": ("qwen2_5_vl", "qwen2_5_vl_7b", {}),
    "qwen2_5_vl as released": ("qwen2_5_vl", "qwen2_5_vl_7b", RELEASED),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl_4b", {}),
}
RULES = REAL | {"tiny qwen2_5_vl": ("qwen2_5_vl", "tiny", {}), "tiny qwen3_vl": ("qwen3_vl", "tiny", {})}
sides = st.one_of(st.integers(1, 10_000), st.integers(1, 150))
sizes = st.tuples(sides, sides).filter(lambda size: max(size) <= 200 * min(size))


def rules_of(family: str, preset: str, processor: dict) -> ShapeRules:
    module, _ = FAMILIES[family]
    return module.make_spec("a model", module.PRESETS[preset], processor).rules


@pytest.fixture(scope="module", params=RULES)
def rules(request) -> ShapeRules:
    return rules_of(*RULES[request.param])


def patches(rules: ShapeRules, width: int, height: int) -> int:
    """Of a picture, as transformers counts them."""
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": rules.picture.least, "longest_edge": rules.picture.most},
        patch_size=rules.patch_size,
        merge_size=rules.merge_size,
    )
    return processor.get_number_of_image_patches(height, width)


@settings(max_examples=200)
@given(size=sizes, num_images=st.integers(1, 5))
@example(size=(1, 1), num_images=1)
@example(size=(10_000, 50), num_images=1)
@example(size=(42, 70), num_images=1)  # halves of tokens of 28 pixels, which round to even
@example(size=(48, 80), num_images=1)  # and of 32 pixels
def test_a_picture_has_the_patches_and_tokens_that_transformers_gives_it(rules, size, num_images):
    count = rules.image(*size, num_images)
    assert math.prod(count.grid) == patches(rules, *size)
    assert count.num_items == count.num_tokens == math.prod(count.grid) // 4


@pytest.mark.parametrize("table", ["coco_val2017", "math_v", "tuxpaint_stamps"])
@pytest.mark.parametrize("name", ["qwen2_5_vl as released", "qwen3_vl"])
def test_the_shapes_of_real_pictures_are_transformers(shape_table, name, table):
    rules = rules_of(*REAL[name])
    known = [(int(row["width"]), int(row["height"])) for row in shape_table(table)]
    assert len(known) > 700
    assert [4 * rules.image(*size, 1).num_tokens for size in known] == [patches(rules, *size) for size in known]


def test_a_picture_that_is_too_long_is_refused_as_transformers_refuses_it(rules):
    with pytest.raises(ValueError, match="one side is more than 200 times the other"):
        rules.image(201, 1, 1)
    with pytest.raises(ValueError, match="must be smaller than 200"):
        patches(rules, 201, 1)
    assert rules.image(200, 1, 1).num_items


media = st.one_of(
    st.tuples(st.just("image"), st.just(1), st.integers(1, 9), st.integers(1, 9), st.just(0.0)),
    st.tuples(st.just("video"), st.integers(1, 8), st.integers(1, 6), st.integers(1, 6), st.floats(0.01, 40)),
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100)
@given(drawn=st.lists(media, max_size=4), texts=st.lists(st.integers(1, 6), min_size=5, max_size=5))
def test_positions_are_those_of_transformers_model(family, drawn, texts):
    """Qwen3-VL's text has each step of a clip by itself, with its time before it."""
    rules = rules_of(family, "tiny", {})
    ids, placed, num_tokens, grids = [0] * texts[0], [], [], {"image": [], "video": []}
    for (kind, steps, rows, columns, frame_s), behind in zip(drawn, texts[1:], strict=False):
        count = rules._of_grid((steps, 2 * rows, 2 * columns))
        times = steps if family == "qwen3_vl" else 1
        placed += [MediumShape(kind, count, frame_us=round(1e6 * frame_s))] * times
        num_tokens += [count.num_tokens // times] * times
        grids[kind].append(count.grid)
        ids += ([IMAGE if kind == "image" else VIDEO] + [0] * behind) * times
    ids = np.array(ids)
    text = TokenizedText(ids, np.zeros(len(ids), dtype=bool), np.flatnonzero(ids))
    token_ids, _ = expand_text(text, num_tokens, 1 << 20)
    ours = place_positions(text, PlacedText((), placed, num_tokens), rules, 1 << 20)
    whole = torch.from_numpy(token_ids)[None]
    given = {f"{kind}_grid_thw": torch.tensor(of_kind) for kind, of_kind in grids.items() if of_kind}
    if family == "qwen2_5_vl" and grids["video"]:
        of_steps = [2 * medium.frame_us / 1e6 for medium in placed if medium.kind == "video"]
        given["second_per_grid_ts"] = torch.tensor(of_steps)
    theirs, _ = positions_model(family).get_rope_index(input_ids=whole, mm_token_type_ids=whole, **given)
    np.testing.assert_array_equal(ours, theirs[:, 0].numpy())
    np.testing.assert_array_equal(place_positions(text, PlacedText((), placed, num_tokens), rules, 7), ours[:, :7])


@functools.cache
def positions_model(family: str) -> Qwen2_5_VLModel | Qwen3VLModel:
    fields = {key: value for key, value in FAMILIES[family][0].PRESETS["tiny"].items() if key != "model_type"}
    model, config = MODELS[family]
    with torch.device("meta"):
        return model(config(**fields))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20)
@given(many=st.lists(st.tuples(st.integers(20, 300), st.integers(20, 300)), min_size=1, max_size=3))
def test_the_processor_makes_the_items_that_the_rules_promise_and_transformers_patches(family, many):
    module, kind = FAMILIES[family]
    spec = module.make_spec("a model", module.PRESETS["tiny"])
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)) for size in many]
    processor = kind(spec)
    items = processor.images(pictures)
    assert [len(of_picture) for of_picture in items] == [spec.rules.image(*size, len(many)).num_items for size in many]
    made = processor.processor(pictures, return_tensors=None)
    found = processor.pixel_values.of(torch.from_numpy(np.concatenate(items)), torch.float32)
    np.testing.assert_array_equal(found.view(-1, processor.patch_values), made["pixel_values"])
    assert len(processor.frames([pictures[0]] * 3)) == spec.rules.video(3, *many[0]).num_items


CONTRADICTIONS = {
    "qwen2_5_vl": [
        ({}, {"patch_size": 16}, "has `patch_size` 16, but by its config.json it is 28"),
        ({}, {"size": {"shortest_edge": 9000, "longest_edge": 100}}, "scales to 9000 to 100 pixels; mend `size`"),
        ({"text_config": {"use_sliding_window": True}}, {}, "`use_sliding_window`: true; only attention to all tokens"),
        ({"vision_config": {"out_hidden_size": 96}}, {}, "`vision_config.out_hidden_size` 96, but its LLM has .* 128"),
    ],
    "qwen3_vl": [
        ({}, {"patch_size": 14}, "has `patch_size` 14, but by its config.json it is 32"),
        ({"vision_config": {"out_hidden_size": 96}}, {}, "`vision_config.out_hidden_size` 96, but its LLM has .* 128"),
        ({"vision_config": {"deepstack_visual_indexes": [0, 4]}}, {}, r"\[0, 4\]; .* layers of the 4 from 0 on"),
        ({"vision_config": {"deepstack_visual_indexes": [2, 1]}}, {}, "each once and in order"),
        ({"text_config": {"num_hidden_layers": 2}}, {}, "3 `vision_config.deepstack_visual_indexes`, but its LLM has"),
    ],
}


@pytest.mark.parametrize(
    ("family", "fields", "processor", "complaint"),
    [(family, *case) for family, cases in CONTRADICTIONS.items() for case in cases],
)
def test_what_contradicts_or_is_not_known_is_refused_by_name(family, fields, processor, complaint):
    module, _ = FAMILIES[family]
    config = module.PRESETS["tiny"] | {key: module.PRESETS["tiny"][key] | own for key, own in fields.items()}
    with pytest.raises(UserError, match=complaint):
        module.make_spec("mine", config, processor)
