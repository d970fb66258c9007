"""What a rank loads is what the schedule gave it: packed in order, split by encoder, whole where a file is not."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dflop.config import DataConfig, SourceConfig
from dflop.data import list_sources
from dflop.data.loading import MicrobatchJob, MicrobatchLoader, SampleRef, TrainingRecords
from dflop.data.text import BUNDLED_TOKENIZER
from dflop.models.llava_onevision.processing import LlavaOnevisionPixels
from dflop.runtime import UserError

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
            num_encoder_ranks=num_encoder_ranks,
            pixels=pixels if of_media else None,
        )

    return make


@pytest.fixture(scope="module")
def make_job(demo_data, profile_records):
    """`make_job(rows)`: these records of the drawn data, as they were profiled."""
    kept = kept_vision_tokens(demo_data.train_manifest, profile_records)

    def make(rows: list[int], encoder_rank: list[int] | None = None) -> MicrobatchJob:
        return job(rows, [kept[row] for row in rows], encoder_rank)

    return make


def job(rows: list[int], kept: list[int], encoder_rank: list[int] | None = None) -> MicrobatchJob:
    return MicrobatchJob(
        samples=tuple(SampleRef("it", row) for row in rows),
        kept_vision_tokens=tuple(kept),
        encoder_rank=tuple(encoder_rank or [0] * len(rows)),
    )


def kept_vision_tokens(manifest: Path, profile_records) -> list[int]:
    frame = profile_records(json.loads(manifest.read_text()), manifest.parent, max_llm_tokens=MAX_LLM_TOKENS)
    return frame["kept_vision_tokens"].to_list()


def test_a_packed_microbatch_is_its_samples_one_after_the_other(demo_data, make_loader, make_job):
    loader, rows = make_loader(demo_data.train_manifest, of_media=False), [5, 0, 11, 3]
    packed, alone = loader[make_job(rows)], [loader[make_job([row])] for row in rows]
    starts = np.cumsum([0, *(len(part.token_ids) for part in alone)])
    assert packed.segment_ends == starts[1:].tolist()
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
    segment = np.searchsorted(batch.segment_ends, np.arange(len(is_visual)), side="right")
    for rank, positions in enumerate(batch.visual_positions):
        expected = np.flatnonzero(is_visual & (np.array(encoders)[segment] == rank))
        np.testing.assert_array_equal(positions.numpy(), expected)
    assert len(batch.visual_positions[0]) > 0
    assert len(batch.visual_positions[1]) == 0


def test_media_come_sample_by_sample_with_what_the_llm_keeps_of_them(demo_data, make_loader, make_job):
    records = json.loads(demo_data.train_manifest.read_text())
    rows = [row for row, record in enumerate(records) if "image" in record or "video" in record][:6]
    loader = make_loader(demo_data.train_manifest, of_media=True)
    loaded, alone = loader[make_job(rows)], [loader[make_job([row])] for row in rows]
    assert loaded.batch.kept_tokens == make_job(rows).kept_vision_tokens
    assert torch.equal(loaded.batch.items, torch.cat([part.batch.items for part in alone]))
    assert loaded.batch.media == tuple(part.batch.media[0] for part in alone)
    assert sum(medium.num_items for media in loaded.batch.media for medium in media) == len(loaded.batch.items)


def test_a_microbatch_without_media_has_no_items(demo_data, make_loader, tiny_spec):
    side = tiny_spec.rules.image_size
    loaded = make_loader(demo_data.train_manifest, of_media=True)[job([], [])]
    assert loaded.batch.items.shape == (0, 3, side, side)


@pytest.mark.parametrize("sampling", ["end:4", "random:50%"])
def test_rows_are_the_manifests_own_whatever_sampling_keeps(demo_data, make_loader, make_job, sampling):
    whole, part = (make_loader(demo_data.train_manifest, of_media=False, sampling=how) for how in ("all", sampling))
    for row in (0, 17, 36):
        assert torch.equal(part[make_job([row])].token_ids, whole[make_job([row])].token_ids)


@pytest.mark.parametrize("of_media", [False, True])
def test_a_sample_that_is_no_longer_what_was_profiled_is_named(demo_data, make_loader, profile_records, of_media):
    kept = kept_vision_tokens(demo_data.train_manifest, profile_records)
    row = next(row for row, tokens in enumerate(kept) if tokens > 10)
    loader = make_loader(demo_data.train_manifest, of_media=of_media)
    for wrong in (kept[row] + 1, kept[row] - 1):
        with pytest.raises(UserError, match=f"record {row} of source `it` has changed since it was profiled"):
            loader[job([row], [wrong])]
    with pytest.raises(UserError, match=f"record {len(kept)} of source `it` has changed"):
        loader[job([len(kept)], [0])]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_file_whose_body_is_damaged_becomes_as_many_blank_items_as_its_header_promised(
    demo_data, make_loader, profile_records, tmp_path, kind
):
    records = json.loads(demo_data.train_manifest.read_text())
    record = next(record for record in records if isinstance(record.get(kind), str))
    content = bytearray((demo_data.train_manifest.parent / record[kind]).read_bytes())
    if kind == "image":
        path = tmp_path / "picture.png"
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (150, 320, 3), dtype=np.uint8)).save(path)
        content = path.read_bytes()
        path.write_bytes(content[:3000] + bytes(3000) + content[6000:])
    else:
        path = tmp_path / "clip.mp4"
        body = content.index(b"mdat") + 4  # the header stands before it
        content[body:] = bytes(len(content) - body)
        path.write_bytes(content)
    manifest = tmp_path / "train.json"
    manifest.write_text(json.dumps([record | {kind: path.name}]))
    frame = profile_records(json.loads(manifest.read_text()), tmp_path, max_llm_tokens=MAX_LLM_TOKENS)
    assert frame["reason"][0] is None
    loaded = make_loader(manifest, of_media=True)[job([0], [frame["kept_vision_tokens"][0]])]
    assert len(loaded.batch.items) == frame["num_items"][0]
    assert len(loaded.unreadable) == 1
    assert path.name in loaded.unreadable[0]
    black = loaded.batch.items.amax(dim=(0, 2, 3)) - loaded.batch.items.amin(dim=(0, 2, 3))
    assert black.max() < 1e-4


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
    loaded = make_loader(manifest, of_media=True)[job([0], [frame["kept_vision_tokens"][0]])]
    (said,) = loaded.unreadable
    assert re.search(r"clip\.mp4: [1-5] of 6 frames could be decoded: ", said)
    assert torch.equal(loaded.batch.items[-1], loaded.batch.items[-2])
