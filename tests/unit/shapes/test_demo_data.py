import json
import re
import wave
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from dflop.demo import DemoData, conversation_texts, make_demo_data
from dflop.demo.records import imagine_records
from dflop.demo.scenes import BACKGROUNDS, CLIP_SIZES, COLOURS

NUM_RECORDS = 120
MEDIA_KEYS = ("image", "video", "audio")


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> DemoData:
    return make_demo_data(tmp_path_factory.mktemp("demo") / "data", num_records=NUM_RECORDS)


@pytest.fixture(scope="module")
def entries(demo) -> list[dict]:
    return read_entries(demo)


def read_entries(demo: DemoData) -> list[dict]:
    return json.loads(demo.train_manifest.read_text()) + json.loads(demo.audio_manifest.read_text())


def media_of(entry: dict, key: str) -> list[str]:
    value = entry.get(key, [])
    return value if isinstance(value, list) else [value]


def answers_of(entry: dict) -> str:
    return " ".join(turn["value"] for turn in entry["conversations"] if turn["from"] == "gpt").lower()


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def share_of_colour(rgb: np.ndarray, name: str) -> float:
    """Share of pixels [height, width, 3] that are closer to the named colour than noise or compression moves them."""
    distance = np.linalg.norm(rgb.astype(float) - ({**COLOURS, **BACKGROUNDS}[name]), axis=-1)
    return float((distance < 45).mean())


def test_the_same_seed_draws_the_same_bytes_and_another_seed_does_not(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_demo_data(tmp_path / name, num_records=24, seed=seed)
    assert contents_of(tmp_path / "a") == contents_of(tmp_path / "b")
    assert contents_of(tmp_path / "a") != contents_of(tmp_path / "c")


@pytest.mark.parametrize("num_records", [10, 11, 37, 400])
def test_every_modality_is_there_whatever_the_size(num_records):
    records = imagine_records(num_records, seed=1)
    assert len({record.id for record in records}) == num_records
    assert {record.modality for record in records} == {"image", "multi_image", "video", "text", "audio"}


def test_too_few_records_are_refused_with_the_least_number_that_works(tmp_path):
    with pytest.raises(ValueError, match="at least 10"):
        make_demo_data(tmp_path / "data", num_records=9)
    assert list(tmp_path.iterdir()) == []


def test_the_counts_and_bytes_it_reports_are_those_on_disk(demo, entries):
    assert sum(demo.num_records.values()) == len(entries) == NUM_RECORDS
    assert demo.total_bytes == sum(len(content) for content in contents_of(demo.train_manifest.parent).values())
    assert all("audio" in entry for entry in json.loads(demo.audio_manifest.read_text()))


def test_placeholders_match_the_media_and_stand_in_the_first_question(entries):
    for entry in entries:
        turns = entry["conversations"]
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * (len(turns) // 2)
        for key in MEDIA_KEYS:
            assert turns[0]["value"].count(f"<{key}>") == len(media_of(entry, key)), entry["id"]
        assert not any(re.search("<(image|video|audio)>", turn["value"]) for turn in turns[1:])


def test_every_media_file_opens_within_its_bounds_and_no_file_is_left_over(demo, entries):
    folder = demo.train_manifest.parent
    for entry in entries:
        for path in media_of(entry, "image"):
            with Image.open(folder / path) as image:
                image.load()
                assert all(30 <= side <= 3508 for side in image.size)
        for path in media_of(entry, "video"):
            with av.open(folder / path) as container:
                stream = container.streams.video[0]
                num_decoded = sum(1 for _ in container.decode(stream))
                assert num_decoded == stream.frames
                assert 8 <= stream.average_rate <= 15
                assert 1 <= num_decoded / stream.average_rate <= 30
                assert (stream.width, stream.height) in CLIP_SIZES
        for path in media_of(entry, "audio"):
            with wave.open(str(folder / path)) as wav:
                assert (wav.getnchannels(), wav.getsampwidth(), wav.getframerate()) == (1, 2, 16_000)
                assert 0.5 <= wav.getnframes() / 16_000 <= 12
    named = {path for entry in entries for key in MEDIA_KEYS for path in media_of(entry, key)}
    assert named | {"train.json", "audio.json"} == set(contents_of(folder))


def test_sizes_spread_as_they_do_in_real_data():
    records = imagine_records(400, seed=0)
    pictures = [record.scenes[0] for record in records if record.modality == "image"]
    pixels = np.array([picture.width * picture.height for picture in pictures])
    aspects = np.array([picture.width / picture.height for picture in pictures])
    assert pixels.min() < 100**2
    assert pixels.max() > 2_000_000
    assert aspects.min() < 0.5
    assert aspects.max() > 5
    seconds = np.array([record.scenes[0].seconds for record in records if record.modality == "video"])
    assert np.median(seconds) < 6
    assert seconds.max() > 12
    assert {len(record.scenes) for record in records if record.modality == "multi_image"} == {2, 3, 4, 5, 6}
    words = [len(turn.answer.split()) for record in records if record.modality == "text" for turn in record.turns]
    assert min(words) <= 6
    assert 80 <= max(words) <= 130


def test_every_colour_of_an_answer_is_in_the_pixels(demo, entries):
    folder = demo.train_manifest.parent
    num_checked = 0
    for entry in entries:
        frames = [np.asarray(Image.open(folder / path).convert("RGB"))[::3, ::3] for path in media_of(entry, "image")]
        for path in media_of(entry, "video"):
            with av.open(folder / path) as container:
                frames += [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)][-1:]
        for name in {**COLOURS, **BACKGROUNDS} if frames else ():
            if re.search(rf"\b{name}\b", answers_of(entry)):
                assert max(share_of_colour(frame, name) for frame in frames) > 0.01, (entry["id"], name)
                num_checked += 1
    assert num_checked > NUM_RECORDS / 3


def test_the_colours_named_in_order_are_those_of_the_pictures_in_order(demo, entries):
    num_checked = 0
    for entry in entries:
        listed = re.search(r"the colours are ([^.]+)\.", answers_of(entry))
        if listed:
            names = re.split(", | and ", listed[1])
            for path, name in zip(media_of(entry, "image"), names, strict=True):
                pixels = np.asarray(Image.open(demo.train_manifest.parent / path).convert("RGB"))
                assert share_of_colour(pixels, name) > 0.05, (entry["id"], path)
            num_checked += 1
    assert num_checked > 0


def test_tones_of_a_melody_go_the_way_the_answer_says(demo):
    num_checked = 0
    for entry in json.loads(demo.audio_manifest.read_text()):
        direction = re.search(r"the melody (rises|falls)", answers_of(entry))
        if direction:
            with wave.open(str(demo.audio_manifest.parent / entry["audio"])) as wav:
                signal = np.frombuffer(wav.readframes(wav.getnframes()), dtype="<i2").astype(float)
            fifth = len(signal) // 5
            spectra = [np.abs(np.fft.rfft(part, n=1 << 17)) for part in (signal[:fifth], signal[-fifth:])]
            first, last = (spectrum.argmax() for spectrum in spectra)
            assert (last > first) == (direction[1] == "rises"), entry["id"]
            num_checked += 1
    assert num_checked > 0


def test_drawing_again_replaces_the_manifests_and_keeps_foreign_files(tmp_path):
    folder = tmp_path / "data"
    make_demo_data(folder, num_records=12, seed=0)
    (folder / "notes.txt").write_text("mine")
    again = make_demo_data(folder, num_records=10, seed=1)
    assert len(read_entries(again)) == 10
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_an_interrupted_drawing_leaves_nothing_behind(tmp_path):
    class Interrupted(Exception):
        pass

    def stop_at_five(num_done: int) -> None:
        if num_done == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        make_demo_data(tmp_path / "data", num_records=10, progress=stop_at_five)
    assert list(tmp_path.iterdir()) == []


def test_conversation_texts_are_the_manifests_texts_without_placeholders():
    texts = list(conversation_texts(NUM_RECORDS, seed=0))
    assert len(texts) == sum(2 * len(record.turns) for record in imagine_records(NUM_RECORDS, seed=0))
    assert not any("<" in text for text in texts)
