"""Qwen3-VL's encoder as a stage, and how the whole model is cut into stages.

The hidden states after some of the encoder's layers are features, too (DeepStack). They are concatenated to the hidden
states, along the hidden dimension, up to the last stage. There a merger turns each of them into features that an early
layer of the LLM takes (`LlmStage`).
"""

import torch
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

from dflop.models.attention import OneSegment
from dflop.models.division import Division, check_kind
from dflop.models.microbatch import EncoderBatch
from dflop.models.qwen2_5_vl.stages import cut_vision, exact_in_float64
from dflop.models.stages import EncoderStage, LlmStage, cut_llm

__all__ = ["VisionStage", "cut"]

modeling.apply_rotary_pos_emb_vision = exact_in_float64(modeling.apply_rotary_pos_emb_vision)


def cut(hf: Qwen3VLForConditionalGeneration, module: str, layers: range) -> EncoderStage | LlmStage:
    """The stage of these layers of a module, cut in place from the whole model."""
    num_deepstack = len(hf.config.vision_config.deepstack_visual_indexes)
    if module == "llm":
        return cut_llm(hf, layers, of_encoders=("visual",), kind="qwen3", num_deepstack=num_deepstack)
    ends = cut_vision(hf, layers)
    if not ends["is_first"]:
        hf.model.visual.pos_embed = None
    if not ends["is_last"]:
        hf.model.visual.deepstack_merger_list = None
    return VisionStage(hf, layers, **ends)


class VisionStage(EncoderStage):
    """The vision transformer's layers and the mergers."""

    layer_name = r"\bblocks\.\d+"

    @property
    def reads_records(self) -> bool:
        """Every layer needs to know where pictures end."""
        return True

    def division(self) -> Division:
        check_kind(self.hf.config.vision_config.model_type, ("qwen3_vl_vision",))
        layers, mergers = "model.visual.blocks.*", ("model.visual.merger", "model.visual.deepstack_merger_list.*")
        return Division(
            blocks=(f"{layers}.attn", f"{layers}.mlp", *mergers),
            columns=("qkv", "linear_fc1"),
            rows=("proj", "linear_fc2"),
            stacked={"qkv": 3},
            sizes=("num_heads",),
        )

    def hidden_shape(self, num_items: int, layer: int) -> tuple[int, ...]:
        """[num_patches, hidden_size x (1 + the number of earlier layers whose outputs are features)]."""
        config = self.hf.config.vision_config
        num_carried = sum(index < layer for index in config.deepstack_visual_indexes)
        return (num_items * config.spatial_merge_size**2, config.hidden_size * (1 + num_carried))

    def embed(self, batch: EncoderBatch) -> torch.Tensor:
        """Embedded patches [num_patches, hidden_size] plus the learned positions: those of a square grid, interpolated
        to each picture's grid."""
        tower = self.hf.model.visual
        patches = tower.patch_embed(batch.items)
        positions = tower.pos_embed(batch.layout.corners) * batch.layout.weights[:, :, None]
        return patches + positions.sum(1).to(patches.dtype)

    def encode(self, hidden: torch.Tensor, batch: EncoderBatch) -> list[torch.Tensor]:
        """The outputs so far that are features, in layer order, then the output of this stage's last layer."""
        layout, tower, config = batch.layout, self.hf.model.visual, self.hf.config.vision_config
        whole, rotary = OneSegment(hidden), tower.rotary_pos_emb(hidden, layout.positions)
        *features, last = hidden.split(config.hidden_size, dim=-1)
        for index in self.layers:
            last = tower.blocks[index](last, cu_seqlens=whole, position_embeddings=rotary, segment_ends=layout.pictures)
            # More than one in a model that is measured shallow (`with_depth`).
            features += [last] * config.deepstack_visual_indexes.count(index)
        return [*features, last]

    def onward(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """The features so far, concatenated with the last hidden states."""
        return torch.cat(outputs, dim=-1)

    def finish(self, outputs: list[torch.Tensor], batch: EncoderBatch) -> list[torch.Tensor]:
        """Features of each sample, [kept_tokens, feature_size]: those of the last layer, then those of the others."""
        tower, (*features, last) = self.hf.model.visual, outputs
        made = [tower.merger(last)]
        made += [merger(own.contiguous()) for merger, own in zip(tower.deepstack_merger_list, features, strict=True)]
        of_samples = torch.cat(made, dim=-1).split([sum(own.num_items for own in media) for media in batch.media])
        return [own[:kept] for own, kept in zip(of_samples, batch.kept_tokens, strict=True)]
