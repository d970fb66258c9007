"""Pixels for LLaVA-OneVision's encoder, through transformers' own image processor.

Frames go through the same resize as `LlavaOnevisionVideoProcessor` applies, which itself needs torchvision.
"""

from pathlib import Path

import numpy as np
from PIL import Image
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from dflop.models.processor_files import pixel_values_of, read_image_processor, write_processor
from dflop.models.spec import ModelSpec

__all__ = ["LlavaOnevisionPixels"]


class LlavaOnevisionPixels:
    """From decoded pictures to the encoder's items."""

    def __init__(self, spec: ModelSpec, checkpoint: Path | None = None) -> None:
        self.spec, self.checkpoint, side = spec, checkpoint, spec.rules.image_size
        usual = LlavaOnevisionImageProcessorPil(size={"height": side, "width": side})
        self.processor = read_image_processor(checkpoint, usual)
        self.processor.image_grid_pinpoints = [list(pair) for pair in spec.rules.grid_pinpoints]
        self.item_shape, self.pixel_values = (3, side, side), pixel_values_of(self.processor, side**2)

    def save(self, folder: Path) -> None:
        """Write the processor's files."""
        config = self.spec.hf_config
        write_processor(
            folder,
            self.checkpoint,
            images=self.processor,
            processor_class="LlavaOnevisionProcessor",
            video_processor_type="LlavaOnevisionVideoProcessor",
            fields={
                "num_image_tokens": self.spec.rules.tokens_per_item,
                "vision_feature_select_strategy": config.get("vision_feature_select_strategy", "full"),
                "vision_aspect_ratio": config.get("vision_aspect_ratio", "anyres_max_9"),
            },
        )

    def images(self, images: list[Image.Image]) -> list[np.ndarray]:
        """Crops of each of a sample's pictures, uint8 [num_items, 3, image_size, image_size]."""
        made = self.processor([images], do_pad=False, do_rescale=False, do_normalize=False, return_tensors=None)
        return list(made["pixel_values"])

    def frames(self, frames: list[Image.Image], num_frames: int | None = None) -> np.ndarray:
        """One item a frame, uint8 [num_frames, 3, image_size, image_size]."""
        processor = self.processor
        return np.stack(
            [
                processor.resize(np.asarray(frame).transpose(2, 0, 1), size=processor.size, resample=processor.resample)
                for frame in frames
            ]
        )
