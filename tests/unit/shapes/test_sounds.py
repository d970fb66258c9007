"""Sounds are decoded to one channel at 16 kHz, as long as their headers say, whatever holds them."""

import math
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from scipy.signal import resample_poly

from dflop.config import DataConfig, VideoConfig
from dflop.loading import sounds
from dflop.loading.decoding import MediaDecoder
from dflop.loading.sounds import read_sound
from dflop.models import SOUND_RATE_HZ
from dflop.shapes.media_limits import MediaLimits
from dflop.shapes.reader import MediumSize
from dflop.shapes.record_media import Medium, RecordError
from dflop.shapes.sounds import audio_header

LIMITS = MediaLimits.of(DataConfig())


def tone(seconds: float, rate_hz: int, hz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate_hz)) / rate_hz)


def write_aac(path: Path, samples: np.ndarray, rate_hz: int) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=rate_hz, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples.astype(np.float32)[None], format="fltp", layout="mono")
        frame.sample_rate = rate_hz
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050, 44_100])
@pytest.mark.parametrize("ending", ["wav", "flac", "mp3", "ogg"])
def test_a_sound_is_as_long_as_its_header_says_and_sounds_the_same(tmp_path, ending, rate_hz):
    path = tmp_path / f"sound.{ending}"
    soundfile.write(path, np.stack([tone(1.3, rate_hz)] * 2, axis=1), rate_hz)
    seconds, rate = audio_header(path, LIMITS)
    samples = read_sound(path, LIMITS)
    assert samples.dtype == np.float32
    assert len(samples) == -(-round(seconds * rate) * SOUND_RATE_HZ // rate)
    middle, expected = samples[4000:12_000], tone(1.3, SOUND_RATE_HZ)[4000:12_000]
    loudest = np.abs(np.fft.rfft(middle)).argmax()
    assert loudest == np.abs(np.fft.rfft(expected)).argmax()
    assert np.abs(middle).max() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("rate_hz", [8_000, 44_100, 48_000, 44_101])
@pytest.mark.parametrize("num_samples", [1, 999, 100_000])
def test_a_sound_that_is_resampled_in_blocks_is_what_it_is_as_a_whole(tmp_path, monkeypatch, rate_hz, num_samples):
    monkeypatch.setattr(sounds, "_BLOCK", 9000)
    wave = np.random.default_rng(0).uniform(-1, 1, num_samples).astype(np.float32)
    soundfile.write(tmp_path / "sound.wav", wave, rate_hz, subtype="FLOAT")
    shared = math.gcd(rate_hz, SOUND_RATE_HZ)
    whole = resample_poly(wave, SOUND_RATE_HZ // shared, rate_hz // shared)
    np.testing.assert_allclose(read_sound(tmp_path / "sound.wav", LIMITS), whole, atol=1e-6)


def test_two_channels_are_heard_as_their_mean(tmp_path):
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.stack([np.full(800, 0.5), np.full(800, -0.25)], axis=1), SOUND_RATE_HZ, subtype="FLOAT")
    np.testing.assert_allclose(read_sound(path, LIMITS), 0.125)


def test_what_libsndfile_cannot_read_is_read_by_ffmpeg(tmp_path):
    path = tmp_path / "sound.m4a"
    write_aac(path, tone(2.0, 32_000), 32_000)
    samples = read_sound(path, LIMITS)
    assert abs(len(samples) - 2 * SOUND_RATE_HZ) < SOUND_RATE_HZ // 5
    loudest = np.abs(np.fft.rfft(samples[8000:24_000])).argmax()
    assert loudest == 440


class Waves:
    """A processor whose items are the samples."""

    item_shape = ()

    def sound(self, samples: np.ndarray) -> np.ndarray:
        return samples


def decode(path: Path, num_samples: int) -> tuple[np.ndarray, list[str], list[Medium]]:
    unreadable, blank = [], []
    decoder = MediaDecoder(Waves(), VideoConfig(), LIMITS, unreadable, blank)
    (samples,) = decoder.items_of(
        [Medium("audio", path.name)], [MediumSize(0, 0, 0, num_samples=num_samples)], path.parent, [num_samples]
    )
    return samples, unreadable, blank


def test_a_sound_of_another_length_than_profiled_is_cut_or_goes_on_in_silence_and_that_is_said(tmp_path):
    path = tmp_path / "sound.wav"
    soundfile.write(path, tone(1.0, SOUND_RATE_HZ), SOUND_RATE_HZ, subtype="FLOAT")
    whole = read_sound(path, LIMITS)
    for num_samples in (16_000, 16_100, 15_900):
        samples, unreadable, blank = decode(path, num_samples)
        np.testing.assert_array_equal(samples[:15_900], whole[:15_900])
        assert (len(samples), unreadable, blank) == (num_samples, [], [])
    samples, unreadable, blank = decode(path, 32_000)
    assert not samples[16_000:].any()
    assert unreadable == ["sound.wav: 1 s of sound, it was profiled with 2 s"]
    assert not blank


def test_a_sound_that_cannot_be_decoded_is_silence_of_which_nothing_is_learned(tmp_path):
    path = tmp_path / "sound.wav"
    path.write_bytes(b"no sound at all")
    with pytest.raises(RecordError, match=r"sound\.wav: Invalid data found"):
        read_sound(path, LIMITS)
    samples, unreadable, blank = decode(path, 500)
    assert len(samples) == 500
    assert not samples.any()
    assert "nothing is learned from its sample" in unreadable[0]
    assert [medium.file for medium in blank] == ["sound.wav"]
