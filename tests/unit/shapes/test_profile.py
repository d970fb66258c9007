"""Profiled shapes are what training makes: the loader's microbatches have the very items and tokens, file by file."""

import copy
import json
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dflop.config import AudioConfig, DataConfig, SourceConfig
from dflop.loading.dataset import EncoderFeed, MicrobatchJob, MicrobatchLoader, SampleRef, TrainingRecords
from dflop.models.llava_onevision.processing import LlavaOnevisionPixels
from dflop.models.llava_onevision.runtime import RUNTIME
from dflop.shapes import ChatTokenizer, Source, list_shards, list_sources, media_limits, profile_shard
from dflop.shapes import reader as reader_module
from dflop.shapes.media import VideoHeader
from dflop.shapes.media_limits import unreadable
from dflop.shapes.reader import MediumSize
from dflop.shapes.record_media import EmbeddedBytes, RecordError
from dflop.shapes.records import parse_record
from dflop.shapes.samples import MEDIA_COLUMNS
from dflop.shapes.text import BUNDLED_TOKENIZER
from dflop.store import MODALITIES, REJECT_REASONS, SHARD_SCHEMA

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@dataclass(frozen=True)
class Loaded:
    """What one sample is for training."""

    num_items: int
    num_features: int
    text: object


@pytest.fixture(scope="module")
def load(tiny_spec, tokenizer, reader):
    """Each sample alone in a microbatch, through both kinds of loader and the encoder itself."""
    config = RUNTIME.make_config(tiny_spec, tokenizer.placeholder_ids, tokenizer.vocab_size())
    encoder = RUNTIME.build_stage(config, "vision", layers=range(4), seed=0)
    pixels = LlavaOnevisionPixels(tiny_spec)

    def run(manifest: Path, frame: pl.DataFrame, max_llm_tokens: int = 100_000) -> list[Loaded]:
        sources = list_sources(DataConfig(sources=[SourceConfig(path=str(manifest), name="it")]))
        arguments = {
            "records": TrainingRecords(sources, 0),
            "reader": reader,
            "tokenizer_folder": BUNDLED_TOKENIZER,
            "max_llm_tokens": max_llm_tokens,
            "encoders": (EncoderFeed(("image", "video"), 1),),
        }
        media_loader = MicrobatchLoader(encoder=0, processor=pixels, **arguments)
        text_loader = MicrobatchLoader(encoder=None, **arguments)
        loaded = []
        for row in frame.iter_rows(named=True):
            job = MicrobatchJob(
                samples=(SampleRef("it", row["row"]),),
                media=(tuple(map(MediumSize, *(row[name] for name in MEDIA_COLUMNS))),),
                kept_tokens=((row["kept_vision_tokens"],),),
                llm_tokens=(row["llm_tokens"],),
                encoder_rank=((0,),),
            )
            num_items = num_features = 0
            if row["num_items"]:
                visual = media_loader[job]
                assert visual.unreadable == ()
                batch = visual.batch.to(torch.device("cpu"), torch.float32)
                num_items = len(batch.items)
                whole = replace(batch, kept_tokens=(1 << 30,))
                with torch.no_grad():
                    num_features = len(encoder(whole)[0])
                    assert len(encoder(batch)[0]) == row["kept_vision_tokens"]
            loaded.append(Loaded(num_items, num_features, text_loader[job]))
        return loaded

    return run


def check_against_training(frame: pl.DataFrame, loaded: list[Loaded], max_llm_tokens: int) -> None:
    for row, sample in zip(frame.iter_rows(named=True), loaded, strict=True):
        assert row["num_items"] == sample.num_items, row
        assert row["vision_tokens"] == sample.num_features, row
        assert row["kept_vision_tokens"] == len(sample.text.feature_positions[0]), row
        assert row["llm_tokens"] == len(sample.text.token_ids) == sample.text.segment_ends.ends[0], row
        assert row["target_tokens"] == len(sample.text.target_ids) == len(sample.text.target_positions), row
        assert row["truncated"] == (row["text_tokens"] + row["vision_tokens"] > max_llm_tokens), row
        assert torch.equal(sample.text.token_ids[sample.text.target_positions + 1], sample.text.target_ids)


# 400 cuts some samples, 60 leaves most nothing to learn.
@pytest.mark.parametrize("max_llm_tokens", [100_000, 400, 150, 60])
def test_every_drawn_sample_is_for_training_what_its_shape_says(demo_data, profile_records, load, max_llm_tokens):
    records = json.loads(demo_data.train_manifest.read_text())
    frame = profile_records(records, demo_data.train_manifest.parent, max_llm_tokens=max_llm_tokens)
    assert set(frame["reason"].drop_nulls()) <= {"too_long"}
    usable = frame.filter(pl.col("reason").is_null())
    check_against_training(usable, load(demo_data.train_manifest, usable, max_llm_tokens), max_llm_tokens)
    if max_llm_tokens == 100_000:
        assert len(usable) == len(records)
        assert set(usable["modality"]) == {"text", "image", "multi_image", "video"}
    else:
        assert usable["truncated"].any()


def test_a_sample_that_is_cut_inside_a_later_picture_is_for_training_what_its_shape_says(
    tmp_path, profile_records, load
):
    Image.new("RGB", (300, 200)).save(tmp_path / "a.png")
    turns = [("human", "hello"), ("gpt", "Hi."), ("human", "<image> what?"), ("gpt", "Blue.")]
    record = {"image": "a.png", "conversations": [{"from": who, "value": text} for who, text in turns]}
    manifest = tmp_path / "train.json"
    manifest.write_text(json.dumps([record]))
    frame = profile_records([record], tmp_path, max_llm_tokens=80)
    assert 0 < frame["kept_vision_tokens"][0] < frame["vision_tokens"][0]
    check_against_training(frame, load(manifest, frame, 80), 80)


def test_a_profile_has_one_row_a_record_in_the_declared_columns(demo_data, profile_records):
    records = json.loads(demo_data.train_manifest.read_text()) + json.loads(demo_data.audio_manifest.read_text())
    frame = profile_records(records, demo_data.train_manifest.parent)
    assert frame.schema == SHARD_SCHEMA
    assert frame["row"].to_list() == list(range(len(records)))
    assert frame["sample_id"].to_list() == [record["id"] for record in records]
    modalities = [record["id"].rsplit("-", 1)[0] for record in records]
    assert frame["modality"].to_list() == modalities
    assert set(modalities) <= set(MODALITIES)


def test_sums_are_made_of_their_parts(demo_data, profile_records):
    records = json.loads(demo_data.train_manifest.read_text()) + json.loads(demo_data.audio_manifest.read_text())
    frame = profile_records(records, demo_data.train_manifest.parent)
    parts = frame.select(pl.sum_horizontal("text_tokens", "vision_tokens", "audio_tokens")).to_series()
    assert (frame["llm_tokens"] == parts).all()
    assert (frame["target_tokens"] < frame["text_tokens"]).all()
    sounds = frame.filter(pl.col("modality") == "audio")
    assert (sounds["audio_s"] > 0.4).all()
    assert (sounds["audio_tokens"] > 10).all()
    assert (sounds["num_items"] == 0).all()
    assert (sounds["num_audio_windows"] == 1).all()
    assert (sounds["audio_rate_hz"] == 16_000).all()
    clips = frame.filter(pl.col("modality") == "video")
    assert (clips["num_frames"] == clips["num_items"]).all()


@pytest.fixture
def few(tmp_path):
    root = tmp_path / "media"
    root.mkdir()
    Image.new("RGB", (100, 50)).save(root / "good.png")
    (root / "cut.png").write_bytes((root / "good.png").read_bytes()[:20])
    soundfile.write(root / "tone.wav", np.zeros(16_000), 16_000)
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    return root


def record(question: str, answer: str = "Yes.", **more) -> dict:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}], **more}


def test_windows_and_pooling_of_sounds_are_the_configs_to_say(few, reader, profile_source):
    soundfile.write(few / "long.wav", np.zeros(70 * 16_000), 16_000)
    soundfile.write(few / "low.wav", np.zeros(8_000), 8_000)
    records = [record("<audio><audio>", audio=["long.wav", "low.wav"]), record("hello")]
    Path("train.json").write_text(json.dumps(records))
    source = Source(name="it", path=Path("train.json"), media_root=few)
    columns = ["audio_s", "audio_rate_hz", "num_audio_windows", "audio_tokens"]
    frame = profile_source(source)
    assert frame.select(columns).rows() == [(71.0, 16_000, 4, 1750 + 25), (0.0, None, 0, 0)]
    audio = AudioConfig(window_s=10.0, pooling=1)
    frame = profile_source(source, reader=replace(reader, data=replace(reader.data, audio=audio)))
    assert frame.select(columns).row(0) == (71.0, 16_000, 8, 3500 + 50)


def test_a_text_that_is_too_long_says_how_long_and_which_key_cut_it(few, profile_records):
    detail = profile_records([record("word " * 150)], few, max_llm_tokens=100)["detail"][0]
    assert "the first 100 (data.max_llm_tokens) hold nothing to learn" in detail
    assert int(detail.split()[0]) > 150


def test_a_chat_template_that_drops_media_costs_the_record(few, profile_records, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((BUNDLED_TOKENIZER / "tokenizer.json").read_bytes())
    template = (BUNDLED_TOKENIZER / "chat_template.jinja").read_text()
    forgetful = template.replace("{{- message['content'] -}}", "{{- message['content']|replace('<image>', '') -}}")
    assert forgetful != template
    (folder / "chat_template.jinja").write_text(forgetful)
    records = [record("<image> what?", image="good.png"), record("hello")]
    frame = profile_records(records, few, tokenizer=ChatTokenizer(folder))
    assert frame["reason"].to_list() == ["placeholder_mismatch", None]
    assert "chat template drops or repeats" in frame["detail"][0]


def test_a_shard_of_more_records_than_are_tokenised_at_once_keeps_their_order(few, profile_records):
    records = [record(f"question {'x ' * (number % 7)}", id=number) for number in range(1100)]
    records[600] = None
    frame = profile_records(records, few)
    alone = profile_records(records[:7], few)["text_tokens"].to_list()
    assert frame["row"].to_list() == list(range(1100))
    assert frame["sample_id"][599:602].to_list() == ["599", None, "601"]
    assert frame["text_tokens"][1092:1099].to_list() == alone[0:7]


def test_embedded_media_are_let_go_as_soon_as_their_shape_is_known(few, profile_records):
    held = weakref.WeakSet()
    most = 0

    def records():
        nonlocal most
        for number in range(600):
            content = (few / "good.png").read_bytes() if number % 3 else b"no picture"
            picture = EmbeddedBytes(f"{number}.png", content)
            held.add(picture)
            most = max(most, len(held))
            yield record("<image>", image=picture, id=number)
            del picture

    frame = profile_records(records(), few)
    assert frame["reason"].to_list() == ["unreadable_media", None, None] * 200
    assert most < 5


def test_long_texts_are_tokenised_few_at_a_time_and_keep_their_order(few, profile_records, tokenizer, monkeypatch):
    counted = []
    count = type(tokenizer).count
    monkeypatch.setattr(type(tokenizer), "count", lambda self, turns: counted.append(len(turns)) or count(self, turns))
    texts = [record("word " * 100_000, "Yes.", id=number) for number in range(30)]
    frame = profile_records(texts, few, max_llm_tokens=1_000_000)
    assert frame["sample_id"].to_list() == [str(number) for number in range(30)]
    assert sum(counted) == 30
    assert 1 < max(counted) < 12


def test_an_empty_shard_has_the_columns_too(few, profile_records):
    assert profile_records([], few).schema == SHARD_SCHEMA


KEYS = ("id", "image", "images", "video", "audio", "width", "height", "conversations", "messages")
INNER_KEYS = ("from", "value", "role", "content", "type", "text", "image", "path", "bytes")
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.binary(max_size=8)
    | st.text(st.characters(), max_size=6)
    | st.sampled_from(
        ["good.png", "cut.png", "tone.wav", "<image>", "<audio>\n", "<|im_end|>", "human", "gpt", "image"]
    )
    | st.sampled_from([0, 10**30, float("nan"), "\ud83d", "\0", "a" * 5000, "../secret.png", "text", "user"])
)
anything = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER_KEYS), inner, max_size=3),
    max_leaves=5,
)
whole = [
    record("<image>", image="good.png", width=100, height=50),
    record("<image><audio>", images=[{"bytes": None, "path": "good.png"}], audio="tone.wav"),
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        ]
    },
]


@st.composite
def damaged_records(draw):
    """A record with something else at one place, or at several, or nothing like a record at all."""
    raw = draw(st.sampled_from(whole).map(copy.deepcopy) | st.just({}) | anything)
    if isinstance(raw, dict):
        raw |= draw(st.dictionaries(st.sampled_from(KEYS), anything, max_size=3))
        for key in ("conversations", "messages"):
            if isinstance(raw.get(key), list) and raw[key] and draw(st.booleans()):
                turn = draw(st.integers(0, len(raw[key]) - 1))
                more = draw(st.dictionaries(st.sampled_from(INNER_KEYS), anything, max_size=2))
                raw[key][turn] = raw[key][turn] | more if isinstance(raw[key][turn], dict) else draw(anything)
    return raw


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=damaged_records(), trust_sizes=st.booleans())
def test_no_record_whatsoever_stops_a_shard(few, profile_records, raw, trust_sizes):
    frame = profile_records([raw, record("hello", id="after")], few, trust_sizes=trust_sizes)
    assert frame.schema == SHARD_SCHEMA
    assert frame["sample_id"][1] == "after"
    assert frame["reason"][1] is None
    assert frame["reason"][0] in (None, *REJECT_REASONS)
    assert (frame["detail"][0] is None) == (frame["reason"][0] is None)
    assert (frame["llm_tokens"][0] is None) == (frame["reason"][0] is not None)


def test_progress_is_told_record_by_record_and_adds_up(reader, few):
    Path("train.jsonl").write_text("".join(json.dumps(record("hello")) + "\n" for _ in range(1100)))
    source = Source(name="it", path=Path("train.jsonl"), media_root=few)
    (shard,) = list_shards(source, 2000, 0)
    told = []
    frame = profile_shard(
        source,
        shard,
        seed=0,
        reader=reader,
        tokenizer_folder=None,
        max_llm_tokens=100,
        num_workers=2,  # too few records for two
        progress=told.append,
    )
    assert len(told) > 1
    assert sum(told) == len(frame) == 1100
    assert frame["row"].to_list() == list(range(1100))


def test_a_file_that_many_records_name_is_opened_once_in_a_pass(tmp_path, reader):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    record = parse_record(
        {"image": "a.png", "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A."}]}
    )
    kept = reader.remembering()
    (shape,) = kept.read_media(record, tmp_path)
    (tmp_path / "a.png").unlink()
    assert kept.read_media(record, tmp_path) == [shape]
    with pytest.raises(RecordError, match="not a file"):  # another pass looks again
        reader.remembering().read_media(record, tmp_path)


def one_clip(*names: str):
    turns = [{"from": "human", "value": "<video>" * len(names)}, {"from": "gpt", "value": "A."}]
    return parse_record({"video": [*names], "conversations": turns})


def test_a_file_that_cannot_be_read_is_opened_once_in_a_pass(tmp_path, reader, monkeypatch):
    opened = []
    monkeypatch.setattr(reader_module, "video_header", lambda file, limits: opened.append(file) or no_clip(file))
    (tmp_path / "a.mp4").touch()
    kept, said = reader.remembering(), set()
    for _ in range(3):
        with pytest.raises(RecordError) as refused:
            kept.read_media(one_clip("a.mp4"), tmp_path)
        said.add((refused.value.reason, refused.value.detail))
    assert (len(opened), said) == (1, {("unreadable_media", "a.mp4: no clip")})


def no_clip(file):
    raise unreadable(file.name, "no clip")


@pytest.mark.parametrize("says_so", [True, False])
def test_a_file_that_takes_all_the_time_of_a_record_takes_it_once_in_a_pass(tmp_path, reader, monkeypatch, says_so):
    """FFmpeg gives up an open file with an error of its own."""
    now, opened = [0.0], []

    def read(file, limits):
        opened.append(file.name)
        now[0] += {"slow.mp4": 200.0, "half.mp4": 0.6 * limits.max_decode_s}[file.name]
        if says_so:
            limits.check_time(file.name)
        elif limits.left_s < 0.01:
            no_clip(file)
        return VideoHeader(8, 4.0, 32, 32)

    monkeypatch.setattr(media_limits.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(reader_module, "video_header", read)
    for name in ("slow.mp4", "half.mp4"):
        (tmp_path / name).touch()
    kept = reader.remembering()
    for _ in range(3):
        with pytest.raises(RecordError, match=r"slow\.mp4"):
            kept.read_media(one_clip("slow.mp4"), tmp_path)
    assert opened == ["slow.mp4"]
    with pytest.raises(RecordError, match=r"slow\.mp4"):
        kept.read_media(one_clip("half.mp4", "slow.mp4"), tmp_path)
    kept = reader.remembering()
    with pytest.raises(RecordError, match=r"slow\.mp4"):
        kept.read_media(one_clip("half.mp4", "slow.mp4"), tmp_path)  # which has less than its whole time
    with pytest.raises(RecordError, match=r"slow\.mp4"):
        kept.read_media(one_clip("slow.mp4"), tmp_path)
    assert kept.read_media(one_clip("half.mp4"), tmp_path)
