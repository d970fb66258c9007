"""Media that lie or bite cost their record when they are profiled, or their sample when they are loaded, never more.

Nothing that is no picture, clip or sound of a listed format is opened; no header decides how much memory is asked for.
"""

import io
import itertools
import math
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from fuzzing import fuzz
from PIL import Image

from dflop.config import DataConfig, load_config
from dflop.loading.decoding import MediaDecoder
from dflop.models import load_model_spec
from dflop.shapes import ShapeReader, media_limits
from dflop.shapes.media_limits import decoding
from dflop.shapes.reader import MediumSize
from dflop.shapes.record_media import EmbeddedBytes, Medium, RecordError
from dflop.shapes.records import Record

# Pillow warns of what is wrong in a picture before it gives up.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


class Seen:
    """A processor that gives the media back as they were decoded: sizes of pictures and frames, samples of sounds."""

    item_shape = ()

    def images(self, pictures):
        return [np.array([picture.size]) for picture in pictures]

    def frames(self, frames, num_frames=None):
        return np.array([frame.size for frame in frames])

    def sound(self, samples):
        return samples


@pytest.fixture(scope="module")
def reader() -> ShapeReader:
    config = load_config({"model": {"family": "qwen2_5_omni_thinker", "preset": "tiny"}})
    return ShapeReader(load_model_spec(config.model).rules, DataConfig())


def profiled(reader: ShapeReader, medium: Medium, root: Path) -> MediumSize:
    (shape,) = reader.read_media(Record(None, (medium,), ()), root)
    return MediumSize(*shape.size, shape.num_frames, shape.frame_us, shape.num_samples, shape.rate_uhz)


def loaded(reader: ShapeReader, medium: Medium, size: MediumSize, root: Path) -> tuple[np.ndarray, list[str], bool]:
    """A medium of this profiled size as training loads it, what is said of it, and whether it became blank."""
    said, blank = [], []
    limits = reader.limits.for_a_record()
    decoder = MediaDecoder(Seen(), reader.data.video, limits, said, blank)
    (items,) = decoder.items_of([medium], [size], root, [max(1, size.num_frames + size.num_samples)])
    return items, said, bool(blank)


def profile_and_load(reader: ShapeReader, kind: str, file: Path) -> None:
    """Profile a file, which may be refused, and load it: it must have the size that was profiled."""
    medium = Medium(kind, file.name)
    size = profiled(reader, medium, file.parent)
    items, _, is_blank = loaded(reader, medium, size, file.parent)
    if kind == "audio":
        assert len(items) == size.num_samples
        assert np.abs(items).max(initial=0) < np.inf
    elif is_blank:
        assert not items.any()
    else:
        assert items.tolist() == [list(size.pixels)] * max(1, size.num_frames)


def refusal(reader: ShapeReader, medium: Medium, root: Path = Path()) -> str:
    with pytest.raises(RecordError) as caught:
        profiled(reader, medium, root)
    assert caught.value.reason == "unreadable_media"
    return caught.value.detail


def clip(ending: str, codec: str, size: tuple[int, int] = (32, 32), pixels: str = "yuv420p") -> bytes:
    made = io.BytesIO()
    with av.open(made, "w", format={"mkv": "matroska", "ts": "mpegts"}.get(ending, ending)) as container:
        stream = container.add_stream(codec, rate=4)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        for number in range(8):
            shade = np.full((size[1], size[0], 3), number * 9, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
        container.mux(stream.encode(None))
    return made.getvalue()


def sound(ending: str, num_channels: int = 2) -> bytes:
    made = io.BytesIO()
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, (1600, num_channels))
    soundfile.write(made, samples, 16_000, format="AIFF" if ending == "aif" else ending.upper())
    return made.getvalue()


def aac() -> bytes:
    made = io.BytesIO()
    with av.open(made, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8_000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return made.getvalue()


def wav(rate_hz: int, num_samples: int = 1000) -> bytes:
    form = struct.pack("<IHHIIHH", 16, 1, 1, rate_hz, 2 * rate_hz & 0xFFFFFFFF, 2, 16)
    data = bytes(2 * num_samples)
    return (
        b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + form + b"data" + struct.pack("<I", len(data)) + data
    )


def flac_that_claims(seconds: int) -> bytes:
    made = io.BytesIO()
    soundfile.write(made, np.zeros((4096, 1)), 48_000, format="FLAC")
    content = bytearray(made.getvalue())
    claimed = int.from_bytes(content[18:26], "big") >> 36 << 36 | 48_000 * seconds
    content[18:26] = claimed.to_bytes(8, "big")
    return bytes(content)


def test_damaged_pictures_are_refused_or_load_as_they_were_profiled(reader, tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8))
    good = {}
    for ending in ("jpg", "png", "webp", "gif", "bmp", "tif", "ppm", "avif"):
        for mode in ("RGB", "L"):
            made = io.BytesIO()
            noise.convert(mode).save(made, Image.registered_extensions()[f".{ending}"])
            good[f"{mode}.{ending}"] = made.getvalue()
    fuzz(good, lambda file: profile_and_load(reader, "image", file), RecordError, tmp_path)


def test_damaged_clips_are_refused_or_load_as_they_were_profiled(reader, tmp_path):
    good = {
        "clip.mp4": clip("mp4", "mpeg4"),
        "clip.mkv": clip("mkv", "mpeg4"),
        "clip.avi": clip("avi", "mpeg4"),
        "clip.webm": clip("webm", "libvpx"),
        "clip.ts": clip("ts", "mpeg2video"),
        "clip.gif": clip("gif", "gif", pixels="rgb8"),
    }
    fuzz(good, lambda file: profile_and_load(reader, "video", file), RecordError, tmp_path, num_files=150)


def test_damaged_sounds_are_refused_or_load_as_they_were_profiled(reader, tmp_path):
    good = {f"sound.{ending}": sound(ending) for ending in ("wav", "flac", "ogg", "mp3", "aif", "au", "w64", "caf")}
    good |= {"sound.m4a": aac()}
    fuzz(good, lambda file: profile_and_load(reader, "audio", file), RecordError, tmp_path, num_files=150)


def test_a_picture_that_is_postscript_is_given_to_no_program(reader, tmp_path, monkeypatch):
    """Pillow would run Ghostscript, which here is a program that leaves a trace."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\necho 10.0\ntouch {tmp_path}/was-run\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "pic.jpg").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 48\n%%EndComments\n/x 1 def\nshowpage\n%%EOF\n"
    )
    medium = Medium("image", "pic.jpg")
    assert "no picture of a known format (JPEG, PNG," in refusal(reader, medium, tmp_path)
    _, said, is_blank = loaded(reader, medium, MediumSize(64, 48, 0), tmp_path)
    assert is_blank
    assert said[0].startswith("pic.jpg: cannot identify")
    assert said[0].endswith("; nothing is learned from its sample")
    assert not (tmp_path / "was-run").exists()


PLAYLIST = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXTINF:1.0,\nfile://{file}\n"
NAMES_OTHERS = {
    "clip.m3u8": PLAYLIST + "#EXT-X-ENDLIST\n",
    "live.m3u8": PLAYLIST,  # FFmpeg would wait for ever for more of it
    "list.mp4": "ffconcat version 1.0\nfile {name}\n",
    "sdp.mp4": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
    "a=rtpmap:96 H264/90000\n",
}


@pytest.mark.parametrize("kind", ["video", "audio"])
@pytest.mark.parametrize("name", NAMES_OTHERS)
def test_a_file_that_names_other_files_or_a_connection_is_refused_unopened(reader, tmp_path, monkeypatch, name, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real.ts").write_bytes(clip("ts", "mpeg2video"))
    root = tmp_path / "root"
    root.mkdir()
    content = NAMES_OTHERS[name].format(file=tmp_path / "real.ts", name="real.ts").encode()
    (root / name).write_bytes(content)
    for medium in (Medium(kind, name), Medium(kind, EmbeddedBytes("clip.mp4", content))):
        said = refusal(reader, medium, root)
        assert "of no known format (mov, matroska," in said or "Invalid data found" in said


@pytest.mark.parametrize("rate_hz", [1, 767_999, 999_983, 2**31 - 1])
def test_a_rate_that_no_sound_has_is_refused(reader, rate_hz):
    said = refusal(reader, Medium("audio", EmbeddedBytes("s.wav", wav(rate_hz, 10_000))))
    assert "Hz is no sound's rate" in said or "too little in common" in said


def test_a_sound_that_claims_days_is_refused_and_one_that_claims_minutes_is_silent_behind_its_end(reader):
    days, minutes = (Medium("audio", EmbeddedBytes("s.flac", flac_that_claims(60 * number))) for number in (8640, 5))
    assert "518,400 s at 48,000 Hz are 24,883,200,000 samples, over 172,800,000" in refusal(reader, days)
    size = profiled(reader, minutes, Path())
    assert size.num_samples == 300 * 16_000
    samples, said, is_blank = loaded(reader, minutes, size, Path())
    assert len(samples) == size.num_samples
    assert not is_blank
    assert "s of sound, it was profiled with 300 s" in said[0]
    # A sound that grew after it was profiled is not even read.
    _, said, is_blank = loaded(reader, days, size, Path())
    assert is_blank
    assert "(`data.max_audio_samples`); nothing is learned from its sample" in said[0]


def test_a_sound_without_channels_is_no_longer_than_others(reader):
    with pytest.raises(RecordError, match=r"125,000 s at 16,000 Hz are 6,000,000,000 samples"):
        reader.limits.check_sound("s.aif", 2_000_000_000, 0, 16_000)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_sound_of_values_that_would_spoil_the_loss_is_silence_of_which_nothing_is_learned(reader, value):
    made = io.BytesIO()
    soundfile.write(made, np.full(1000, value), 16_000, format="WAV", subtype="FLOAT")
    medium = Medium("audio", EmbeddedBytes("s.wav", made.getvalue()))
    samples, said, is_blank = loaded(reader, medium, profiled(reader, medium, Path()), Path())
    assert is_blank
    assert not samples.any()
    assert "no numbers of a sound" in said[0]


def test_a_clip_whose_frames_change_their_size_is_scaled_to_the_profiled_one(reader):
    content = clip("ts", "mpeg2video", (64, 48)) + clip("ts", "mpeg2video", (96, 80))
    medium = Medium("video", EmbeddedBytes("clip.ts", content))
    size = profiled(reader, medium, Path())
    sizes, said, is_blank = loaded(reader, medium, size, Path())
    assert sizes.tolist() == [[64, 48]] * size.num_frames
    assert not is_blank
    assert said == ["clip.ts: frames of (96, 80) pixels, it was profiled with (64, 48); they were scaled"]


def test_a_clip_of_too_many_pixels_is_refused_by_its_header(reader):
    medium = Medium("video", EmbeddedBytes("clip.mp4", clip("mp4", "mpeg4")))
    strict = replace(reader, data=replace(reader.data, max_clip_pixels=2 * 32 * 32 - 1))
    assert "2 frames of 32 x 32 are 2,048 pixels, over 2,047 (`data.max_clip_pixels`)" in refusal(strict, medium)
    assert profiled(reader, medium, Path()).num_frames == 2


def test_a_record_of_many_pictures_is_refused_by_the_pixels_of_all(reader, tmp_path):
    """A loader holds them at once, and one file may be named a thousand times."""
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    strict = replace(reader, data=replace(reader.data, max_clip_pixels=600, max_image_pixels=200))
    assert len(strict.read_media(Record(None, (Medium("image", "a.png"),) * 3, ()), tmp_path)) == 3
    for medium in (Medium("image", "a.png"), Medium("image", "a.png", size=(20, 10))):
        with pytest.raises(RecordError, match=r"its pictures have 800 pixels together, over 600 \(`data.max_clip_"):
            strict.read_media(Record(None, (medium,) * 4, ()), tmp_path)
    stricter = replace(reader, data=replace(reader.data, max_clip_pixels=100, max_image_pixels=200))
    with pytest.raises(RecordError, match=r"its pictures have 400 pixels together, over 200 \(`data.max_image_pixels"):
        stricter.read_media(Record(None, (Medium("image", "a.png"),) * 2, ()), tmp_path)


HASTY = {
    "clip.mkv": clip("mkv", "mpeg4"),
    "clip.mp4": clip("mp4", "mpeg4"),
    "sound.wav": sound("wav"),
    "sound.m4a": aac(),
}


@pytest.mark.parametrize("name", HASTY)
def test_a_medium_that_takes_too_long_is_blank(reader, name):
    medium = Medium("video" if name.startswith("clip") else "audio", EmbeddedBytes(name, HASTY[name]))
    hasty = replace(reader, data=replace(reader.data, max_decode_s=1e-9))
    _, said, is_blank = loaded(hasty, medium, profiled(reader, medium, Path()), Path())
    assert is_blank
    assert "nothing is learned from its sample" in said[0]
    if name == "clip.mkv":  # whose frames are counted
        refusal(hasty, medium)


@pytest.mark.parametrize("name", ["clip.mp4", "sound.m4a"])
def test_nothing_is_learned_of_a_medium_whose_time_is_over_in_the_middle(reader, name, monkeypatch):
    """How far it came depends on how busy the machine is."""
    medium = Medium("video" if name.startswith("clip") else "audio", EmbeddedBytes(name, HASTY[name]))
    size = profiled(reader, medium, Path())
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(media_limits.time, "monotonic", lambda: next(clock))
    hasty = replace(reader, data=replace(reader.data, max_decode_s=5))  # the first part is in time, the second is not
    _, said, is_blank = loaded(hasty, medium, size, Path())
    assert is_blank
    assert "the media of its record take more than 5 s to read (`data.max_decode_s`)" in said[0]


# A part, and the place before which it may stand many times.
TINY_PARTS = {
    "png": (struct.pack(">I4sI", 0, b"prVt", zlib.crc32(b"prVt")), 33),
    "jpg": (b"\xff\xfe\0\x02", 2),
    "gif": (b"!\xfe\x01a\0", 13 + 3 * 256),
    "ppm": (b"#\n", 3),
}


def picture_with(ending: str, num_parts: int) -> bytes:
    """A good picture of more than 1 MiB with many small parts before its pixels."""
    made = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (1100, 1100, 3), dtype=np.uint8)
    Image.fromarray(noise).save(made, Image.registered_extensions()[f".{ending}"], quality=100)
    part, at = TINY_PARTS[ending]
    return made.getvalue()[:at] + part * num_parts + made.getvalue()[at:]


@pytest.mark.parametrize("ending", TINY_PARTS)
def test_a_picture_of_very_many_parts_ends_with_the_time_of_its_record(reader, ending, monkeypatch):
    """Pillow reads each of them with Python: 48 MB of PNG chunks took 47 s."""
    clock = itertools.count()
    monkeypatch.setattr(media_limits.time, "monotonic", lambda: next(clock))
    patient = replace(reader, data=replace(reader.data, max_decode_s=5_000))
    good, bad = (Medium("image", EmbeddedBytes("picture", picture_with(ending, num))) for num in (10, 20_000))
    size = profiled(patient, good, Path())
    assert size.pixels == (1100, 1100)
    assert loaded(patient, good, size, Path())[0].tolist() == [[1100, 1100]]
    assert "the media of its record take more than 5000 s to read" in refusal(patient, bad)
    _, said, is_blank = loaded(patient, bad, size, Path())
    assert is_blank
    assert "the media of its record take more than 5000 s to read" in said[0]


def test_the_media_of_a_record_have_one_limit_of_time_together(reader, monkeypatch):
    """Each takes little; a record of a thousand would keep a loader for hours."""
    picture = io.BytesIO()
    Image.new("RGB", (20, 10)).save(picture, "PNG")
    contents = {"picture.png": picture.getvalue(), "clip.mkv": HASTY["clip.mkv"], "sound.wav": HASTY["sound.wav"]}
    files = [EmbeddedBytes(name, content) for name, content in contents.items()]
    media = [Medium(kind, file) for kind, file in zip(("image", "video", "audio"), files, strict=True)]
    sizes = [profiled(reader, medium, Path()) for medium in media]
    clock = itertools.count()
    monkeypatch.setattr(media_limits.time, "monotonic", lambda: next(clock))
    for medium, size in zip(media, sizes, strict=True):
        patient = replace(reader, data=replace(reader.data, max_decode_s=100))
        assert len(patient.read_media(Record(None, (medium,) * 2, ()), Path())) == 2
        with pytest.raises(RecordError, match=rf"^{medium.file}: the media of its record take more than 100 s"):
            patient.read_media(Record(None, (medium,) * 200, ()), Path())
        blank: list[Medium] = []
        decoder = MediaDecoder(Seen(), reader.data.video, patient.limits.for_a_record(), [], blank)
        items = decoder.items_of([medium] * 200, [size] * 200, Path(), [1] * 200)
        assert len(items) == 200
        assert not items[-1].any()
        assert 0 < len(blank) < 200
        assert "the media of its record take more than 100 s to read" in decoder.unreadable[-1]


def test_whatever_a_decoder_raises_is_a_refusal_that_says_what_it_was():
    with pytest.raises(RecordError, match=r"^a\.jpg: MemoryError$"), decoding("a.jpg"):
        raise MemoryError


# Loads a file and prints how many KiB the process held at most, before and in all.
LOAD = """
import re, sys
from pathlib import Path
from dflop.config import DataConfig
from dflop.loading.decoding import MediaDecoder
from dflop.shapes.media_limits import MediaLimits
from dflop.shapes.reader import MediumSize
from dflop.shapes.record_media import Medium

def print_peak():
    print(re.search(r"VmHWM:\\s+([0-9]+)", Path("/proc/self/status").read_text())[1])

class Nothing:
    item_shape = ()
    images = frames = staticmethod(lambda pictures, num_frames=None: [None] * len(pictures))
    sound = len

data, file = DataConfig(), Path(sys.argv[1])
kind, *size = sys.argv[2].split()
decoder = MediaDecoder(Nothing(), data.video, MediaLimits.of(data), [], [])
print_peak()
decoder.items_of([Medium(kind, file.name)], [MediumSize(*map(int, size))], file.parent, [1])
assert not decoder.unreadable, decoder.unreadable
print_peak()
"""


def large_picture(file: Path, share: int) -> str:
    side = math.isqrt(DataConfig().max_image_pixels // share)
    Image.new("RGB", (side, side)).save(file, "PNG", compress_level=1)
    return f"image {side} {side} 0"


def large_clip(file: Path, share: int) -> str:
    size = (3840, 2160)
    num_frames = DataConfig().max_clip_pixels // share // (size[0] * size[1])
    with av.open(str(file), "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=1)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for _ in range(num_frames):
            container.mux(stream.encode(av.VideoFrame(*size, "yuv420p")))
        container.mux(stream.encode(None))
    return f"video {size[0]} {size[1]} {num_frames}"


def large_sound(file: Path, share: int) -> str:
    num_samples = DataConfig().max_audio_samples // share
    with soundfile.SoundFile(file, "w", 48_000, 1, format="FLAC") as written:
        for _ in range(num_samples // 48_000):
            written.write(np.zeros(48_000, np.int16))
    return f"audio 0 0 0 0 {num_samples // 48_000 * 16_000}"


@pytest.mark.parametrize(("make", "share"), [(large_picture, 4), (large_clip, 2), (large_sound, 4)])
def test_a_loader_holds_the_largest_medium_of_the_default_limits_in_two_gib(make, share, tmp_path):
    """A part of it, e.g. a quarter, takes that part of the memory, and what a decoder takes for any clip."""
    size = make(tmp_path / "large", share)
    command = [sys.executable, "-c", LOAD, tmp_path / "large", size]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, peak = map(int, done.stdout.split())
    assert before + share * (peak - before) < 2 << 20


def box(kind: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return struct.pack(">I4s", 8 + len(content), kind) + content


@pytest.mark.parametrize(
    "header",
    [
        box(b"moov", box(b"stsz", struct.pack(">III", 0, 1, 80_000_000))),
        box(b"moov", *[box(b"stsz", struct.pack(">III", 0, 1, 150))] * 3),
        box(b"moof", box(b"trun", struct.pack(">II", 0, 80_000_000))),
        box(b"moov", box(b"cmov", bytes(99))),
        box(b"what") + box(b"moov", box(b"stsz", struct.pack(">III", 0, 1, 80_000_000))),
        box(b"free") * 100_001,
    ],
    ids=["one track", "three tracks", "a fragment", "packed", "behind a box of no known kind", "very many boxes"],
)
def test_a_clip_that_claims_more_samples_than_bytes_is_refused_unopened(reader, header, monkeypatch, tmp_path):
    """FFmpeg made an entry for each: 612 bytes took 2.9 GB."""
    (tmp_path / "clip.mp4").write_bytes(box(b"ftyp", b"isom", bytes(4)) + header + box(b"mdat", bytes(64)))
    monkeypatch.setattr(av, "open", None)
    for kind in ("video", "audio"):
        with pytest.raises(RecordError, match="claims more samples than the file has bytes"):
            profiled(reader, Medium(kind, "clip.mp4"), tmp_path)


def test_a_picture_of_very_many_scans_is_blank(reader, tmp_path):
    """Each scan passes over all pixels: 712 kB took 89 s to decode."""
    usual = io.BytesIO()
    Image.new("L", (4000, 4000)).save(usual, "JPEG")
    begin, rest = usual.getvalue()[:2], usual.getvalue()[2:]
    for num_scans, is_blank in ((500, False), (600, True)):
        scans = b"\xff\xda" * num_scans
        (tmp_path / "a.jpg").write_bytes(begin + b"\xff\xfe" + struct.pack(">H", 2 + len(scans)) + scans + rest)
        medium = Medium("image", "a.jpg")
        said, blank = [], []
        decoder = MediaDecoder(Seen(), reader.data.video, reader.limits, said, blank)
        decoder.items_of([medium], [profiled(reader, medium, tmp_path)], tmp_path, [1])
        assert bool(blank) == is_blank
        assert ("take too long to decode" in "".join(said)) == is_blank
