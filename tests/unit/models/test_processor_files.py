"""The files of a processor beside a trained model are those that transformers reads; a checkpoint's own are kept."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, ProcessorMixin

from dflop.models import ItemCount, family_names, family_of, load_runtime
from dflop.models.microbatch import EncoderBatch
from dflop.shapes import ChatTokenizer


def tiny(family: str):
    return family_of(family).make_spec("tiny", family_of(family).presets["tiny"], {})


@pytest.fixture(params=family_names())
def written(request, tmp_path):
    """A family, and a folder with its config, tokenizer and processor as an export writes them."""
    family, spec = request.param, tiny(request.param)
    runtime, tokenizer = load_runtime(family), ChatTokenizer(None, spec.rules)
    config = runtime.make_config(spec, tokenizer.placeholder_ids, tokenizer.vocab_size(spec.media))
    config.save_pretrained(tmp_path)
    tokenizer.save(tmp_path, spec.media)
    for make_processor in runtime.processors.values():
        make_processor(spec, None).save(tmp_path)
    return family, tmp_path


def test_transformers_reads_the_image_processor_that_training_used(written):
    family, folder = written
    ours = load_runtime(family).processors["vision"](tiny(family), None).processor
    assert AutoImageProcessor.from_pretrained(folder).to_dict() == ours.to_dict()


def test_training_reads_what_it_wrote_itself(written):
    family, folder = written
    again = load_runtime(family).processors["vision"](tiny(family), folder)
    assert again.processor.to_dict() == AutoImageProcessor.from_pretrained(folder).to_dict()


def test_the_tokenizer_names_and_knows_the_tokens_that_internvls_processor_asks_it_for(written):
    family, folder = written
    if family != "internvl":
        return
    tokenizer, ours = AutoTokenizer.from_pretrained(folder), ChatTokenizer(None, tiny(family).rules)
    assert (tokenizer.start_image_token, tokenizer.end_image_token) == tiny(family).rules.special_tokens
    assert tokenizer.context_image_token_id == ours.placeholder_ids["image"]
    assert tokenizer.video_token == "<video>"
    parts = [{"type": "image"}, {"type": "text", "text": "\nWhat?"}, {"type": "video"}]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert "\n<IMG_CONTEXT>\nWhat?<video><|im_end|>" in prompt


def test_the_chat_template_writes_pictures_as_the_model_was_trained_on_them(written):
    family, folder = written
    if family not in ("qwen2_5_vl", "qwen3_vl"):
        return
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}, {"type": "video"}]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    image = tiny(family).rules.in_text("image", ItemCount(1, 1))
    # Qwen3-VL's processor puts times and marks around each step in the placeholder's place.
    video = "<|vision_start|><|video_pad|><|vision_end|>"
    assert f"{image}What?{video}<|im_end|>" in prompt
    assert (tokenizer.image_token, tokenizer.video_token) == ("<|image_pad|>", "<|video_pad|>")


@pytest.fixture
def without_clips(monkeypatch):
    """Processors are read without the part for clips, which needs torchvision; torch's CPU build has none here."""
    nothing = SimpleNamespace(from_pretrained=lambda *_, **__: None)
    monkeypatch.setattr("transformers.models.auto.video_processing_auto.AutoVideoProcessor", nothing)
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)


@pytest.mark.usefixtures("without_clips")
def test_the_processor_makes_of_pictures_what_training_makes(written):
    family, folder = written
    spec, processor = tiny(family), AutoProcessor.from_pretrained(folder)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 200, 3), dtype=np.uint8))
    prompt = processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}])
    made = processor(images=[picture], text=prompt, return_tensors="pt")
    count = spec.rules.image(200, 90, 1)
    (placeholder,) = {ChatTokenizer(None, spec.rules).placeholder_ids["image"]}
    assert int((made["input_ids"] == placeholder).sum()) == count.num_tokens
    pixels = load_runtime(family).processors["vision"](spec, None)
    (items,) = pixels.images([picture])
    assert items.shape == (count.num_items, *pixels.item_shape)
    assert items.dtype == np.uint8
    loaded = EncoderBatch(items=torch.from_numpy(items), media=(), kept_tokens=(), pixel_values=pixels.pixel_values)
    for dtype in (torch.float32, torch.bfloat16):
        values = loaded.to(torch.device("cpu"), dtype).items
        assert torch.equal(values.flatten(), made["pixel_values"].flatten().to(dtype))  # bit by bit


def test_the_files_of_a_checkpoint_are_kept_as_they_are(tmp_path):
    spec = tiny("internvl")
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "model"
    checkpoint.mkdir()
    folder.mkdir()
    own = {"image_processor": {"size": {"height": 56, "width": 56}, "image_mean": [0.5] * 3, "max_patches": 6}}
    (checkpoint / "processor_config.json").write_text(json.dumps(own | {"image_seq_length": 4}))
    (checkpoint / "video_preprocessor_config.json").write_text('{"size": {"height": 56, "width": 56}}')
    tokenizer = {"start_image_token": "<img>", "extra_special_tokens": {}, "model_max_length": 5}
    tokenizer |= dict.fromkeys(("end_image_token", "context_image_token", "video_token"), "<a>")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    pixels = load_runtime("internvl").processors["vision"](spec, checkpoint)
    assert tuple(pixels.processor.image_mean) == (0.5,) * 3
    pixels.save(folder)
    for name in ("processor_config.json", "video_preprocessor_config.json"):
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()
    assert json.loads((folder / "tokenizer_config.json").read_text()) == tokenizer
