"""Whatever is wrong with a record or its files, it costs that record alone, with a reason from the closed list."""

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from dflop.shapes import ChatTokenizer, Source
from dflop.store import REJECT_REASONS

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def talk(question: str, answer: str = "Yes.") -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def of(kind: str, path: str) -> dict:
    return {"conversations": talk(f"<{kind}>"), kind: path}


def claim_size(path: Path, width: int, height: int) -> None:
    """Make a PNG's header say that it is so large."""
    content = path.read_bytes()
    header = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
    path.write_bytes(content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:])


def truncated_picture(root: Path) -> dict:
    (root / "cut.jpg").write_bytes((root / "good.jpg").read_bytes()[:100])
    return of("image", "cut.jpg")


def decompression_bomb(root: Path) -> dict:
    Image.new("L", (8, 8)).save(root / "bomb.png")
    claim_size(root / "bomb.png", 60_000, 60_000)
    return of("image", "bomb.png")


def clip_without_a_picture(root: Path) -> dict:
    (root / "sound.mp4").write_bytes((root / "good.wav").read_bytes())
    return of("video", "sound.mp4")


def truncated_clip(root: Path) -> dict:
    (root / "cut.mp4").write_bytes((root / "good.mp4").read_bytes()[:40])
    return of("video", "cut.mp4")


def sound_of_no_length(root: Path) -> dict:
    soundfile.write(root / "silence.wav", np.zeros(0), 16_000)
    return of("audio", "silence.wav")


def link_out_of_the_root(root: Path) -> dict:
    (root / "link.jpg").symlink_to(root.parent / "secret.jpg")
    return of("image", "link.jpg")


BAD: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "truncated picture": (truncated_picture, "unreadable_media", "cut.jpg: "),
    "decompression bomb": (
        decompression_bomb,
        "unreadable_media",
        "bomb.png: 60000 x 60000 are 3,600,000,000 pixels, over 178,956,970 (`data.max_image_pixels`)",
    ),
    "clip without a picture": (clip_without_a_picture, "unreadable_media", "sound.mp4: it has no video stream"),
    "truncated clip": (truncated_clip, "unreadable_media", "cut.mp4: "),
    "sound of no length": (sound_of_no_length, "unreadable_media", "silence.wav: it is zero seconds long"),
    "picture as a sound": (lambda root: of("audio", "good.jpg"), "unreadable_media", "good.jpg: "),
    "path up": (lambda root: of("image", "../secret.jpg"), "path_escape", "../secret.jpg lies outside the media root"),
    "link": (link_out_of_the_root, "path_escape", "link.jpg is a link to "),
    "missing file": (lambda root: of("video", "gone.mp4"), "missing_media", "gone.mp4 is not a file under"),
    "address": (
        lambda root: of("image", "https://example.com/a.jpg"),
        "missing_media",
        "https://example.com/a.jpg is a URL, and nothing is fetched: download it",
    ),
    "too few placeholders": (
        lambda root: {"conversations": talk("<image>"), "image": ["good.jpg", "good.jpg"]},
        "placeholder_mismatch",
        "2 image file(s) but 1 <image> in the text",
    ),
    "no turn": (lambda root: {"conversations": []}, "empty", "no turn of the assistant holds any text"),
    "no conversation": (lambda root: {"image": "good.jpg"}, "bad_record", "needs `conversations` or `messages`"),
    "null": (lambda root: None, "bad_record", "a record is an object, this is null"),
    "ten megabytes of text": (
        lambda root: {"conversations": talk("word " * 2_000_000)},
        "too_long",
        "10,000,004 bytes of text, over 1,000,000 (`data.max_text_bytes`)",
    ),
    "a long question": (
        lambda root: {"conversations": talk("word " * 9000)},
        "too_long",
        "tokens, and the first 8192 (data.max_llm_tokens) hold nothing to learn",
    ),
}


@pytest.fixture
def root(tmp_path, write_clip) -> Path:
    """A media root with a good file of each kind, and a secret beside it."""
    root = tmp_path / "media"
    root.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(noise).save(root / "good.jpg")
    Image.fromarray(noise).save(tmp_path / "secret.jpg")
    soundfile.write(root / "good.wav", np.zeros(8_000), 16_000)
    write_clip(root / "good.mp4")
    return root


GOOD = [of("image", "good.jpg"), of("video", "good.mp4"), of("audio", "good.wav"), {"conversations": talk("hello")}]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_rejected_with_its_reason_and_the_good_ones_around_it_survive(name, root, profile_source):
    make, reason, detail = BAD[name]
    before, after = [{"id": "before"} | GOOD[0]], [{"id": f"after {number}"} | good for number, good in enumerate(GOOD)]
    Path("train.json").write_text(json.dumps([*before, make(root), *after]))
    source = Source(name="it", path=Path("train.json"), media_root=root)
    frame = profile_source(source, max_llm_tokens=8192)
    assert reason in REJECT_REASONS
    assert frame["reason"].to_list() == [None, reason, None, None, None, None]
    assert detail in frame["detail"][1]
    assert frame["sample_id"].to_list() == ["before", None, "after 0", "after 1", "after 2", "after 3"]
    assert frame["modality"].drop_nulls().to_list() == ["image", "image", "video", "audio", "text"]


def test_how_many_pixels_are_too_many_is_the_configs_to_say(root, reader, profile_source):
    Path("train.json").write_text(json.dumps([decompression_bomb(root), GOOD[0]]))
    source = Source(name="it", path=Path("train.json"), media_root=root)
    few, many = (replace(reader, data=replace(reader.data, max_image_pixels=number)) for number in (100, 3_600_000_000))
    assert profile_source(source, reader=few)["reason"].to_list() == ["unreadable_media"] * 2
    frame = profile_source(source, reader=many)
    assert frame["reason"].to_list() == [None, None]
    assert frame["num_items"][0] > 4


def test_how_much_text_is_too_much_is_the_configs_to_say(root, reader, profile_source):
    texts = ["x" * 96, "x" * 97, "é" * 48, "é" * 49]
    Path("train.json").write_text(json.dumps([{"conversations": talk(text)} for text in texts]))
    source = Source(name="it", path=Path("train.json"), media_root=root)
    frame = profile_source(source, reader=replace(reader, data=replace(reader.data, max_text_bytes=100)))
    assert frame["reason"].to_list() == [None, "too_long", None, "too_long"]


class ListeningTokenizer(ChatTokenizer):
    """The tokenizer, which also notes the longest text that it was given."""

    longest = 0

    def count(self, conversations):
        sizes = [len(turn.content) for turns in conversations for turn in turns]
        self.longest = max([self.longest, *sizes])
        return super().count(conversations)


def test_a_text_of_ten_megabytes_is_rejected_before_it_is_tokenised(root, profile_records):
    tokenizer = ListeningTokenizer()
    records = [{"conversations": talk("word " * 2_000_000)}, GOOD[3]]
    assert profile_records(records, root, tokenizer=tokenizer)["reason"].to_list() == ["too_long", None]
    assert 0 < tokenizer.longest < 1000
