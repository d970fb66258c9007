"""Write one scene as a file, with the same bytes for the same scene and seed.

Pictures become PNG or JPEG, clips MPEG-4 in an mp4 container (a codec of every FFmpeg build, encoded on one thread with
the bit-exact flags), melodies 16 kHz mono 16-bit WAV.
"""

import wave
from pathlib import Path

import av
import numpy as np

from dflop.demo.figures import draw_clip_frame, draw_picture
from dflop.demo.scenes import Clip, Melody, Picture

__all__ = ["write_scene"]

SAMPLE_RATE = 16_000
JPEG_QUALITY = 88


def write_scene(scene: Picture | Clip | Melody, path: Path, noise: np.random.Generator) -> None:
    """Write a scene to `path`, in the format of the scene's suffix; `noise` is for the grain of pictures."""
    match scene:
        case Picture():
            _write_picture(scene, path, noise)
        case Clip():
            _write_clip(scene, path)
        case Melody():
            _write_melody(scene, path)


def _write_picture(picture: Picture, path: Path, noise: np.random.Generator) -> None:
    image = draw_picture(picture, noise)
    if picture.suffix == ".jpg":
        image.save(path, quality=JPEG_QUALITY)
    else:
        image.save(path, compress_level=6)


def _write_clip(clip: Clip, path: Path) -> None:
    options = {"fflags": "+bitexact", "movflags": "+faststart"}
    with av.open(path, "w", format="mp4", options=options) as container:
        stream = container.add_stream("mpeg4", rate=clip.fps, options={"flags": "+bitexact"})
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        stream.codec_context.thread_count = 1
        stream.codec_context.qmin, stream.codec_context.qmax = 3, 7
        for frame in range(clip.num_frames):
            container.mux(stream.encode(av.VideoFrame.from_image(draw_clip_frame(clip, frame))))
        container.mux(stream.encode(None))


def _write_melody(melody: Melody, path: Path) -> None:
    """Tones with one overtone, faded in and out so that neighbours can be told apart."""
    num_samples = round(melody.seconds * SAMPLE_RATE)
    bounds = np.linspace(0, num_samples, len(melody.notes) + 1).astype(int)
    signal = np.zeros(num_samples)
    for note, start, stop in zip(melody.notes, bounds[:-1], bounds[1:], strict=True):
        time_s = np.arange(stop - start) / SAMPLE_RATE
        cycles = 2 * np.pi * 440 * 2 ** ((note - 69) / 12) * time_s
        from_edge_s = np.minimum(time_s, time_s[::-1])
        signal[start:stop] = (np.sin(cycles) + 0.3 * np.sin(2 * cycles)) * np.minimum(1, from_edge_s / 0.03)
    with wave.open(str(path), "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(SAMPLE_RATE)
        wav.writeframes((signal * 18_000).astype("<i2").tobytes())
