"""Patches for Qwen3-VL's encoder, made as Qwen2.5-VL's, through transformers' own image processor.

A clip's frames get the size that `Qwen3VLVideoProcessor`, which needs torchvision, would give them.
"""

from types import MappingProxyType
from typing import Any

from dflop.models.qwen2_5_vl.processing import Qwen25VlPatches, size_within

__all__ = ["Qwen3VlPatches"]


class Qwen3VlPatches(Qwen25VlPatches):
    """From decoded pictures to the encoder's items, each of which is the patches of one token."""

    processor_class = "Qwen3VLProcessor"
    video_processor_type = "Qwen3VLVideoProcessor"
    colours = MappingProxyType({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]})

    def of_videos(self) -> dict[str, Any]:
        return {
            "size": size_within(self.rules.clip),
            "cap_pixels_per_frame": self.rules.max_frame_tokens is not None,
        }
