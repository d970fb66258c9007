"""The same records have the same shapes and the same pixels whether their media are files or lie in the manifest."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dflop.loading.dataset import EncoderFeed, MicrobatchJob, MicrobatchLoader, SampleRef, TrainingRecords
from dflop.models.llava_onevision.processing import LlavaOnevisionPixels
from dflop.shapes import Source, SourceRecords, list_shards
from dflop.shapes.manifests.formats import open_reader
from dflop.shapes.reader import MediumSize
from dflop.shapes.record_media import EmbeddedBytes
from dflop.shapes.samples import MEDIA_COLUMNS
from dflop.shapes.text import BUNDLED_TOKENIZER
from dflop.store import SHARD_SCHEMA

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def talk(question: str, answer: str = "Yes.") -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


# Media are lists under every key, as a table's columns have them.
RECORDS = [
    {"id": "alone", "conversations": talk("<image>\nWhat?"), "image": ["wide.png"]},
    {"id": "turned", "conversations": talk("<image>"), "image": ["tall.jpg"]},
    {"id": "plain", "conversations": talk('雪 😀 ["}', "Ja, \\ {")},
    {
        "id": "several",
        "conversations": talk("<image> and <image>, then <image>"),
        "image": ["small.webp", "wide.png", "tall.jpg"],
    },
    {"id": "clip", "conversations": talk("<video> what?"), "video": ["clip.mp4"]},
    {"id": "sound", "conversations": talk("<audio> what?"), "audio": ["tone.wav"]},
    {"id": "both", "conversations": talk("<audio> or <image>"), "image": ["wide.png"], "audio": ["tone.wav"]},
    {"id": "broken", "conversations": talk("<image>"), "image": ["tone.wav"]},
    {"id": "mute", "conversations": talk("hello", "")},
]
KINDS = ("image", "video", "audio")


def fill(record: dict, medium: Callable[[str], Any]) -> dict:
    """A record with all columns, null where it has none, and each medium's name replaced."""
    media = {kind: [medium(name) for name in record[kind]] if kind in record else None for kind in KINDS}
    return {"id": record["id"], "conversations": record["conversations"]} | media


def write_json(media: Path) -> Path:
    path = Path("train.json")
    path.write_text(json.dumps(RECORDS))
    return path


def write_parquet(rows: list[dict]) -> Path:
    path = Path("train.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    assert pq.ParquetFile(path).num_row_groups == 5
    return path


def write_parquet_with_paths(media: Path) -> Path:
    return write_parquet([fill(record, lambda name: name) for record in RECORDS])


def write_parquet_with_structs(media: Path) -> Path:
    def medium(name: str) -> dict:
        return {"bytes": None if name == "small.webp" else (media / name).read_bytes(), "path": name}

    return write_parquet([fill(record, medium) for record in RECORDS])


def write_parquet_with_bytes(media: Path) -> Path:
    return write_parquet([fill(record, lambda name: (media / name).read_bytes()) for record in RECORDS])


def write_dataset(media: Path) -> Path:
    def medium(name: str) -> dict:
        # A path alone stands for the file, which is taken in when the folder is written.
        path = str(media / name)
        return {"bytes": None if name == "wide.png" else (media / name).read_bytes(), "path": path}

    turn = {"from": datasets.Value("string"), "value": datasets.Value("string")}
    plain = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "conversations": datasets.List(turn),
            "image": datasets.List(datasets.Image()),
            "video": datasets.List(plain),
            "audio": datasets.List(plain),
        }
    )
    rows = [fill(record, medium) for record in RECORDS]
    dataset = datasets.Dataset.from_list(rows[::-1], features=features).select(range(len(rows))[::-1])
    dataset.save_to_disk("train", num_shards=2)
    assert len(list(Path("train").glob("*.arrow"))) == 2
    return Path("train")


def write_archive(media: Path, write_tar: Callable[..., Path]) -> Path:
    groups: dict[str, dict[str, bytes]] = {}
    for number, record in enumerate(RECORDS):
        names = {
            name: f".{place}.{name.split('.')[1]}" for kind in KINDS for place, name in enumerate(record.get(kind, []))
        }
        if record["id"] == "both":
            names = {"wide.png": ".png", "tone.wav": ".wav"}
        if record["id"] == "broken":
            names = {"tone.wav": ".png"}
        listed = {kind: [names[name] for name in record[kind]] for kind in KINDS if kind in record}
        content = {suffix: (media / name).read_bytes() for name, suffix in sorted(names.items())}
        text = json.dumps(record | listed).encode()
        groups[f"{number:05}"] = {".json": text} | content if number % 2 else content | {".json": text}
    return write_tar(groups)


TABLE_WRITERS = [
    write_parquet_with_paths,
    write_parquet_with_structs,
    write_parquet_with_bytes,
    write_dataset,
]


class Made(NamedTuple):
    frame: pl.DataFrame
    for_training: dict[str, tuple]


@pytest.fixture(scope="module")
def make(media, reader, profile_source, tiny_spec) -> Callable[[Callable[[Path], Path]], Made]:
    """What profiling and training make of the records, written in one of the formats."""
    pixels = LlavaOnevisionPixels(tiny_spec)

    def run(write: Callable[[Path], Path]) -> Made:
        source = Source(name="it", path=write(media), media_root=media)
        frame = profile_source(source, samples_per_shard=4)
        arguments = {
            "records": TrainingRecords([source], 0),
            "reader": reader,
            "tokenizer_folder": BUNDLED_TOKENIZER,
            "max_llm_tokens": 100_000,
            "encoders": (EncoderFeed(("image", "video"), 1),),
        }
        media_loader = MicrobatchLoader(encoder=0, processor=pixels, **arguments)
        text_loader = MicrobatchLoader(encoder=None, **arguments)
        for_training = {}
        usable = frame.filter(pl.col("reason").is_null() & (pl.col("audio_tokens") == 0))
        for row in usable.reverse().iter_rows(named=True):
            job = MicrobatchJob(
                samples=(SampleRef("it", row["row"]),),
                media=(tuple(map(MediumSize, *(row[name] for name in MEDIA_COLUMNS))),),
                kept_tokens=((row["kept_vision_tokens"],),),
                llm_tokens=(row["llm_tokens"],),
                encoder_rank=((0,),),
            )
            loaded = media_loader[job]
            assert loaded.unreadable == ()
            for_training[row["sample_id"]] = (loaded.batch.items, loaded.batch.media, text_loader[job].token_ids)
        return Made(frame, for_training)

    return run


@pytest.fixture(scope="module")
def from_files(make, tmp_path_factory) -> Made:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("files"))
        patch.setenv("XDG_CACHE_HOME", str(Path.cwd() / ".cache"))
        return make(write_json)


def test_the_records_are_as_different_as_they_are_meant_to_be(from_files):
    frame = from_files.frame
    assert frame["modality"].to_list() == [
        "image", "image", "text", "multi_image", "video", "audio", "mixed", None, None
    ]  # fmt: skip
    assert frame["reason"].to_list() == [None] * 7 + ["unreadable_media", "empty"]
    assert set(from_files.for_training) == {"alone", "turned", "plain", "several", "clip"}


def assert_same(made: Made, expected: Made) -> None:
    assert made.frame.schema == SHARD_SCHEMA
    assert made.frame.drop("detail").rows() == expected.frame.drop("detail").rows()
    assert set(made.for_training) == set(expected.for_training)
    for sample_id, (items, media, token_ids) in expected.for_training.items():
        found = made.for_training[sample_id]
        assert torch.equal(found[0], items), sample_id
        assert found[1] == media
        assert torch.equal(found[2], token_ids)


@pytest.mark.parametrize("write", TABLE_WRITERS)
def test_the_same_records_have_the_same_shapes_and_pixels_in_a_table(write, make, from_files):
    assert_same(make(write), from_files)


def test_the_same_records_have_the_same_shapes_and_pixels_in_an_archive(make, from_files, write_tar):
    assert_same(make(partial(write_archive, write_tar=write_tar)), from_files)


def changed(path: Path, rewrite: Callable[[], Any]) -> list[bool]:
    """Which records have other digests once the manifest is written again."""

    def digests() -> list[bytes]:
        reader = open_reader(path)
        found = [span.digest for span in reader.scan()]
        reader.close()
        return found

    before = digests()
    rewrite()
    return [old != new for old, new in zip(before, digests(), strict=True)]


def test_a_digest_covers_texts_and_embedded_media(write_tar):
    def rows(answer: str = "Yes.", content: bytes = b"picture") -> pa.Table:
        media = [{"bytes": b"first" * 9, "path": None}], [{"bytes": content, "path": None}]
        turns = [talk("<image>"), talk("<image>", answer)]
        return pa.table({"conversations": turns, "image": media})

    def parquet(**how) -> Callable[[], None]:
        return lambda: pq.write_table(rows(**how), "train.parquet")

    def archive(answer: str = "Yes.", content: bytes = b"picture") -> Callable[[], Path]:
        first = {".txt": b"Yes.", ".png": b"first"}
        return lambda: write_tar({"a": first, "b": {".txt": answer.encode(), ".png": content}})

    for path, write in ((Path("train.parquet"), parquet), (Path("train.tar"), archive)):
        write()()
        assert changed(path, write()) == [False, False]
        assert changed(path, write(answer="No.")) == [False, True]
        assert changed(path, write(content=b"pictures")) == [False, True]
    pq.write_table(rows(content=b"x" * 9), "train.parquet")
    assert changed(Path("train.parquet"), parquet(content=b"y" * 9)) == [False, True]


def test_sources_of_several_formats_are_cut_and_read_as_one(write_tar):
    Path("a").mkdir()
    pq.write_table(pa.table({"id": list(range(20))}), "a/part-0.parquet", row_group_size=7)
    Path("a/part-1.jsonl").write_text("".join(f'{{"id": {number}}}\n' for number in range(20, 40)))
    write_tar({f"{number}": {".json": json.dumps({"id": number}).encode()} for number in range(40, 60)}, "a/part-2.tar")
    source = Source(name="it", path=Path("a/part-*"), media_root=Path("a"))
    shards = list_shards(source, 8, 0)
    records = SourceRecords(source, 0)
    assert [record["id"] for shard in shards for record in records.read_shard(shard)] == list(range(60))
    assert any(shard.start < 20 < shard.start + shard.num_records for shard in shards)
    rng = np.random.default_rng(0)
    assert all(records.read(int(row))["id"] == row for row in rng.integers(0, 60, 100))


def test_bytes_in_a_record_are_a_medium_whatever_is_in_them(profile_records, media):
    records = [
        {"id": "good", "conversations": talk("<image>"), "image": (media / "wide.png").read_bytes()},
        {"id": "zero", "conversations": talk("<image>"), "image": b""},
        {"id": "other", "conversations": talk("<image>"), "image": {"bytes": b"<html>" * 99, "path": "a.png"}},
        {"id": "after", "conversations": talk("hello")},
    ]
    frame = profile_records(records, media)
    assert frame["reason"].to_list() == [None, "unreadable_media", "unreadable_media", None]
    assert frame["detail"][1].startswith("image-0: it is no picture of a known format (JPEG, ")
    assert frame["detail"][2].startswith("a.png: it is no picture of a known format (JPEG, ")
    assert EmbeddedBytes("a.png", b"x").open().read() == b"x"
