"""Whether a rank's loaders keep up with an H100 that trains the 7B preset: pictures of a megapixel, and clips."""

import json
from pathlib import Path

import av
import numpy as np
from PIL import Image
from small_runs import prepare

from dflop.config import load_config
from dflop.loading.measure import measure_loading
from dflop.models import load_model_spec
from dflop.shapes import load_samples
from tests.gpu.check import Figures, Setting

__all__ = ["beside_training"]

# FLOP/s of training, and FLOPs a token and a tile (729 patches) of SigLIP, forward and backward.
_TRAINED_FLOPS_PER_S = 0.5 * 989e12
_FLOPS_A_TOKEN, _FLOPS_A_TILE = 6 * 7.6e9, 6 * 0.4e9 * 729
_NUM_PICTURES, _NUM_CLIPS = 16, 4


def beside_training(setting: Setting) -> Figures:
    """Samples a second of one process, and the processes that a rank needs so that its GPU never waits."""
    folder = setting.folder / "loaders"
    folder.mkdir(exist_ok=True)
    manifest = _write_samples(folder, is_tiny=setting.is_tiny)
    preset = "tiny" if setting.is_tiny else "llava_ov_7b"
    made, config = prepare(folder, [manifest], "llava_onevision", preset, max_llm_tokens=16_384)
    measured = measure_loading(load_config(config), made / "shapes.duckdb")
    samples, _ = load_samples(made / "shapes.duckdb", load_model_spec(load_config(config).model).encoders)
    is_clip = np.array(["clip" in name for name in samples.sample_id])
    figures = {}
    for modality, chosen in (("image", ~is_clip), ("video", is_clip)):
        own = measured.filter(measured["modality"] == modality)
        if own["num_unreadable"].sum():
            raise RuntimeError(f"{modality}: {own['num_unreadable'].sum()} media could not be read")
        tokens, tiles = samples.llm_tokens[chosen].mean(), samples.num_items[chosen].sum(axis=1).mean()
        computed_s = (tokens * _FLOPS_A_TOKEN + tiles * _FLOPS_A_TILE) / _TRAINED_FLOPS_PER_S
        loaded_s = float(own["seconds"].sum())
        figures |= {
            f"samples a second of a process, {modality}": 1 / loaded_s,
            f"tokens and tiles of a sample, {modality}": f"{tokens:.0f} and {tiles:.1f}",
            f"processes a rank, {modality}": loaded_s / computed_s,
        }
    return figures


def _write_samples(folder: Path, *, is_tiny: bool) -> Path:
    """Records of JPEG pictures of 1152 x 896 pixels, and of clips of 32 seconds."""
    rng, records = np.random.default_rng(0), []
    said = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "Something that was drawn."}]
    for number in range(2 if is_tiny else _NUM_PICTURES):
        _drawn(rng, 1152, 896).save(folder / f"{number}.jpg", quality=90)
        records.append({"id": f"picture-{number}", "image": f"{number}.jpg", "conversations": said})
    said = [{**said[0], "value": "<video>\nWhat happens?"}, said[1]]
    for number in range(1 if is_tiny else _NUM_CLIPS):
        _write_clip(folder / f"{number}.mp4", rng, num_s=2 if is_tiny else 32)
        records.append({"id": f"clip-{number}", "video": f"{number}.mp4", "conversations": said})
    path = folder / "train.json"
    path.write_text(json.dumps(records))
    return path


def _drawn(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Blots of colour with grain, about as large in JPEG as a photo."""
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    grain = rng.normal(0, 6, (height, width, 1))
    values = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) + grain
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def _write_clip(path: Path, rng: np.random.Generator, *, num_s: int) -> None:
    """640 x 360 pixels at 24 frames a second, with a window that moves over one drawn picture."""
    whole = _drawn(rng, 1280, 720)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
        for frame in range(24 * num_s):
            left = frame * 640 // (24 * num_s)
            window = whole.crop((left, left // 2, left + 640, left // 2 + 360))
            container.mux(stream.encode(av.VideoFrame.from_image(window)))
        container.mux(stream.encode(None))
