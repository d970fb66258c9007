"""Headers give what decoding would give, and a damaged file is one reason, never a crash."""

import io
import resource
import struct
import zlib
from dataclasses import replace

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps

from dflop.config import DataConfig, VideoConfig
from dflop.shapes import media, sounds
from dflop.shapes.media import VideoHeader, frame_indices
from dflop.shapes.media_limits import MediaLimits
from dflop.shapes.record_media import EmbeddedBytes, RecordError

# Pillow warns of what is wrong in a TIFF before it gives up.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")

LIMITS = MediaLimits.of(DataConfig())


def picture_size(path, max_pixels=200_000_000):
    return media.image_size(path, replace(LIMITS, max_image_pixels=max_pixels))


def video_header(path):
    return media.video_header(path, LIMITS)


def audio_header(path):
    return sounds.audio_header(path, LIMITS)


READERS = {
    **dict.fromkeys(("picture.jpg", "picture.png", "picture.tif", "picture.webp"), picture_size),
    **dict.fromkeys(("clip.mp4", "clip.mkv"), video_header),
    **dict.fromkeys(("sound.wav", "sound.flac"), audio_header),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_clip):
    """One small valid file of each kind."""
    folder = tmp_path_factory.mktemp("media")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 70, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    tone = np.sin(np.arange(20_000) / 20).astype(np.float32)
    for name, reader in READERS.items():
        if reader is picture_size:
            picture.save(folder / name, exif=exif)
        elif reader is video_header:
            write_clip(folder / name)
        else:
            soundfile.write(folder / name, tone, 16_000)
    return folder


def refusal(reader, path) -> str:
    with pytest.raises(RecordError) as caught:
        reader(path)
    assert caught.value.reason == "unreadable_media"
    assert caught.value.detail.startswith(path.name)
    return caught.value.detail


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
def test_a_picture_is_as_large_as_it_is_once_turned_upright(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned{suffix}"
    Image.new("RGB", (30, 20)).save(path, exif=exif)
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image)
    assert picture_size(path) == upright.size == ((20, 30) if orientation >= 5 else (30, 20))


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize("kind", [b"eXIf", b"tEXt", b"iTXt"])
@pytest.mark.parametrize("before_pixels", [True, False])
def test_a_pngs_orientation_counts_wherever_it_stands(tmp_path, kind, before_pixels):
    exif = Image.Exif()
    exif[0x0112] = 6
    content = exif.tobytes()[6:]  # without the "Exif" that JPEG puts before it
    if kind == b"tEXt":
        content = b"Raw profile type exif\0" + f"\nexif\n{len(content)}\n{content.hex()}\n".encode()
    elif kind == b"iTXt":
        content = b'XML:com.adobe.xmp\0\0\0\0\0<x:xmpmeta tiff:Orientation="6"/>'
    path = tmp_path / "picture.png"
    Image.new("RGB", (30, 20)).save(path)
    plain = path.read_bytes()
    place = plain.index(b"IDAT" if before_pixels else b"IEND") - 4
    path.write_bytes(plain[:place] + png_chunk(kind, content) + plain[place:])
    with Image.open(path) as image:
        assert picture_size(path) == ImageOps.exif_transpose(image).size == (20, 30)


ENDINGS = [".jpg", ".png", ".gif", ".webp", ".tif", ".bmp", ".avif", ".ppm"]


def can_be_decoded(path) -> bool:
    try:
        with Image.open(path) as image:
            image.load()
    except (OSError, SyntaxError):
        return False
    return True


@pytest.mark.parametrize("suffix", ENDINGS)
def test_a_picture_that_breaks_off_is_measured_if_training_can_decode_it_and_refused_if_not(tmp_path, suffix):
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 70, 3), dtype=np.uint8)).save(whole)
    content = whole.read_bytes()
    assert picture_size(whole) == (70, 40)
    decoded = set()
    for missing in (1, 2, 3, 8, 12, 13, 40, 64, 65, len(content) // 10, len(content) // 2):
        path.write_bytes(content[:-missing])
        decoded.add(can_be_decoded(path))
        if can_be_decoded(path):
            assert picture_size(path) == (70, 40)
        else:
            refusal(picture_size, path)
    assert False in decoded


WEBP = {
    "lossy": {},
    "lossless": {"lossless": True},
    "with a profile": {"icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()},
    "with a title": {"xmp": b"<x:xmpmeta/>"},
    "turned": {"xmp": b'<x:xmpmeta tiff:Orientation="6"/>'},
    "moving": {"save_all": True},
}


@pytest.mark.parametrize("size", [(1, 1), (255, 256), (300, 7)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("name", WEBP)
def test_a_webp_is_as_large_as_it_is_once_decoded(tmp_path, name, mode, size):
    path = tmp_path / "picture.webp"
    options = {"append_images": [Image.new(mode, size, "red")]} if name == "moving" else {}
    Image.new(mode, size, (9, 9, 9, 99)[: len(mode)]).save(path, **WEBP[name] | options)
    with Image.open(path) as image:
        assert picture_size(path) == ImageOps.exif_transpose(image).size
    refusal(lambda path: picture_size(path, size[0] * size[1] - 1), path)


@pytest.mark.parametrize("suffix", [".webp", ".jpg", ".png"])
def test_of_a_large_picture_little_is_read(suffix):
    num_read = 0

    class Counted(io.BytesIO):
        def read(self, size=-1):
            nonlocal num_read
            content = super().read(size)
            num_read += len(content)
            return content

    class CountedMedium(EmbeddedBytes):
        def open(self):
            return Counted(self.content)

    saved = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(saved, Image.registered_extensions()[suffix])
    assert picture_size(CountedMedium("picture", saved.getvalue())) == (400, 300)
    assert num_read < 2_000 < len(saved.getvalue()) / 20


def test_a_tiff_whose_pixels_lie_beyond_any_file_is_refused(tmp_path):
    path = tmp_path / "picture.tif"
    Image.new("L", (30, 20)).save(path, big_tiff=True)
    content = path.read_bytes()
    place = content.index(struct.pack("<HHQ", 273, 4, 1)) + 12
    path.write_bytes(content[:place].replace(b"\x11\x01\x04", b"\x11\x01\x10") + b"\xff" * 8 + content[place + 8 :])
    refusal(picture_size, path)


@pytest.mark.parametrize("num_bytes", [1, 40, 100_000])
@pytest.mark.parametrize("suffix", ENDINGS)
def test_bytes_behind_a_pictures_end_are_no_reason_to_refuse_it(tmp_path, suffix, num_bytes):
    path = tmp_path / f"picture{suffix}"
    Image.new("RGB", (30, 20)).save(path)
    path.write_bytes(path.read_bytes() + b"more"[:num_bytes] * (num_bytes // 4 or 1))
    if can_be_decoded(path):
        assert picture_size(path) == (30, 20)
    else:
        assert suffix == ".avif"  # Pillow itself refuses those


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_a_large_scan_is_only_measured_and_a_larger_one_refused_by_its_header(tmp_path):
    path = tmp_path / "scan.png"
    Image.new("1", (12_000, 9_000)).save(path)
    assert picture_size(path, 12_000 * 9_000) == (12_000, 9_000)
    detail = refusal(lambda path: picture_size(path, 12_000 * 9_000 - 1), path)
    assert "12000 x 9000 are 108,000,000 pixels, over 107,999,999 (`data.max_image_pixels`)" in detail


def test_pillows_own_guard_is_as_its_process_set_it(tmp_path, monkeypatch):
    assert Image.MAX_IMAGE_PIXELS is not None
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    path = tmp_path / "scan.png"
    Image.new("1", (200, 100)).save(path)
    assert picture_size(path) == (200, 100)
    path.write_text("no picture")
    refusal(picture_size, path)
    assert Image.MAX_IMAGE_PIXELS == 100


def test_a_picture_that_would_unfold_to_gigabytes_is_refused_before_any_pixel_is_decoded(tmp_path):
    """EXIF data behind the pixels is what Pillow decodes them for."""
    path = tmp_path / "bomb.png"
    Image.new("RGB", (30, 20)).save(path)
    plain = path.read_bytes()
    header = png_chunk(b"IHDR", struct.pack(">II", 60_000, 60_000) + plain[24:29])
    body, end = plain[33:-12], plain[-12:]
    path.write_bytes(plain[:8] + header + body + png_chunk(b"eXIf", Image.Exif().tobytes()[6:]) + end)
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "60000 x 60000 are 3,600,000,000 pixels" in refusal(picture_size, path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began < 200_000  # KiB


@pytest.mark.parametrize(("num_frames", "fps"), [(1, 10), (24, 8), (50, 25)])
def test_a_clips_header_agrees_with_its_decoded_frames(tmp_path, write_clip, num_frames, fps):
    path = tmp_path / "clip.mp4"
    write_clip(path, num_frames, fps)
    with av.open(str(path)) as container:
        decoded = [frame.to_image().size for frame in container.decode(video=0)]
    header = video_header(path)
    assert header == (len(decoded), fps, *decoded[0])
    assert header == (num_frames, fps, 64, 48)


def decoded_frames(path) -> int:
    count = 0
    with av.open(str(path)) as container:
        try:
            for _ in container.decode(video=0):
                count += 1
        except av.error.FFmpegError:
            pass
    return count


@pytest.mark.parametrize("times", [range(30), [*range(15), *range(60, 75)]], ids=["even", "with a pause"])
def test_a_clip_whose_header_counts_no_frames_has_as_many_as_are_there(tmp_path, write_clip, times):
    path = tmp_path / "clip.mkv"
    write_clip(path, num_frames=30, fps=10, times=times)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 0
    assert video_header(path).num_frames == decoded_frames(path) == 30


@pytest.mark.parametrize("suffix", [".mkv", ".mp4", ".avi"])
def test_a_clip_that_breaks_off_is_as_long_as_what_is_left_of_it(tmp_path, write_clip, suffix):
    path = tmp_path / f"clip{suffix}"
    write_clip(path, num_frames=30, fps=10, header_first=True)
    assert video_header(path)[:2] == (30, 10)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    # The last frame lacks its end; some decoders show it all the same.
    assert decoded_frames(path) - 1 <= video_header(path).num_frames <= decoded_frames(path) < 30
    assert video_header(EmbeddedBytes(path.name, path.read_bytes())) == video_header(path)


def test_a_clip_whose_title_is_not_utf8_is_still_a_clip(tmp_path, write_clip):
    path = tmp_path / "clip.mp4"
    write_clip(path, title="caf\u00e9")
    content = path.read_bytes()
    assert b"caf\xc3\xa9" in content
    path.write_bytes(content.replace(b"caf\xc3\xa9", b"caf\xe9 "))
    assert video_header(path) == (24, 8, 64, 48)


def test_a_clip_of_an_unknown_codec_is_unreadable(folder, tmp_path):
    path = tmp_path / "clip.mp4"
    content = (folder / "clip.mp4").read_bytes()
    assert b"mp4v" in content
    path.write_bytes(content.replace(b"mp4v", b"zzzz").replace(b"esds", b"zzzz"))
    assert "unknown codec" in refusal(video_header, path)


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".ogg"])
@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_a_sound_lasts_as_many_seconds_as_it_has_samples(tmp_path, suffix, rate):
    path = tmp_path / f"sound{suffix}"
    soundfile.write(path, np.zeros((rate // 2, 2), dtype=np.float32), rate)
    assert audio_header(path) == (0.5, rate)


def test_a_sound_that_libsndfile_does_not_know_is_measured_by_ffmpeg(tmp_path):
    path = tmp_path / "sound.m4a"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=22_050)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 22_050), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 22_050
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    header = audio_header(path)
    assert header.seconds == pytest.approx(1.0, abs=0.1)
    assert header.rate_hz == 22_050


def test_a_sound_that_breaks_off_is_not_said_to_be_silent(tmp_path):
    """An Ogg without one whole page: libsndfile gives it no samples, FFmpeg says why."""
    path = tmp_path / "sound.ogg"
    soundfile.write(path, np.random.default_rng(0).normal(0, 0.1, 20_000), 16_000)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert soundfile.info(path).frames == 0
    assert refusal(audio_header, path) == "sound.ogg: End of file"


@pytest.mark.parametrize("name", READERS)
def test_what_the_system_or_a_library_says_comes_without_its_number_and_the_path(tmp_path, name):
    for make in (lambda path: path.write_bytes(b"\0\0\0\x18ftypmp42" + bytes(40)), lambda path: path.unlink()):
        make(tmp_path / name)
        detail = refusal(READERS[name], tmp_path / name)
        assert "Errno" not in detail
        assert str(tmp_path) not in detail


@pytest.mark.parametrize("brand", [b"heic", b"mif1"])
def test_a_picture_as_telephones_take_them_is_named(tmp_path, brand):
    path = tmp_path / "picture.jpg"
    path.write_bytes(b"\0\0\0\x18ftyp" + brand + bytes(100))
    assert "it is a HEIC picture, which Pillow cannot read; convert it to JPEG" in refusal(picture_size, path)


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_empty_of_another_kind_or_cut_off_in_its_header_is_unreadable(folder, tmp_path, name):
    for content in (b"", b"<html>404 Not Found</html>" * 40, (folder / name).read_bytes()[:20]):
        (tmp_path / name).write_bytes(content)
        refusal(READERS[name], tmp_path / name)


def test_a_sound_that_claims_to_last_for_years_has_a_damaged_header(tmp_path):
    path = tmp_path / "sound.flac"
    soundfile.write(path, np.zeros(1000), 16_000)
    content = bytearray(path.read_bytes())
    content[21] |= 0x0F  # the upper bits of the number of samples
    content[22:26] = b"\xff" * 4
    path.write_bytes(content)
    assert "4,294,967 s at 16,000 Hz are 206,158,430,205 samples" in refusal(audio_header, path)


def test_a_sound_named_raw_is_measured_by_its_content(folder, tmp_path):
    path = tmp_path / "sound.raw"
    path.write_bytes((folder / "sound.wav").read_bytes())
    assert audio_header(path) == (1.25, 16_000)
    path.write_bytes(b"noise" * 100)
    refusal(audio_header, path)


@pytest.mark.parametrize("name", READERS)
def test_a_medium_inside_its_manifest_is_measured_as_the_file_is(folder, name):
    content = (folder / name).read_bytes()
    assert READERS[name](EmbeddedBytes(name, content)) == READERS[name](folder / name)
    refusal(READERS[name], EmbeddedBytes(name, content[:20]))


headers = st.builds(VideoHeader, st.integers(1, 20_000), st.floats(0.5, 240.0), st.just(640), st.just(360))


@given(header=headers, fps=st.floats(0.1, 60.0), max_frames=st.integers(1, 64))
def test_the_frames_taken_rise_lie_in_the_clip_and_respect_the_cap(header, fps, max_frames):
    indices = frame_indices(header, VideoConfig(fps=fps, max_frames=max_frames))
    assert 1 <= len(indices) <= max_frames
    assert indices[0] == 0
    assert indices == sorted(set(indices))
    assert indices[-1] < header.num_frames


@given(header=headers, fps=st.floats(0.1, 60.0), max_frames=st.integers(2, 64))
def test_frames_below_the_cap_are_evenly_spaced_and_at_the_cap_span_the_clip(header, fps, max_frames):
    indices = frame_indices(header, VideoConfig(fps=fps, max_frames=max_frames))
    step = max(1, round(header.fps / fps))
    wanted = -(-header.num_frames // step)
    assert len(indices) == min(wanted, max_frames)
    gaps = set(np.diff(indices))
    if wanted <= max_frames:
        assert gaps <= {step}
    else:
        assert max(gaps) - min(gaps) <= 1
        assert indices[-1] == header.num_frames - 1


def test_a_clip_that_claims_a_trillion_frames_costs_no_more_than_the_cap():
    header = VideoHeader(10**12, 10.0, 64, 48)
    assert frame_indices(header, VideoConfig(max_frames=3)) == [0, (10**12 - 1) // 2, 10**12 - 1]
