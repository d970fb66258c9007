"""Sizes that a source's records are trusted with stand for the pictures, which training scales where they differ."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from dflop.loading.dataset import EncoderFeed, LoadedMedia, MicrobatchJob, MicrobatchLoader, SampleRef, TrainingRecords
from dflop.models.llava_onevision.processing import LlavaOnevisionPixels
from dflop.shapes import Source
from dflop.shapes.reader import MediumSize
from dflop.shapes.samples import MEDIA_COLUMNS
from dflop.shapes.text import BUNDLED_TOKENIZER

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def record(*images: object, **more) -> dict:
    turns = [{"from": "human", "value": "<image>" * len(images)}, {"from": "gpt", "value": "Yes."}]
    return {"conversations": turns, "image": list(images), **more}


@pytest.fixture
def root(tmp_path) -> Path:
    root = tmp_path / "media"
    root.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (60, 190, 3), dtype=np.uint8)
    Image.fromarray(noise).save(root / "a.png")
    Image.fromarray(noise).save(tmp_path / "secret.png")
    return root


@pytest.fixture
def profile_and_load(root, reader, profile_source, tiny_spec):
    """`profile_and_load(records)`: their rows, and what training makes of the one that is first accepted."""
    pixels = LlavaOnevisionPixels(tiny_spec)

    def run(records: list[dict], *, trust_sizes: bool = True) -> tuple[pl.DataFrame, LoadedMedia]:
        Path("train.json").write_text(json.dumps(records))
        source = Source(name="it", path=Path("train.json"), media_root=root, trust_sizes=trust_sizes)
        frame = profile_source(source)
        loader = MicrobatchLoader(
            records=TrainingRecords([source], 0),
            reader=reader,
            tokenizer_folder=BUNDLED_TOKENIZER,
            max_llm_tokens=100_000,
            encoders=(EncoderFeed(("image", "video"), 1),),
            encoder=0,
            processor=pixels,
        )
        row = frame.filter(pl.col("reason").is_null()).row(0, named=True)
        job = MicrobatchJob(
            samples=(SampleRef("it", row["row"]),),
            media=(tuple(map(MediumSize, *(row[name] for name in MEDIA_COLUMNS))),),
            kept_tokens=((row["kept_vision_tokens"],),),
            llm_tokens=(row["llm_tokens"],),
            encoder_rank=((0,),),
        )
        loaded = loader[job]
        assert len(loaded.batch.items) == row["num_items"]
        return frame, loaded

    return run


def test_a_true_size_gives_what_the_header_gives(profile_and_load):
    known = [record("a.png", width=190, height=60)]
    (trusted, loaded), (measured, expected) = (profile_and_load(known, trust_sizes=trust) for trust in (True, False))
    assert trusted.rows() == measured.rows()
    assert loaded.unreadable == ()
    assert (loaded.batch.items == expected.batch.items).all()


def test_a_missing_picture_is_not_looked_for_until_training_says_that_it_is_missing(profile_and_load):
    known = [record("gone.png", width=190, height=60), record("a.png", width=190, height=60)]
    frame, loaded = profile_and_load(known)
    assert frame["reason"].to_list() == [None, None]
    assert frame.drop("row").row(0) == frame.drop("row").row(1)
    (message,) = loaded.unreadable
    assert message.startswith("gone.png: gone.png is not a file under")
    assert np.ptp(loaded.batch.items.numpy(), axis=(0, 2, 3)).max() == 0


@pytest.mark.parametrize("size", [(400, 20), (20, 400), (1, 1), (191, 60), (60, 190), (1, 5000)])
def test_a_wrong_size_is_what_training_scales_the_picture_to(profile_and_load, root, size):
    width, height = size
    wrong = record("a.png", width=width, height=height)
    _, loaded = profile_and_load([wrong])
    assert loaded.unreadable == (f"a.png: (190, 60) pixels, the record says {size}; it was scaled",)
    with Image.open(root / "a.png") as picture:
        picture.resize(size).save(root / "scaled.png")
    _, expected = profile_and_load([record("scaled.png")])
    assert (loaded.batch.items == expected.batch.items).all()
    assert loaded.batch.media == expected.batch.media


@pytest.mark.parametrize("content", [b"", b"<html>", "cut"])
def test_a_picture_that_cannot_be_read_is_blank_and_said(profile_and_load, root, content):
    whole = (root / "a.png").read_bytes()
    (root / "bad.png").write_bytes(whole[: len(whole) // 2] if content == "cut" else content)
    _, loaded = profile_and_load([record("bad.png", width=190, height=60)])
    assert len(loaded.unreadable) == 1
    assert loaded.unreadable[0].startswith("bad.png: ")


def test_pictures_of_one_record_are_trusted_one_by_one(profile_and_load):
    frame, loaded = profile_and_load([record("a.png", "gone.png", "a.png", width=[190, 10, 0], height=[60, 20, 60])])
    assert frame["reason"].to_list() == [None]
    assert [(medium.width, medium.height) for (media,) in [loaded.batch.media] for medium in media] == [
        (190, 60),
        (10, 20),
        (190, 60),
    ]
    assert [message.split(":")[0] for message in loaded.unreadable] == ["gone.png"]


def test_a_size_that_the_record_does_not_give_is_measured(profile_and_load):
    known = [record("a.png", width=0, height=60), record("gone.png", width="190", height=60), record("gone.png")]
    frame, loaded = profile_and_load(known)
    assert frame["reason"].to_list() == [None, "missing_media", "missing_media"]
    assert loaded.unreadable == ()


def test_a_source_that_is_not_trusted_is_measured(profile_and_load):
    known = [record("a.png", width=9, height=9), record("gone.png", width=190, height=60)]
    frame, loaded = profile_and_load(known, trust_sizes=False)
    assert frame["reason"].to_list() == [None, "missing_media"]
    assert (loaded.batch.media[0][0].width, loaded.unreadable) == (190, ())


def test_a_trusted_size_beyond_the_limit_is_refused_as_a_headers_is(profile_and_load):
    known = [record("a.png", width=10**9, height=10**9), record("a.png", width=10**400, height=1), record("a.png")]
    frame, _ = profile_and_load(known)
    assert frame["reason"].to_list() == ["unreadable_media", "unreadable_media", None]
    assert "a.png: 1000000000 x 1000000000 are 1,000" in frame["detail"][0]


def test_a_picture_that_turns_out_to_be_beyond_the_limit_is_not_decoded(profile_and_load, root):
    Image.new("1", (20_000, 12_000)).save(root / "large.png")
    _, loaded = profile_and_load([record("large.png", width=190, height=60)])
    (message,) = loaded.unreadable
    assert "large.png: 20000 x 12000 are 240,000,000 pixels, over 178,956,970" in message


@pytest.mark.parametrize(
    "path", ["../secret.png", "in/../../secret.png", "/etc/hostname", "/", "..", "../media2/a.png"]
)
def test_a_trusted_path_that_leaves_the_root_is_refused_all_the_same(profile_and_load, path):
    frame, _ = profile_and_load([record(path, width=190, height=60), record("a.png")])
    assert frame["reason"].to_list() == ["path_escape", None]
    assert f"{path} lies outside the media root" in frame["detail"][0]


def test_paths_inside_the_root_are_not_mistaken_for_escapes(profile_and_load, root):
    paths = ["in/../a.png", "./a.png", "..a.png", "...", str(root / "a.png"), str(root / "in/../gone.png")]
    frame, _ = profile_and_load([record(path, width=190, height=60) for path in paths])
    assert frame["reason"].to_list() == [None] * len(paths)


def test_a_link_out_of_the_root_is_not_followed_in_training(profile_and_load, root):
    (root / "link.png").symlink_to(root.parent / "secret.png")
    frame, loaded = profile_and_load([record("link.png", width=190, height=60)])
    assert frame["reason"].to_list() == [None]
    assert loaded.unreadable[0].startswith("link.png: link.png is a link to ")
    assert np.ptp(loaded.batch.items.numpy(), axis=(0, 2, 3)).max() == 0
