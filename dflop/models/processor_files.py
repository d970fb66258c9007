"""The files of a Hugging Face processor: read from a checkpoint, and written beside a trained model.

`AutoProcessor` makes a processor from these files and the tokenizer's. Its video processors need torchvision; their
settings are written without it.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BaseImageProcessor

from dflop.base import UserError
from dflop.models.checkpoint import read_image_fields
from dflop.models.microbatch import PixelValues

__all__ = ["pixel_values_of", "read_image_processor", "write_processor"]

_PROCESSOR, _IMAGES = "processor_config.json", "preprocessor_config.json"
_FILES = (_PROCESSOR, _IMAGES, "video_preprocessor_config.json")
_SHARED = ("size", "resample", "do_resize", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
_SHARED += ("patch_size", "temporal_patch_size", "merge_size")

# What a checkpoint's image processor decides of pictures' values. Sizes follow from the model, as shapes do: others
# would give other items than were counted, in any amount.
_OF_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "resample": (lambda value: type(value) is int and 0 <= value <= 5, "one of PIL's filters, 0 to 5"),
    "do_rescale": (lambda value: isinstance(value, bool), "true or false"),
    "rescale_factor": (lambda value: _is_number(value), "a number"),
    "do_normalize": (lambda value: isinstance(value, bool), "true or false"),
    "image_mean": (lambda value: _is_colour(value), "a list of three numbers"),
    "image_std": (lambda value: _is_colour(value) and all(value), "a list of three numbers that are not 0"),
    # These are looked at alone: with other values the pictures would have other sizes than transformers gives them.
    "do_resize": (lambda value: value is True, "true: every picture is resized as the model's rules say"),
    "do_center_crop": (lambda value: value is False, "false: nothing is cropped off"),
}

_Images = TypeVar("_Images", bound=BaseImageProcessor)


def read_image_processor(checkpoint: Path | None, usual: _Images) -> _Images:
    """The usual image processor, with a checkpoint's resampling, rescaling and normalising, if the checkpoint has one.

    Raises:
        UserError: naming the file and the key whose value is of another kind.
    """
    if checkpoint is None:
        return usual
    path, fields = read_image_fields(checkpoint)
    own = {key: fields[key] for key in _OF_VALUES if fields.get(key) is not None}
    for key, value in own.items():
        is_good, wanted = _OF_VALUES[key]
        if not is_good(value):
            raise UserError(f"{path} has `{key}` {json.dumps(value)[:80]}; it must be {wanted}")
    return type(usual).from_dict(usual.to_dict() | own)


def _is_colour(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


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
