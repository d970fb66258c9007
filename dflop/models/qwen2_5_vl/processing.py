"""Patches for Qwen2.5-VL's encoder, through transformers' own image processor.

Frames go through the same resize as `Qwen2VLVideoProcessor` applies, which itself needs torchvision.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dflop.models.processor_files import pixel_values_of, read_image_processor, write_processor
from dflop.models.qwen2_5_vl.shapes import PixelLimits
from dflop.models.spec import ModelSpec

__all__ = ["Qwen25VlPatches", "size_within"]

_NAMED_TOKENS = {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
_PLACEHOLDERS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}


class Qwen25VlPatches:
    """From decoded pictures to the encoder's items, each of which is the patches of one token."""

    processor_class = "Qwen2_5_VLProcessor"
    video_processor_type = "Qwen2VLVideoProcessor"
    # Mean and deviation of colours, if no checkpoint sets them and they are not transformers' defaults.
    colours: Mapping[str, list[float]] = MappingProxyType({})
    # Tokens that the processor reads from the tokenizer, and further ones that its chat template uses.
    named_tokens: Mapping[str, str] = _NAMED_TOKENS
    template_tokens: Mapping[str, str] = _PLACEHOLDERS

    def __init__(self, spec: ModelSpec, checkpoint: Path | None = None) -> None:
        self.rules, self.checkpoint = spec.rules, checkpoint
        rules = self.rules
        self.patch_values = 3 * rules.temporal_patch_size * rules.patch_size**2
        self.item_shape = (rules.merge_size**2, self.patch_values)
        usual = Qwen2VLImageProcessorPil(
            size=size_within(rules.picture),
            patch_size=rules.patch_size,
            temporal_patch_size=rules.temporal_patch_size,
            merge_size=rules.merge_size,
            **self.colours,
        )
        self.processor = read_image_processor(checkpoint, usual)
        self.pixel_values = pixel_values_of(self.processor, self.patch_values // 3)

    def save(self, folder: Path) -> None:
        """Write the processor's files, and name the tokens that it asks the tokenizer for."""
        write_processor(
            folder,
            self.checkpoint,
            images=self.processor,
            processor_class=self.processor_class,
            video_processor_type=self.video_processor_type,
            fields={},
            of_videos=self.of_videos(),
            named_tokens=self.named_tokens,
            template_tokens=self.template_tokens,
        )

    def images(self, images: list[Image.Image]) -> list[np.ndarray]:
        """Items of each of a sample's pictures, uint8 [num_items, patches a token, values a patch]."""
        made = self.processor(images, do_rescale=False, do_normalize=False, return_tensors=None)
        items = made["pixel_values"].astype(np.uint8).reshape(-1, *self.item_shape)  # of whole numbers
        counts = np.prod(made["image_grid_thw"], axis=1) // self.item_shape[0]
        return np.split(items, np.cumsum(counts)[:-1])

    def frames(self, frames: list[Image.Image], num_frames: int | None = None) -> np.ndarray:
        """Items of a clip, step after step in time, uint8 [num_items, patches a token, values a patch]. If the last
        step lacks frames, the last frame is repeated."""
        rules, processor = self.rules, self.processor
        rows, columns = rules.patches_of_frame(num_frames or len(frames), *frames[0].size)
        size = SizeDict(height=rows * rules.patch_size, width=columns * rules.patch_size)
        made = []
        for frame in frames:
            # `PilBackend.resize` takes a size; the image processor's own `resize` takes limits for a picture.
            pixels = np.asarray(frame).transpose(2, 0, 1)
            made.append(PilBackend.resize(processor, pixels, size=size, resample=processor.resample))
        made += [made[-1]] * (-len(made) % rules.temporal_patch_size)
        return self._patches(np.stack(made))

    def of_videos(self) -> dict[str, Any]:
        """The video processor's settings that differ from the image processor's."""
        return {"size": size_within(self.rules.frame)}

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
        # New order of axes: step; row and column of the token; row and column of the patch in it; channel; frame of
        # the step; row and column of the pixel.
        return parts.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, *self.item_shape)


def size_within(limits: PixelLimits) -> dict[str, int]:
    """Limits in the form of the processors' `size` setting."""
    return {"shortest_edge": limits.least, "longest_edge": limits.most}
