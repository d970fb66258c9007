"""What tests of the data share: the tiny model's shapes, small media of every kind, and sources profiled whole."""

import io
import tarfile
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import polars as pl
import pytest
import soundfile
from PIL import Image

from dflop.config import DataConfig, VideoConfig
from dflop.shapes import ChatTokenizer, ShapeProfiler, ShapeReader, Source, list_shards, profile_shard
from dflop.shapes.manifests.formats import open_reader


@pytest.fixture(scope="session")
def reader(tiny_spec) -> ShapeReader:
    return ShapeReader(tiny_spec.rules, DataConfig(video=VideoConfig(fps=1.0, max_frames=16)))


@pytest.fixture(scope="session")
def profile_records(reader, tokenizer) -> Callable[..., pl.DataFrame]:
    """`profile_records(raw_records, media_root)`: their rows, without any manifest."""

    def run(
        raw_records: list,
        media_root: Path,
        *,
        max_llm_tokens: int = 100_000,
        trust_sizes: bool = False,
        tokenizer: ChatTokenizer = tokenizer,
    ) -> pl.DataFrame:
        source = Source(name="it", path=Path("it.json"), media_root=media_root, trust_sizes=trust_sizes)
        profiler = ShapeProfiler(source=source, reader=reader, tokenizer=tokenizer, max_llm_tokens=max_llm_tokens)
        return profiler.profile(raw_records)

    return run


@pytest.fixture(scope="session")
def profile_source(reader) -> Callable[..., pl.DataFrame]:
    """`profile_source(source)`: the rows of all its shards, numbered through, as the workflow's jobs make them."""

    def run(
        source: Source,
        *,
        samples_per_shard: int = 10,
        max_llm_tokens: int = 100_000,
        num_workers: int = 1,
        reader: ShapeReader = reader,
    ) -> pl.DataFrame:
        frames = []
        for shard in list_shards(source, samples_per_shard, 0):
            frame = profile_shard(
                source,
                shard,
                seed=0,
                reader=reader,
                tokenizer_folder=None,
                max_llm_tokens=max_llm_tokens,
                num_workers=num_workers,
            )
            assert len(frame) == shard.num_records
            frames.append(frame.with_columns(pl.col("row") + shard.start))
        return pl.concat(frames)

    return run


@pytest.fixture(scope="session")
def write_clip() -> Callable[..., None]:
    """`times`: when each frame is shown, in frames; `header_first`: as clips that are streamed have it."""

    def write(
        path: Path,
        num_frames: int = 24,
        fps: int = 8,
        size: tuple[int, int] = (64, 48),
        title: str = "A clip",
        times: Iterable[int] | None = None,
        header_first: bool = False,
    ) -> None:
        options = {"movflags": "faststart"} if header_first and path.suffix == ".mp4" else {}
        with av.open(str(path), "w", options=options) as container:
            container.metadata["title"] = title
            stream = container.add_stream("mpeg4", rate=fps)
            stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
            for number, time in zip(range(num_frames), times or range(num_frames), strict=True):
                shade = np.full((size[1], size[0], 3), number * 5 % 256, dtype=np.uint8)
                frame = av.VideoFrame.from_ndarray(shade, format="rgb24")
                frame.pts, frame.time_base = time, Fraction(1, fps)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))

    return write


@pytest.fixture(scope="session")
def media(tmp_path_factory, write_clip) -> Path:
    """A folder with pictures of three formats (one turned by its EXIF data), a clip and a sound."""
    folder = tmp_path_factory.mktemp("few")
    rng = np.random.default_rng(0)
    for name, (height, width) in {"wide.png": (60, 190), "tall.jpg": (150, 70), "small.webp": (20, 30)}.items():
        exif = Image.Exif()
        if name == "tall.jpg":
            exif[0x0112] = 6
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name, exif=exif)
    write_clip(folder / "clip.mp4")
    soundfile.write(folder / "tone.wav", np.sin(np.arange(16_000) / 20), 16_000)
    return folder


@pytest.fixture(scope="session")
def write_tar() -> Callable[..., Path]:
    """`write_tar({key: {suffix: content}})`: an archive whose members are named by their group's key and a suffix."""

    def write(groups: dict[str, dict[str, bytes]], path: str = "train.tar") -> Path:
        with tarfile.open(path, "w") as archive:
            for key, members in groups.items():
                for suffix, content in members.items():
                    member = tarfile.TarInfo(f"{key}{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        return Path(path)

    return write


@pytest.fixture(scope="session")
def records_of() -> Callable[[Path], list]:
    """`records_of(path)`: what a manifest's reader gives, record by record, the same in any order."""

    def read(path: Path) -> list[Any]:
        reader = open_reader(path)
        spans = list(reader.scan())
        records = [reader.read(span.start, span.end) for span in spans]
        backwards = [reader.read(span.start, span.end) for span in reversed(spans)]
        assert list(map(str, reversed(backwards))) == list(map(str, records))
        reader.close()
        return records

    return read
