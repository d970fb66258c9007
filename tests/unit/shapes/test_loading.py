"""What a rank loads is what the schedule gave it: packed in order, split by encoder, whole where a file is not."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dflop.base import UserError
from dflop.config import DataConfig, SourceConfig
from dflop.loading.dataset import (
    EncoderFeed,
    MicrobatchJob,
    MicrobatchLoader,
    SampleRef,
    TrainingRecords,
    segments_of,
)
from dflop.models.llava_onevision.processing import LlavaOnevisionPixels
from dflop.shapes import list_sources
from dflop.shapes.reader import MediumSize
from dflop.shapes.samples import MEDIA_COLUMNS
from dflop.shapes.text import BUNDLED_TOKENIZER

pytestmark = pytest.mark.usefixtures("in_tmp_path")

MAX_LLM_TOKENS = 1000


@pytest.fixture(scope="module")
def make_loader(tiny_spec, reader):
    pixels = LlavaOnevisionPixels(tiny_spec)

    def make(manifest: Path, *, of_media: bool, num_encoder_ranks: int = 1, sampling: str = "all") -> MicrobatchLoader:
        sources = list_sources(DataConfig(sources=[SourceConfig(path=str(manifest), name="it", sampling=sampling)]))
        return MicrobatchLoader(
            records=TrainingRecords(sources, 0),
            reader=reader,
            tokenizer_folder=BUNDLED_TOKENIZER,
            max_llm_tokens=MAX_LLM_TOKENS,
            encoders=(EncoderFeed(("image", "video"), num_encoder_ranks),),
            encoder=0 if of_media else None,
            processor=pixels if of_media else None,
        )

    return make


@pytest.fixture(scope="module")
def make_job(demo_data, profile_records):
    """`make_job(rows)`: these records of the drawn data, as they were profiled."""
    profiled = profiled_rows(demo_data.train_manifest, profile_records)

    def make(rows: list[int], encoder_rank: list[int] | None = None) -> MicrobatchJob:
        return job([profiled[row] for row in rows], encoder_rank)

    return make


def job(rows: list[dict], encoder_rank: list[int] | None = None) -> MicrobatchJob:
    return MicrobatchJob(
        samples=tuple(SampleRef("it", row["row"]) for row in rows),
        media=tuple(tuple(map(MediumSize, *(row[name] for name in MEDIA_COLUMNS))) for row in rows),
        kept_tokens=tuple((row["kept_vision_tokens"],) for row in rows),
        llm_tokens=tuple(row["llm_tokens"] for row in rows),
        encoder_rank=tuple((rank,) for rank in encoder_rank or [0] * len(rows)),
    )


def profiled_rows(manifest: Path, profile_records) -> list[dict]:
    frame = profile_records(json.loads(manifest.read_text()), manifest.parent, max_llm_tokens=MAX_LLM_TOKENS)
    return frame.to_dicts()


def test_a_packed_microbatch_is_its_samples_one_after_the_other(demo_data, make_loader, make_job):
    loader, rows = make_loader(demo_data.train_manifest, of_media=False), [5, 0, 11, 3]
    packed, alone = loader[make_job(rows)], [loader[make_job([row])] for row in rows]
    starts = np.cumsum([0, *(len(part.token_ids) for part in alone)])
    assert packed.segment_ends.ends == starts[1:].tolist()
    assert torch.equal(packed.token_ids, torch.cat([part.token_ids for part in alone]))
    assert torch.equal(packed.position_ids, torch.cat([torch.arange(len(part.token_ids)) for part in alone]))
    moved = [part.target_positions + start for part, start in zip(alone, starts, strict=False)]
    assert torch.equal(packed.target_positions, torch.cat(moved))
    assert torch.equal(packed.target_ids, torch.cat([part.target_ids for part in alone]))


def test_visual_positions_are_split_by_the_encoder_that_fills_them(demo_data, make_loader, make_job, tokenizer):
    loader = make_loader(demo_data.train_manifest, of_media=False, num_encoder_ranks=3)
    rows, encoders = list(range(8)), [0, 2, 0, 2, 2, 0, 0, 2]
    batch = loader[make_job(rows, encoders)]
    is_visual = np.isin(batch.token_ids.numpy(), list(tokenizer.placeholder_ids.values()))
    segment = np.searchsorted(batch.segment_ends.ends, np.arange(len(is_visual)), side="right")
    for rank, positions in enumerate(batch.feature_positions):
        expected = np.flatnonzero(is_visual & (np.array(encoders)[segment] == rank))
        np.testing.assert_array_equal(positions.numpy(), expected)
    assert len(batch.feature_positions[0]) > 0
    assert len(batch.feature_positions[1]) == 0


def test_media_come_sample_by_sample_with_what_the_llm_keeps_of_them(demo_data, make_loader, make_job):
    records = json.loads(demo_data.train_manifest.read_text())
    rows = [row for row, record in enumerate(records) if "image" in record or "video" in record][:6]
    loader = make_loader(demo_data.train_manifest, of_media=True)
    loaded, alone = loader[make_job(rows)], [loader[make_job([row])] for row in rows]
    assert loaded.batch.kept_tokens == tuple(kept for (kept,) in make_job(rows).kept_tokens)
    assert torch.equal(loaded.batch.items, torch.cat([part.batch.items for part in alone]))
    assert loaded.batch.media == tuple(part.batch.media[0] for part in alone)
    assert sum(medium.num_items for media in loaded.batch.media for medium in media) == len(loaded.batch.items)


def test_a_microbatch_without_media_has_no_items(demo_data, make_loader, tiny_spec):
    side = tiny_spec.rules.image_size
    loaded = make_loader(demo_data.train_manifest, of_media=True)[job([])]
    assert loaded.batch.items.shape == (0, 3, side, side)


@pytest.mark.parametrize("sampling", ["end:4", "random:50%"])
def test_rows_are_the_manifests_own_whatever_sampling_keeps(demo_data, make_loader, make_job, sampling):
    whole, part = (make_loader(demo_data.train_manifest, of_media=False, sampling=how) for how in ("all", sampling))
    for row in (0, 17, 36):
        assert torch.equal(part[make_job([row])].token_ids, whole[make_job([row])].token_ids)


@pytest.mark.parametrize("of_media", [False, True])
def test_a_sample_that_is_no_longer_what_was_profiled_is_named(demo_data, make_loader, profile_records, of_media):
    profiled = profiled_rows(demo_data.train_manifest, profile_records)
    row = next(row for row in profiled if row["kept_vision_tokens"] > 10)
    loader = make_loader(demo_data.train_manifest, of_media=of_media)
    for wrong in (row["kept_vision_tokens"] + 1, row["kept_vision_tokens"] - 1):
        with pytest.raises(UserError, match=f"record {row['row']} of source `it` has changed since it was profiled"):
            loader[job([row | {"kept_vision_tokens": wrong}])]
    more = {name: [*row[name], 0] for name in MEDIA_COLUMNS}
    with pytest.raises(UserError, match=r"has changed since it was profiled \(\d media, \d were profiled\)"):
        loader[job([row | more])]
    with pytest.raises(UserError, match=f"record {len(profiled)} of source `it` has changed"):
        loader[job([row | {"row": len(profiled)}])]


def test_a_text_that_is_longer_than_it_was_is_named(demo_data, make_loader, profile_records):
    row = profiled_rows(demo_data.train_manifest, profile_records)[0]
    loader = make_loader(demo_data.train_manifest, of_media=False)
    with pytest.raises(UserError, match=rf"changed .*\({row['llm_tokens']} tokens, {row['llm_tokens'] - 1} were"):
        loader[job([row | {"llm_tokens": row["llm_tokens"] - 1}])]


def test_a_source_that_the_config_lacks_is_named(demo_data, make_loader, make_job):
    loader = make_loader(demo_data.train_manifest, of_media=False)
    strange = dataclasses.replace(make_job([0]), samples=(SampleRef("other", 0),))
    with pytest.raises(UserError, match=r"source `other`, which `data\.sources` does not have"):
        loader[strange]


def test_the_llm_lays_out_its_text_without_the_media(demo_data, make_loader, make_job, tmp_path):
    """It reads records; the media need not even be there."""
    manifest = tmp_path / "train.json"
    shutil.copy(demo_data.train_manifest, manifest)
    rows = list(range(12))
    there = make_loader(demo_data.train_manifest, of_media=False)[make_job(rows)]
    away = make_loader(manifest, of_media=False)[make_job(rows)]
    assert sum(map(len, away.feature_positions)) > 0
    assert torch.equal(away.token_ids, there.token_ids)
    assert torch.equal(away.target_ids, there.target_ids)
    with pytest.raises(UserError, match="has changed since it was profiled"):
        make_loader(manifest, of_media=True)[make_job(rows)]


def test_a_middle_stage_knows_its_segments_by_their_lengths(demo_data, make_loader, make_job):
    whole = make_loader(demo_data.train_manifest, of_media=False)[make_job([5, 0, 11])]
    position_ids, segment_ends = segments_of(make_job([5, 0, 11]).llm_tokens)
    assert segment_ends.ends == whole.segment_ends.ends
    assert torch.equal(position_ids, whole.position_ids)


def test_each_encoder_takes_its_own_kinds_of_media_and_its_features_have_places_of_their_own(
    demo_data, make_loader, make_job, profile_records
):
    profiled = profiled_rows(demo_data.train_manifest, profile_records)
    rows = [row["row"] for row in profiled if row["kept_vision_tokens"]][:16]
    together = make_job(rows)
    loader = make_loader(demo_data.train_manifest, of_media=True)
    kinds = [[medium.kind for medium in media] for media in loader[together].batch.media]
    assert {kind for sample_kinds in kinds for kind in sample_kinds} == {"image", "video"}, (
        "the drawn samples have both"
    )
    apart = dataclasses.replace(
        together,
        kept_tokens=tuple(
            (kept, 0) if "image" in sample_kinds else (0, kept)
            for sample_kinds, (kept,) in zip(kinds, together.kept_tokens, strict=True)
        ),
        encoder_rank=tuple((number % 2, 0) for number in range(len(rows))),
    )
    encoders = (EncoderFeed(("image",), 2), EncoderFeed(("video",), 1))
    of_clips = dataclasses.replace(loader, encoders=encoders, encoder=1)[apart].batch
    assert [[medium.kind for medium in media] for media in of_clips.media] == [
        [kind for kind in sample_kinds if kind == "video"] for sample_kinds in kinds
    ]
    assert len(of_clips.items) == sum(medium.num_items for media in of_clips.media for medium in media)
    text = dataclasses.replace(loader, encoders=encoders, encoder=None)[apart]
    num_features = [
        sum(kept[0] for number, kept in enumerate(apart.kept_tokens) if number % 2 == replica) for replica in (0, 1)
    ]
    assert [len(positions) for positions in text.feature_positions] == [
        *num_features,
        sum(kept[1] for kept in apart.kept_tokens),
    ]


def test_a_picture_that_was_exchanged_is_scaled_to_the_profiled_size_and_said(make_loader, profile_records, tmp_path):
    talk = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "Grey."}]
    manifest = tmp_path / "train.json"
    manifest.write_text(json.dumps([{"image": "a.png", "conversations": talk}]))
    Image.new("RGB", (190, 60)).save(tmp_path / "a.png")
    (row,) = profiled_rows(manifest, profile_records)
    expected = make_loader(manifest, of_media=True)[job([row])]
    Image.new("RGB", (60, 190)).save(tmp_path / "a.png")
    loaded = make_loader(manifest, of_media=True)[job([row])]
    assert loaded.unreadable == ("a.png: (60, 190) pixels, it was profiled with (190, 60); it was scaled",)
    assert loaded.undecodable == ()
    assert torch.equal(loaded.batch.items, expected.batch.items)
    assert loaded.batch.media == expected.batch.media


@pytest.mark.parametrize(
    ("size", "said"), [((60, 190), "a.png has 60x190 pixels, it was profiled with 190x60 pixels"), (None, "a.png")]
)
def test_a_watched_picture_that_was_exchanged_or_is_gone_stops_training_with_its_record(
    make_loader, profile_records, tmp_path, size, said
):
    talk = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "Grey."}]
    manifest = tmp_path / "train.json"
    manifest.write_text(json.dumps([{"image": "a.png", "conversations": talk}]))
    Image.new("RGB", (190, 60)).save(tmp_path / "a.png")
    (row,) = profiled_rows(manifest, profile_records)
    loader = make_loader(manifest, of_media=True)
    watching = dataclasses.replace(loader.reader, data=dataclasses.replace(loader.reader.data, watch_media=True))
    loader = dataclasses.replace(loader, reader=watching)
    assert loader[job([row])].unreadable == ()
    if size:
        Image.new("RGB", size).save(tmp_path / "a.png")
    else:
        (tmp_path / "a.png").unlink()
    with pytest.raises(UserError, match=rf"record 0 of source `it` has changed since it was profiled \(.*{said}"):
        loader[job([row])]


def test_watched_media_that_are_as_they_were_are_loaded_as_without_watching(demo_data, make_loader, make_job):
    rows = list(range(24))
    loader = make_loader(demo_data.train_manifest, of_media=True)
    watching = dataclasses.replace(loader.reader, data=dataclasses.replace(loader.reader.data, watch_media=True))
    loaded, watched = loader[make_job(rows)], dataclasses.replace(loader, reader=watching)[make_job(rows)]
    assert {medium.kind for media in watched.batch.media for medium in media} == {"image", "video"}
    assert torch.equal(watched.batch.items, loaded.batch.items)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_file_whose_body_is_damaged_after_profiling_becomes_as_many_blank_items_as_were_profiled(
    demo_data, make_loader, profile_records, tmp_path, kind
):
    records = json.loads(demo_data.train_manifest.read_text())
    record = next(record for record in records if isinstance(record.get(kind), str))
    path = tmp_path / ("picture.png" if kind == "image" else "clip.mp4")
    if kind == "image":
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (150, 320, 3), dtype=np.uint8)).save(path)
    else:
        shutil.copy(demo_data.train_manifest.parent / record[kind], path)
    manifest = tmp_path / "train.json"
    manifest.write_text(json.dumps([record | {kind: path.name}]))
    frame = profile_records(json.loads(manifest.read_text()), tmp_path, max_llm_tokens=MAX_LLM_TOKENS)
    assert frame["reason"][0] is None
    content = path.read_bytes()
    body = 3000 if kind == "image" else content.index(b"mdat") + 4
    path.write_bytes(content[:body] + bytes(len(content) - body))
    loaded = make_loader(manifest, of_media=True)[job(frame.to_dicts())]
    assert len(loaded.batch.items) == frame["num_items"][0]
    assert len(loaded.unreadable) == 1
    assert path.name in loaded.unreadable[0]
    assert loaded.unreadable[0].endswith("; nothing is learned from its sample")
    assert loaded.undecodable == (0,)
    assert not loaded.batch.items.any()


def test_frames_that_cannot_be_decoded_are_said_and_the_last_one_takes_their_places(
    make_loader, profile_records, write_clip, tmp_path
):
    path = tmp_path / "clip.mp4"
    write_clip(path, num_frames=48, fps=8, header_first=True)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3] + bytes(len(content) - len(content) * 2 // 3))
    talk = [{"from": "human", "value": "<video>"}, {"from": "gpt", "value": "Grey."}]
    manifest = tmp_path / "train.json"
    manifest.write_text(json.dumps([{"video": path.name, "conversations": talk}]))
    frame = profile_records(json.loads(manifest.read_text()), tmp_path, max_llm_tokens=MAX_LLM_TOKENS)
    assert frame["num_items"].to_list() == [6]
    loaded = make_loader(manifest, of_media=True)[job(frame.to_dicts())]
    (said,) = loaded.unreadable
    assert re.search(r"clip\.mp4: [1-5] of 6 frames could be decoded: .*; the last one is repeated$", said)
    assert loaded.undecodable == ()
    assert torch.equal(loaded.batch.items[-1], loaded.batch.items[-2])
