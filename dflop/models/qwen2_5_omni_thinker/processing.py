"""Items for Qwen2.5-Omni's encoders: patches as Qwen2.5-VL's, and mel frames by transformers' own feature extractor."""

import json
from pathlib import Path
from types import MappingProxyType

import numpy as np
from transformers import WhisperFeatureExtractor

from dflop.models.qwen2_5_omni_thinker.shapes import SAMPLES_A_FRAME
from dflop.models.qwen2_5_vl.processing import Qwen25VlPatches
from dflop.models.spec import SOUND_RATE_HZ, ModelSpec

__all__ = ["Qwen25OmniPatches", "Qwen25OmniSounds"]

# Samples of silence after a sound, for the windows of its last frames, as in the processor's own padding.
_SILENCE = 4 * SAMPLES_A_FRAME


class Qwen25OmniPatches(Qwen25VlPatches):
    """From decoded pictures to the vision encoder's items, each the patches of one token."""

    processor_class = "Qwen2_5OmniProcessor"
    template_tokens = MappingProxyType({})
    named_tokens = MappingProxyType(
        {
            "image_token": "<|IMAGE|>",
            "audio_token": "<|AUDIO|>",
            "video_token": "<|VIDEO|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        }
    )


class Qwen25OmniSounds:
    """From decoded sounds to the audio encoder's items, each a chunk of mel frames."""

    pixel_values = None

    def __init__(self, spec: ModelSpec, checkpoint: Path | None = None) -> None:
        self.rules, num_mels = spec.rules, spec.hf_config["audio_config"].get("num_mel_bins", 128)
        self.item_shape = (num_mels, self.rules.chunk_frames)
        self.processor = WhisperFeatureExtractor(
            feature_size=num_mels,
            chunk_length=self.rules.most_frames * SAMPLES_A_FRAME // SOUND_RATE_HZ,
            return_attention_mask=True,
        )
        self._keeps_files = checkpoint is not None

    def save(self, folder: Path) -> None:
        """Add the feature extractor to the processor's file, unless the files of a checkpoint, which has one, were
        kept."""
        path = folder / "processor_config.json"
        if self._keeps_files and (path.is_file() or (folder / "preprocessor_config.json").is_file()):
            return
        whole = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        settings = json.loads(self.processor.to_json_string())
        path.write_text(json.dumps(whole | {"feature_extractor": settings}, indent=2) + "\n", encoding="utf-8")

    def sound(self, samples: np.ndarray) -> np.ndarray:
        """Chunks of a sound, float32 [num_items, num_mel_bins, chunk_frames]; the last one is padded with zeros."""
        heard = samples[: self.rules.most_frames * SAMPLES_A_FRAME]
        num_frames = -(-len(heard) // SAMPLES_A_FRAME)
        silence = num_frames * SAMPLES_A_FRAME - len(heard) + _SILENCE
        made = self.processor(
            np.pad(heard, (0, silence)),
            sampling_rate=SOUND_RATE_HZ,
            padding=False,
            truncation=False,
            return_tensors="np",
        )
        frames = np.asarray(made["input_features"], dtype=np.float32)[0, :, :num_frames]
        num_mels, chunk = self.item_shape
        frames = np.pad(frames, ((0, 0), (0, -num_frames % chunk)))
        return np.ascontiguousarray(frames.reshape(num_mels, -1, chunk).transpose(1, 0, 2))
