"""The files of a Hugging Face processor: read from a checkpoint, and written beside a trained model.

`AutoProcessor` makes a processor from these files and the tokenizer's. Its video processors need torchvision; their
settings are written without it.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BaseImageProcessor

from dflop.models.microbatch import PixelValues

__all__ = ["pixel_values_of", "read_image_processor", "write_processor"]

_PROCESSOR, _IMAGES = "processor_config.json", "preprocessor_config.json"
_FILES = (_PROCESSOR, _IMAGES, "video_preprocessor_config.json")
_SHARED = ("size", "resample", "do_resize", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
_SHARED += ("patch_size", "temporal_patch_size", "merge_size")

_Images = TypeVar("_Images", bound=BaseImageProcessor)


def read_image_processor(checkpoint: Path | None, usual: _Images) -> _Images:
    """The checkpoint's image processor, with the `size` of the usual one; the usual one if the checkpoint has none."""
    if checkpoint is None:
        return usual
    whole = _read(checkpoint / _PROCESSOR)
    if "image_processor" in whole or (checkpoint / _IMAGES).is_file():
        return type(usual).from_pretrained(checkpoint, size=usual.to_dict()["size"])
    return usual


def pixel_values_of(processor: PilBackend, plane: int) -> PixelValues:
    """What an image processor makes of the bytes of pictures that have their size, for items with such a `plane`."""
    pixels = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (3, 16, 16))
    if processor.do_rescale:
        pixels = processor.rescale(pixels, scale=processor.rescale_factor)
    if processor.do_normalize:
        pixels = processor.normalize(pixels, mean=processor.image_mean, std=processor.image_std)
    return PixelValues(torch.from_numpy(pixels.astype(np.float32).reshape(3, 256)), plane)


def write_processor(
    folder: Path,
    checkpoint: Path | None,
    *,
    images: BaseImageProcessor,
    processor_class: str,
    video_processor_type: str,
    fields: Mapping[str, Any],
    of_videos: Mapping[str, Any] | None = None,
    named_tokens: Mapping[str, str] | None = None,
    template_tokens: Mapping[str, str] | None = None,
) -> None:
    """Write a processor's files into `folder`, which has the tokenizer's files: the checkpoint's, if it has any.

    Otherwise the settings of a `processor_class` with `fields` are written, with a video processor that treats frames
    as `images` treats pictures, except for the settings in `of_videos`.
    `named_tokens` are the tokens that the processor reads from its tokenizer, by attribute. If the tokenizer's config
    lacks one, all of them are written into it, with `template_tokens` for its chat template.
    """
    found = [checkpoint / name for name in _FILES if (checkpoint / name).is_file()] if checkpoint else []
    for file in found:
        shutil.copyfile(file, folder / file.name)
    if not found:
        settings = images.to_dict()
        whole = {
            "processor_class": processor_class,
            **fields,
            "image_processor": settings,
            "video_processor": {key: settings[key] for key in _SHARED if key in settings}
            | {"video_processor_type": video_processor_type}
            | (dict(of_videos) if of_videos else {}),
        }
        (folder / _PROCESSOR).write_text(json.dumps(whole, indent=2, default=list) + "\n", encoding="utf-8")
    if named_tokens:
        _name_tokens(folder / "tokenizer_config.json", named_tokens, template_tokens or {})


def _name_tokens(path: Path, named_tokens: Mapping[str, str], template_tokens: Mapping[str, str]) -> None:
    settings = _read(path)
    known = settings.get("extra_special_tokens")
    known = known if isinstance(known, dict) else {}
    if all(settings.get(name) or known.get(name) for name in named_tokens):
        return
    settings["extra_special_tokens"] = {**known, **named_tokens, **template_tokens}
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
