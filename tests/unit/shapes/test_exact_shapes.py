"""Profiled shapes are to the token what transformers' processors and the training path make of the same records.

The oracles are `LlavaOnevisionProcessor`, `InternVLProcessor`, `Qwen2_5_VLProcessor`, `Qwen3VLProcessor` and
`Qwen2_5OmniProcessor` with their image processors for Pillow and their feature extractor, given the decoded pictures
and sounds and the whole conversation. Their video processors need torchvision; a stand-in hands the frames on. For
Qwen2.5-VL and Qwen2.5-Omni it gives the grid of patches that their image processor gives with a video's limits, for
Qwen3-VL that to which its video processor scales the frames.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import soundfile
import torch
from PIL import Image, ImageOps
from transformers import (
    BatchFeature,
    InternVLProcessor,
    LlavaOnevisionProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2_5OmniProcessor,
    Qwen3VLProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from dflop.config import ModelConfig, load_config
from dflop.loading.dataset import EncoderFeed, MicrobatchJob, MicrobatchLoader, SampleRef, TrainingRecords
from dflop.models import load_model_spec, load_runtime
from dflop.shapes import ChatTokenizer, ShapeProfiler, ShapeReader, Source, SourceRecords
from dflop.shapes.media import frame_indices, video_header
from dflop.shapes.media_limits import MediaLimits
from dflop.shapes.reader import MediumSize
from dflop.shapes.records import Record, parse_record
from dflop.shapes.samples import MEDIA_COLUMNS
from dflop.shapes.text import BUNDLED_TOKENIZER

pytestmark = pytest.mark.usefixtures("in_tmp_path")

MAX_LLM_TOKENS = 100_000
PRESETS = {"llava_onevision": "llava_ov_7b", "internvl": "internvl_8b"}
PRESETS |= {"qwen2_5_vl": "qwen2_5_vl_7b", "qwen3_vl": "qwen3_vl_4b", "qwen2_5_omni_thinker": "qwen2_5_omni_7b"}
DRAWN = [*((family, "drawn") for family in PRESETS), ("qwen2_5_omni_thinker", "sounds")]
REAL = {family: pytest.param(family, "real", marks=pytest.mark.exhaustive) for family in PRESETS}
COLUMNS = {"vision": ("num_items", "kept_vision_tokens", "vision_tokens")}
COLUMNS |= {"audio": ("num_audio_windows", "kept_audio_tokens", "audio_tokens")}


class Frames:
    """In a video processor's place: as many frames as there are."""

    model_input_names = ("pixel_values_videos",)

    def __call__(self, videos: list[list[Image.Image]], **_: object) -> BatchFeature:
        return BatchFeature({"pixel_values_videos": torch.zeros(len(videos), len(videos[0]), 3, 2, 2)})


@pytest.fixture
def processors(monkeypatch) -> dict[str, Callable]:
    monkeypatch.setattr(LlavaOnevisionProcessor, "check_argument_for_proper_class", lambda self, name, given: None)
    monkeypatch.setattr(InternVLProcessor, "check_argument_for_proper_class", lambda self, name, given: None)
    pixels = LlavaOnevisionImageProcessorPil(size={"height": 384, "width": 384})
    llava = LlavaOnevisionProcessor(
        pixels,
        PreTrainedTokenizerFast.from_pretrained(BUNDLED_TOKENIZER),
        Frames(),
        num_image_tokens=729,
        vision_feature_select_strategy="full",
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED_TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<img>", "</img>", "<IMG_CONTEXT>"]})
    for name, token in (
        ("start_image_token", "<img>"),
        ("end_image_token", "</img>"),
        ("context_image_token", "<IMG_CONTEXT>"),
        ("video_token", "<video>"),
    ):
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    tiles = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True, max_patches=12)
    released = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
    return {
        "llava_onevision": llava,
        "internvl": InternVLProcessor(tiles, tokenizer, Frames(), image_seq_length=256),
        "qwen2_5_vl": qwen_processor(Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil()),
        "qwen3_vl": qwen_processor(Qwen3VLProcessor, Qwen2VLImageProcessorPil(size=released, patch_size=16)),
        "qwen2_5_omni_thinker": omni_processor(),
    }


def qwen_processor(kind: type, pictures: Qwen2VLImageProcessorPil):
    """A Qwen's processor without its video processor, which would need torchvision."""
    qwen = object.__new__(kind)
    qwen.image_processor, qwen.video_processor = pictures, SimpleNamespace(merge_size=2, temporal_patch_size=2)
    qwen.image_token, qwen.video_token = "<|image_pad|>", "<|video_pad|>"
    qwen.vision_start_token, qwen.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    qwen.tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED_TOKENIZER)
    added = [qwen.vision_start_token, qwen.vision_end_token, qwen.image_token, qwen.video_token]
    qwen.tokenizer.add_special_tokens({"additional_special_tokens": added})
    return qwen


def omni_processor() -> Qwen2_5OmniProcessor:
    omni = qwen_processor(Qwen2_5OmniProcessor, Qwen2VLImageProcessorPil())
    omni.feature_extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=300, return_attention_mask=True)
    omni.image_token, omni.video_token, omni.audio_token = "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"
    around = ["<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"]
    added = [omni.image_token, omni.video_token, omni.audio_token, *around]
    omni.tokenizer.add_special_tokens({"additional_special_tokens": added})
    return omni


def processed_by_qwen(processor, record: Record, root: Path, row: dict) -> tuple[int, int]:
    """Items, which are the patches of a token, and tokens of a record as the processor makes them."""
    grids, texts, is_omni = [], [], isinstance(processor, Qwen2_5OmniProcessor)
    for medium, width, height, num_frames in zip(
        record.media, row["media_width"], row["media_height"], row["media_frames"], strict=True
    ):
        if medium.kind == "image":
            made = processor.image_processor([_decode(root / medium.file)], return_tensors=None)
            grids.append(made["image_grid_thw"][0])
            text = processor.replace_image_token({"image_grid_thw": made["image_grid_thw"]}, 0)
        elif medium.kind == "audio":
            samples, rate = soundfile.read(root / medium.file, dtype="float32")
            wanted = {"sampling_rate": rate, "return_attention_mask": True, "return_tensors": "np"}
            (text,) = processor._process_audio([samples], **wanted)[1]
        elif isinstance(processor, Qwen3VLProcessor):
            data = load_config().data
            header = video_header(root / medium.file, MediaLimits.of(data))
            indices = frame_indices(header, data.video)
            side = smart_resize(len(indices), height, width, 2, 32, 64 * 64, 24 * 1024 * 1024)
            grids.append(np.array([-(-len(indices) // 2), side[0] // 16, side[1] // 16]))
            about = SimpleNamespace(fps=header.fps, frames_indices=np.array(indices))
            text = processor.replace_video_token({"video_grid_thw": [grids[-1]], "video_metadata": [about]}, 0)
        else:
            of_video = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
            made = processor.image_processor([Image.new("RGB", (width, height))], size=of_video, return_tensors=None)
            grids.append(made["image_grid_thw"][0] * [-(-num_frames // 2), 1, 1])
            of_omni = {"load_audio_from_video": False} if is_omni else {}
            text = processor.replace_video_token({"video_grid_thw": [grids[-1]]}, 0, **of_omni)
        before, behind = ("vision_start", "vision_end")
        if is_omni:
            sense = "audio" if medium.kind == "audio" else "vision"
            before, behind = f"{sense}_bos", f"{sense}_eos"
        texts.append(f"<|{before}|>{text}<|{behind}|>")
    messages = [{"role": turn.role, "content": turn.content} for turn in record.turns]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    remaining = iter(texts)
    text = re.sub("<image>|<video>|<audio>", lambda _: next(remaining), text)
    assert next(remaining, None) is None
    return sum(int(np.prod(grid)) // 4 for grid in grids), len(processor.tokenizer(text)["input_ids"])


def processed(processor, record: Record, root: Path, row: dict) -> tuple[int, int]:
    """Items and tokens of a record as the processor makes them."""
    if isinstance(processor, (Qwen2_5_VLProcessor, Qwen3VLProcessor, Qwen2_5OmniProcessor)):
        return processed_by_qwen(processor, record, root, row)
    num_frames = row["num_frames"]
    pictures = [_decode(root / medium.file) for medium in record.media if medium.kind == "image"]
    clips = [[Image.new("RGB", (64, 48))] * num_frames for medium in record.media if medium.kind == "video"]
    messages = [{"role": turn.role, "content": turn.content} for turn in record.turns]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    several = {}
    if isinstance(processor, InternVLProcessor):
        text = text.replace("<image>", "<IMG_CONTEXT>")
        several = {
            "max_patches": max(1, 12 // max(1, len(pictures)))
        }  # InternVL's own rule, which transformers leaves out
    made = processor(images=[pictures] if pictures else None, text=text, videos=clips or None, **several)
    ids = made["input_ids"]
    num_tokens = len(ids[0]) if isinstance(ids[0], (list, np.ndarray)) else len(ids)
    if isinstance(processor, InternVLProcessor):
        return len(made.get("pixel_values", ())), num_tokens
    return _crops_of_llava(processor, pictures) + sum(map(len, clips)), num_tokens


def _crops_of_llava(processor, pictures: list[Image.Image]) -> int:
    if not pictures:
        return 0
    (crops,) = (processor.image_processor([pictures], do_pad=False, return_tensors=None)["pixel_values"],)
    return sum(map(len, crops))


def _decode(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def profiled(source: Source, family: str, preset: str) -> tuple[ShapeReader, pl.DataFrame, list[Record]]:
    config = load_config({"model": {"family": family, "preset": preset}})
    reader = ShapeReader(load_model_spec(config.model).rules, config.data)
    tokenizer = ChatTokenizer(None, reader.rules)
    profiler = ShapeProfiler(source=source, reader=reader, tokenizer=tokenizer, max_llm_tokens=MAX_LLM_TOKENS)
    records = SourceRecords(source, 0)
    raws = [records.read(row) for row in range(len(records))]
    frame = profiler.profile(raws)
    assert frame["reason"].null_count() == len(frame), frame["detail"].to_list()
    return reader, frame, [parse_record(raw) for raw in raws]


def source_of(data: str, request) -> Source:
    if data != "real":
        made = request.getfixturevalue("demo_data")
        manifest = made.audio_manifest if data == "sounds" else made.train_manifest
        return Source(name=data, path=manifest, media_root=manifest.parent)
    folder = request.getfixturevalue("shared_data") / "demo"
    return Source(name="real", path=folder / "demo_llava.json", media_root=folder)


@pytest.mark.parametrize(("family", "data"), [*DRAWN, *(REAL | {"qwen2_5_vl": ("qwen2_5_vl", "real")}).values()])
def test_every_record_has_the_items_and_tokens_that_transformers_gives_it(family, data, processors, request):
    source = source_of(data, request)
    _, frame, records = profiled(source, family, PRESETS[family])
    assert len(records) >= (3 if data == "sounds" else 30)
    for record, row in zip(records, frame.iter_rows(named=True), strict=True):
        expected = processed(processors[family], record, source.media_root, row)
        assert (row["num_items"], row["llm_tokens"]) == expected, record.sample_id


@pytest.mark.parametrize(("family", "data"), [*DRAWN, *REAL.values()])
def test_every_record_has_the_items_and_tokens_that_training_makes(family, data, request):
    source = source_of(data, request)
    reader, frame, _ = profiled(source, family, "tiny")
    spec = load_model_spec(ModelConfig(family=family))
    common = {
        "records": TrainingRecords([source], 0),
        "reader": reader,
        "tokenizer_folder": BUNDLED_TOKENIZER,
        "max_llm_tokens": MAX_LLM_TOKENS,
        "encoders": tuple(EncoderFeed(encoder.media, 1) for encoder in spec.encoders),
    }
    processors = load_runtime(family).processors
    of_encoders = [
        MicrobatchLoader(**common, encoder=index, processor=processors[encoder.name](spec, None))
        for index, encoder in enumerate(spec.encoders)
    ]
    columns = [COLUMNS[encoder.name] for encoder in spec.encoders]
    text = MicrobatchLoader(**common, encoder=None)
    for row in frame.iter_rows(named=True):
        job = MicrobatchJob(
            samples=(SampleRef(source.name, row["row"]),),
            media=(tuple(map(MediumSize, *(row[name] for name in MEDIA_COLUMNS))),),
            kept_tokens=(tuple(row[kept] for _, kept, _ in columns),),
            llm_tokens=(row["llm_tokens"],),
            encoder_rank=((0,) * len(columns),),
        )
        batch = text[job]
        assert len(batch.token_ids) == row["llm_tokens"]
        assert len(batch.target_ids) == row["target_tokens"]
        for loader, positions, (items, _, tokens) in zip(of_encoders, batch.feature_positions, columns, strict=True):
            loaded = loader[job]
            assert not loaded.unreadable
            assert len(loaded.batch.items) == row[items]
            assert len(positions) == row[tokens]
