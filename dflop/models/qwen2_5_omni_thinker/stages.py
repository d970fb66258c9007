"""Qwen2.5-Omni's encoders as stages, and how the whole model is cut into stages."""

import torch
from torch.nn.functional import gelu
from transformers import Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

from dflop.models.attention import OneSegment
from dflop.models.division import Division, check_kind
from dflop.models.microbatch import EncoderBatch
from dflop.models.qwen2_5_omni_thinker.layout import num_positions
from dflop.models.qwen2_5_vl import stages as qwen2_5_vl
from dflop.models.stages import EncoderStage, LlmStage, cut_llm, keep_layers

__all__ = ["AudioStage", "VisionStage", "cut"]

modeling.apply_rotary_pos_emb_vision = qwen2_5_vl.exact_in_float64(modeling.apply_rotary_pos_emb_vision)


def cut(hf: Qwen2_5OmniThinkerForConditionalGeneration, module: str, layers: range) -> EncoderStage | LlmStage:
    """The stage of these layers of a module, cut in place from the whole model."""
    if module == "llm":
        return cut_llm(hf, layers, of_encoders=("visual", "audio_tower"), kind="qwen2")
    if module == "vision":
        hf.model.audio_tower = None
        return VisionStage(hf, layers, **qwen2_5_vl.cut_vision(hf, layers))
    hf.model.visual = hf.model.language_model = hf.lm_head = None
    tower = hf.model.audio_tower
    is_first, is_last = keep_layers(tower.layers, layers)
    if not is_first:
        tower.conv1 = tower.conv2 = tower.positional_embedding = None
    if not is_last:
        tower.ln_post = tower.proj = tower.audio_bos_eos_token = None
    return AudioStage(hf, layers, is_first=is_first, is_last=is_last)


class VisionStage(qwen2_5_vl.VisionStage):
    """The vision transformer's layers and the merger. Queries, keys and values have a matrix each."""

    def division(self) -> Division:
        check_kind(self.hf.config.vision_config.model_type, ("qwen2_5_omni_vision_encoder",))
        return Division(
            blocks=("model.visual.blocks.*.attn", "model.visual.blocks.*.mlp", "model.visual.merger.mlp"),
            columns=("q", "k", "v", "gate_proj", "up_proj", "0"),
            rows=("proj", "down_proj", "2"),
            sizes=("num_heads",),
        )


class AudioStage(EncoderStage):
    """The audio encoder's layers, pooling and the projector. Every chunk has the same number of positions in the
    layers. Those after a sound's end attend only to each other, and are not used."""

    # Embeddings of the beginning and the end of a sound, for generated speech.
    module = "audio"
    unread = ("model.audio_tower.audio_bos_eos_token.weight",)

    @property
    def reads_records(self) -> bool:
        """Every layer needs to know where sounds end."""
        return True

    def part_of(self, name: str) -> str:
        if ".layers." in name:
            return "layer"
        return "first" if ".conv" in name else "last"

    def division(self) -> Division:
        check_kind(self.hf.config.audio_config.model_type, ("qwen2_5_omni_audio_encoder",))
        return Division(
            blocks=("model.audio_tower.layers.*.self_attn", "model.audio_tower.layers.*"),
            columns=("q_proj", "k_proj", "v_proj", "fc1"),
            rows=("out_proj", "fc2"),
            sizes=("num_heads",),
        )

    def hidden_shape(self, num_items: int, layer: int) -> tuple[int, ...]:
        """[num_positions, hidden_size]."""
        config = self.hf.config.audio_config
        return (num_items * config.n_window, config.d_model)

    def embed(self, batch: EncoderBatch) -> torch.Tensor:
        """Positions of all chunks, [num_positions, hidden_size]."""
        tower = self.hf.model.audio_tower
        is_sound = torch.arange(batch.items.shape[2], device=batch.items.device) < batch.layout.num_frames[:, None]
        hidden = gelu(tower.conv1(batch.items)) * is_sound.unsqueeze(1)
        hidden = gelu(tower.conv2(hidden)).transpose(1, 2)
        positions = tower.positional_embedding.positional_embedding[: hidden.shape[1]]
        return (hidden + positions.to(hidden.dtype)).flatten(0, 1)

    def encode(self, hidden: torch.Tensor, batch: EncoderBatch) -> list[torch.Tensor]:
        """The output of this stage's last layer."""
        whole, ends = OneSegment(hidden), batch.layout.sounds
        for index in self.layers:
            (hidden, *_) = self.hf.model.audio_tower.layers[index](hidden, cu_seqlens=whole, segment_ends=ends)
        return [hidden]

    def finish(self, outputs: list[torch.Tensor], batch: EncoderBatch) -> list[torch.Tensor]:
        """Features of each sample, [kept_tokens, hidden_size of the LLM]."""
        tower, hidden = self.hf.model.audio_tower, outputs[-1]
        at = batch.layout.pairs
        features = tower.proj(tower.ln_post((hidden[at] + hidden[at + 1]) / 2))
        of_samples = [sum(num_positions(medium.grid[0]) // 2 for medium in media) for media in batch.media]
        return [own[:kept] for own, kept in zip(features.split(of_samples), batch.kept_tokens, strict=True)]
