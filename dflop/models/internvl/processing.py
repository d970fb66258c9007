"""Pixels for InternVL's encoder, through transformers' own image processor.

Frames go through the same resize as `InternVLVideoProcessor` applies, which itself needs torchvision.
"""

from pathlib import Path

import numpy as np
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from dflop.models.processor_files import pixel_values_of, read_image_processor, write_processor
from dflop.models.spec import ModelSpec

__all__ = ["InternvlPixels"]

_NAMED_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


class InternvlPixels:
    """From decoded pictures to the encoder's items."""

    def __init__(self, spec: ModelSpec, checkpoint: Path | None = None) -> None:
        self.rules, self.checkpoint, side = spec.rules, checkpoint, spec.rules.image_size
        usual = GotOcr2ImageProcessorPil(size={"height": side, "width": side})
        self.processor = read_image_processor(checkpoint, usual)
        self.item_shape, self.pixel_values = (3, side, side), pixel_values_of(self.processor, side**2)

    def save(self, folder: Path) -> None:
        """Write the processor's files, and name the tokens that it asks the tokenizer for."""
        write_processor(
            folder,
            self.checkpoint,
            images=self.processor,
            processor_class="InternVLProcessor",
            video_processor_type="InternVLVideoProcessor",
            fields={"image_seq_length": self.rules.tokens_per_tile},
            named_tokens=_NAMED_TOKENS,
            template_tokens={"image_token": _NAMED_TOKENS["context_image_token"]},
        )

    def images(self, images: list[Image.Image]) -> list[np.ndarray]:
        """Tiles of each of a sample's pictures, uint8 [num_items, 3, image_size, image_size]."""
        made = self.processor(
            images,
            crop_to_patches=True,
            min_patches=self.rules.min_tiles,
            max_patches=self.rules.most_tiles_of_each(len(images)),
            do_rescale=False,
            do_normalize=False,
            return_tensors=None,
        )
        return np.split(np.stack(made["pixel_values"]), np.cumsum(made["num_patches"])[:-1])

    def frames(self, frames: list[Image.Image], num_frames: int | None = None) -> np.ndarray:
        """One item a frame, uint8 [num_frames, 3, image_size, image_size]."""
        made = self.processor(frames, crop_to_patches=False, do_rescale=False, do_normalize=False, return_tensors=None)
        return np.stack(made["pixel_values"])
