"""Patches for Qwen2.5-VL's encoder, through transformers' own image processor.

Frames go through the same resize, rescale and normalise as `Qwen2VLVideoProcessor` applies, which itself needs
torchvision.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dflop.models.processor_files import read_image_processor, write_processor
from dflop.models.qwen2_5_vl.shapes import PixelLimits
from dflop.models.spec import ModelSpec

__all__ = ["Qwen25VlPatches"]

_NAMED_TOKENS = {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
_PLACEHOLDERS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}


class Qwen25VlPatches:
    """From decoded pictures to the encoder's items, each the patches of one token."""

    processor_class = "Qwen2_5_VLProcessor"
    # What the processor asks the tokenizer for, and its chat template besides.
    named_tokens: Mapping[str, str] = _NAMED_TOKENS
    template_tokens: Mapping[str, str] = _PLACEHOLDERS

    def __init__(self, spec: ModelSpec, checkpoint: Path | None = None) -> None:
        self.rules, self.checkpoint = spec.rules, checkpoint
        rules = self.rules
        self.patch_values = 3 * rules.temporal_patch_size * rules.patch_size**2
        self.item_shape = (rules.merge_size**2, self.patch_values)
        usual = Qwen2VLImageProcessorPil(
            size=_size(rules.picture),
            patch_size=rules.patch_size,
            temporal_patch_size=rules.temporal_patch_size,
            merge_size=rules.merge_size,
        )
        self.processor = read_image_processor(checkpoint, usual)

    def save(self, folder: Path) -> None:
        """Write the processor's files, and name the tokens that it asks the tokenizer for."""
        write_processor(
            folder,
            self.checkpoint,
            images=self.processor,
            processor_class=self.processor_class,
            video_processor_type="Qwen2VLVideoProcessor",
            fields={},
            of_videos={"size": _size(self.rules.frame)},
            named_tokens=self.named_tokens,
            template_tokens=self.template_tokens,
        )

    def images(self, images: list[Image.Image]) -> list[np.ndarray]:
        """Items of each of a sample's pictures, float32 [num_items, patches of a token, values of a patch]."""
        made = self.processor(images, return_tensors=None)
        items = np.asarray(made["pixel_values"], dtype=np.float32).reshape(-1, *self.item_shape)
        counts = np.prod(made["image_grid_thw"], axis=1) // self.item_shape[0]
        return np.split(items, np.cumsum(counts)[:-1])

    def frames(self, frames: list[Image.Image]) -> np.ndarray:
        """Items of a clip, step after step in time; the last frame is repeated where one is missing."""
        rules, processor = self.rules, self.processor
        made = []
        for frame in frames:
            pixels = processor.resize(
                np.asarray(frame).transpose(2, 0, 1),
                size=SizeDict(**_size(rules.frame)),
                resample=processor.resample,
                factor=rules.token_size,
            )
            pixels = processor.rescale(pixels, scale=processor.rescale_factor)
            made.append(processor.normalize(pixels, mean=processor.image_mean, std=processor.image_std))
        made += [made[-1]] * (-len(made) % rules.temporal_patch_size)
        return self._patches(np.stack(made).astype(np.float32))

    def _patches(self, pixels: np.ndarray) -> np.ndarray:
        """Frames [num_frames, 3, height, width] as items."""
        rules = self.rules
        num_frames, channels, height, width = pixels.shape
        rows, columns = height // rules.token_size, width // rules.token_size
        of_token = (rules.merge_size, rules.patch_size)
        parts = pixels.reshape(
            num_frames // rules.temporal_patch_size,
            rules.temporal_patch_size,
            channels,
            *(rows, *of_token),
            *(columns, *of_token),
        )
        # Steps; a token's row and column; a patch's in it; channels, frames of the step, pixels.
        return parts.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, *self.item_shape)


def _size(limits: PixelLimits) -> dict[str, int]:
    return {"shortest_edge": limits.least, "longest_edge": limits.most}
